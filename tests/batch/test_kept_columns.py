"""Tests for columns that a run copies from its input to its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mindie_mm.batch import Dataset
from mindie_mm.cli import main
from tests.batch.conftest import run_in_process, settings, tokenize, written
from tests.batch.test_forms import packed, tabled
from tests.media_samples import encoded, photograph

ROWS: list[dict[str, Any]] = [
    {"text": "a", "label": 3, "score": 1, "tags": ["x"], "extra": {"k": [None, 1]}},
    {"text": "b", "label": None, "score": 0.5, "tags": [], "extra": 7},
    {"id": "bad", "label": 4, "score": 2, "img": "1.jpg", "text": "c"},
]


def test_the_command_copies_columns_with_the_types_of_all_rows(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", [*ROWS, b"no JSON"])
    done = tokenize(rows, "--output", tmp_path / "run", "--workers", 1, "--keep-columns", "label, score,tags,extra")
    assert done.returncode == 1, done.stderr
    assert "its keys ['img'] would be ignored" in (tmp_path / "run/errors.jsonl").read_text()
    (table,) = (tmp_path / "run").glob("**/*.parquet")
    schema = pq.read_schema(table)
    kept = {"label": pa.int64(), "score": pa.float64(), "tags": pa.list_(pa.string()), "extra": pa.string()}
    assert {name: schema.field(name).type for name in kept} == kept
    samples = Dataset(tmp_path / "run")
    assert [sample.columns["label"] for sample in samples] == [3, None, 4, None], "failed rows keep their columns"
    assert [sample.columns["score"] for sample in samples] == [1.0, 0.5, 2.0, None]
    assert [sample.columns["extra"] for sample in samples] == ['{"k":[null,1]}', "7", None, None]


def test_columns_of_tables_keep_their_types_and_given_types_apply(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 3, "box": [1.5, 2.0], "meta": {"k": 1}, "image": encoded(photograph(size=(60, 40)))}]
    path = tabled(tmp_path / "rows.parquet", rows * 2)
    kept = {"label": "double", "box": "", "meta": ""}
    given = settings(path, columns=("text", "image"), keep_columns=kept)
    run_in_process(given, tmp_path / "run")
    (table,) = (tmp_path / "run").glob("**/*.parquet")
    assert [pq.read_schema(table).field(name).type for name in kept] == [
        pa.float64(),
        pa.list_(pa.float64()),
        pa.string(),
    ]
    sample = Dataset(tmp_path / "run")[1]
    assert (sample.error, len(sample.spans)) == (None, 1)
    assert sample.columns == {"label": 3.0, "box": [1.5, 2.0], "meta": '{"k":1}'}


def test_numbers_that_no_common_type_represents_are_json_texts(tmp_path: Path) -> None:
    """A double does not represent all integers above 2**53, so rounding would change a value."""
    large = 2**53 + 1
    rows = [
        {"text": "a", "mixed": large, "whole": large, "mixes": [large], "wholes": [large], "small": 2**53},
        {"text": "b", "mixed": 0.5, "whole": 1, "mixes": [0.5, 1], "wholes": [1], "small": 0.5},
    ]
    names = rows[0].keys() - {"text"}
    run_in_process(
        settings(written(tmp_path / "rows.jsonl", rows), keep_columns=dict.fromkeys(names, "")), tmp_path / "run"
    )
    samples = Dataset(tmp_path / "run")
    assert [sample.error for sample in samples] == [None, None]
    assert [samples[0].columns[name] for name in ("mixed", "mixes")] == [f"{large}", f"[{large}]"]
    assert [samples[1].columns[name] for name in ("mixed", "mixes")] == ["0.5", "[0.5,1]"]
    for sample, row in zip(samples, rows, strict=True):
        assert {name: sample.columns[name] for name in ("whole", "wholes", "small")} == {
            name: row[name] for name in ("whole", "wholes", "small")
        }


def test_large_integers_of_a_table_beside_doubles_of_another_are_json_texts(tmp_path: Path) -> None:
    large = 2**53 + 1
    tables = [
        tabled(tmp_path / f"{index}.parquet", [{"text": "a", "mixed": mixed, "small": small}])
        for index, (mixed, small) in enumerate([(large, 3), (0.5, 0.5)])
    ]
    given = settings(*tables, columns=("text",), keep_columns={"mixed": "", "small": ""})
    run_in_process(given, tmp_path / "run")
    samples = Dataset(tmp_path / "run")
    assert [sample.columns for sample in samples] == [
        {"mixed": f"{large}", "small": 3.0},
        {"mixed": "0.5", "small": 0.5},
    ]


def test_a_value_of_another_type_than_given_fails_its_row(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": 2}])
    run_in_process(settings(rows, keep_columns={"label": "int64"}), tmp_path / "run")
    bad, good = Dataset(tmp_path / "run")
    assert "the row's label is 'x', which is not of the type int64 of this column" in str(bad.error)
    assert (good.error, good.columns) == (None, {"label": 2})


def test_a_label_in_a_tar_is_not_taken_for_the_missing_text(tmp_path: Path) -> None:
    image = encoded(photograph(size=(60, 40)))
    tar = packed(tmp_path / "t.tar", [("0.jpg", image), ("0.json", json.dumps({"label": 5}).encode())])
    run_in_process(settings(tar, keep_columns={"label": ""}), tmp_path / "run")
    (sample,) = Dataset(tmp_path / "run")
    assert (sample.error, sample.columns) == (None, {"label": 5})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("gone", "rows.jsonl has no row with the key 'gone'. Correct --keep-columns"),
        ("spans", "keep_columns has spans, which is the name of a column of each output table"),
        ("label,label", "keep_columns has label twice"),
        ("label=int65", "the column label has the type 'int65', which is unknown"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused(given: str, why: str, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", ROWS[:2])
    shown = CliRunner().invoke(
        main, ["tokenize", str(rows), "--output", str(tmp_path / "run"), "--keep-columns", given]
    )
    assert (shown.exit_code, why in shown.stderr) == (2, True), shown.output
    assert not (tmp_path / "run").exists()


def test_a_caller_may_change_the_columns_of_a_sample(tmp_path):
    lines = written(tmp_path / "rows.jsonl", [{"text": "a", "boxes": [1, 2]}])
    run_in_process(settings(lines, keep_columns={"boxes": ""}), tmp_path / "run")
    dataset = Dataset(tmp_path / "run")
    dataset[0].columns["boxes"].append(3)
    assert dataset[0].columns == {"boxes": [1, 2]}
