"""Tests for folders of media with tables that describe the media, as in `datasets`' imagefolder."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.input import remote
from mindie_mm.batch.input.gather import gather, gathered_path
from mindie_mm.batch.input.media_folder import unread_tables
from tests.batch.conftest import run_in_process, settings, tokenize, written
from tests.batch.test_forms import tabled
from tests.media_samples import encoded, photograph

IMAGES = [encoded(photograph(size=size)) for size in ((60, 40), (40, 60))]
SPLITS = ("test", "train/more")


def described(folder: Path, form: str, rows: list[dict[str, Any]]) -> None:
    """Write a table of media files."""
    if form == "jsonl":
        written(folder / "metadata.jsonl", rows)
    elif form == "parquet":
        tabled(folder / "metadata.parquet", rows)
    else:
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


def with_splits(root: Path, form: str) -> Path:
    """Write a folder whose two splits have an image of the same name, a text for it, and an image without a text."""
    for split, image in zip(SPLITS, IMAGES, strict=True):
        (root / split / "own").mkdir(parents=True)
        for name in ("a.png", "own/b.png"):
            (root / split / name).write_bytes(image)
        described(root / split, form, [{"file_name": "a.png", "text": f"What is {split}?"}])
    return root


def gathered(given: object, folder: Path, template: str = "", limit: int | None = None) -> tuple[list[Any], Any]:
    """Return the rows to which a folder is converted, and the counts of files that were left out."""
    folder.mkdir(exist_ok=True)
    left_out = gather((str(given),), folder, template, io.BytesIO(), limit)
    return [
        json.loads(line) for line in gathered_path(folder, 0).read_bytes().splitlines() if not line.isspace()
    ], left_out


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_each_split_has_the_rows_of_its_own_table(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = with_splits(tmp_path / "if", form)
    rows, left_out = gathered(root, tmp_path / "rows")
    assert rows == [{"file_name": f"{split}/a.png", "text": f"What is {split}?"} for split in SPLITS]
    assert left_out == Counter({".png": 2}), "no table names the other images"
    assert gathered(root, tmp_path / "rows", limit=1) == (rows[:1], Counter())
    monkeypatch.setattr(remote, "STORES", {"memory"})
    store = fsspec.filesystem("memory")
    try:
        for file in filter(Path.is_file, root.rglob("*")):
            store.pipe(f"/splits/{file.relative_to(root)}", file.read_bytes())
        assert gathered("memory://splits/", tmp_path / "rows") == (rows, left_out)
    finally:
        store.rm("/splits", recursive=True)
    run_in_process(settings(root), tmp_path / "run")
    listed = [{"inputs": [{"image": row["file_name"]}, {"text": row["text"]}]} for row in rows]
    run_in_process(settings(written(root / "rows.jsonl", listed)), tmp_path / "expected")
    for sample, expected in zip(Dataset(tmp_path / "run"), Dataset(tmp_path / "expected"), strict=True):
        assert (sample.error, sample.ids.tolist()) == (None, expected.ids.tolist())
        assert sample.arrays[0]["pixel_values"].tolist() == expected.arrays[0]["pixel_values"].tolist()


def test_tables_of_a_folder_and_of_its_subfolders_are_read_together(tmp_path: Path) -> None:
    root = with_splits(tmp_path / "if", "jsonl")
    (root / "0.png").write_bytes(IMAGES[0])
    top = [b'\xef\xbb\xbf{"file_name": "0.png",  "text": "a", "n": 1.50}', b"no JSON"]
    top += [b'{"file_names": ["test/own/b.png", "./train/more/own/b.png"], "text": "two"}']
    written(root / "metadata.jsonl", [*top, b""])
    (root / "metadata.csv").write_text("file_name,text\n0.png,b\n")
    folder = tmp_path / "rows"
    folder.mkdir()
    left_out = gather((str(root),), folder, "", io.BytesIO())
    assert gathered_path(folder, 0).read_bytes().splitlines()[:3] == top, "rows of the folder itself are unchanged"
    assert left_out == Counter({"metadata.csv": 1}), "all images are named"
    assert unread_tables(left_out, "").startswith("metadata.csv: not read, because the same folder also has")


PLACED: dict[str, tuple[Any, Any]] = {
    "a list": ([{"image": "a.png"}, {"text": "a"}], {"inputs": [{"image": "train/a.png"}, {"text": "a"}]}),
    "frames": ({"videos": [["a.png", "b.png"]]}, {"videos": [["train/a.png", "train/b.png"]]}),
    "options": (
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "train/a.png", "detail": "low"}}]}]},
    ),
    "JSON text": ({"inputs": '[{"image": "a.png"}]'}, {"inputs": [{"image": "train/a.png"}]}),
    "the folder above": ({"image": "../a.png"}, {"image": "train/../a.png"}),
    "no relative paths": (
        same := {"images": ["/a.png", "http://host/a.png", "s3://b/a.png", "data:image/png;base64,AAAA", "", None]},
        same,
    ),
    "other values": (
        other := {"label": "a.png", "text": "a.png", "n": [1.5, 2**70], "tools": [{"image": "a.png"}]},
        other,
    ),
    "calls": (
        called := {"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"image": "a.png"}}]}]},
        called,
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_paths_of_every_form_of_row_start_at_the_folder_of_their_table(case: str, tmp_path: Path) -> None:
    (tmp_path / "if/train").mkdir(parents=True)
    given, expected = PLACED[case]
    written(tmp_path / "if/train/metadata.jsonl", [given])
    assert gathered(tmp_path / "if", tmp_path / "rows")[0] == [expected]


def test_the_command_says_which_files_it_leaves_out(tmp_path: Path) -> None:
    root = with_splits(tmp_path / "if", "jsonl")
    done = tokenize(root, "--output", tmp_path / "run", "--workers", 1, "--select-columns", "file_name,text")
    assert done.stdout.startswith("2 rows, ")
    assert "; left out: 2 files (.png 2); no row failed" in done.stdout
    done = tokenize(root, "--output", tmp_path / "listed", "--workers", 1, "--template", "What?")
    assert done.stdout.startswith("4 rows, ")
    why = "metadata.jsonl: not read, because --template is the prompt of all media files"
    assert f"; left out: 2 files (metadata.jsonl 2). {why}; no row failed" in done.stdout
    assert [sample.id for sample in Dataset(tmp_path / "listed")][:2] == ["test/a.png", "test/own/b.png"]
