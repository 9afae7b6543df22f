"""Tests for `tokenize_dataset` and `generate_dataset`, which the commands call, for rows of Python programs."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from mindie_mm import tokenize_dataset
from mindie_mm.batch.input.given_rows import rows_named, write_rows
from mindie_mm.batch.input.row import parse
from mindie_mm.batch.output.manifest import Manifest
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from mindie_mm.inputs import media_of, media_of_messages
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.fetch.urls import base64_start, decode_base64
from mindie_mm.media.source import read_source
from mindie_mm.settings.config import MediaCaps
from tests.audio_samples import encode_audio, tone
from tests.batch.conftest import content, run_in_process, settings, written
from tests.media_samples import encoded, load_image, photograph

IMAGE = photograph(size=(60, 40))
PNG = encoded(IMAGE, "PNG")
SCRIPT = """
import asyncio, json, sys
from pathlib import Path
import mindie_mm

def rows():
    for line in Path(sys.argv[1]).read_text().splitlines():
        yield json.loads(line)

def both():
    run = mindie_mm.tokenize_dataset(rows(), sys.argv[2], name="mine", workers=1)
    return run.num_rows, mindie_mm.generate_dataset(run.folder, sys.argv[3], max_tokens=3)

async def cell():
    return both()

print(asyncio.run(cell()), both())
"""


def written_lines(rows: Any, limit: int | None = None) -> list[bytes]:
    file = io.BytesIO()
    write_rows(rows, MediaCaps(), file, limit)
    return file.getvalue().splitlines()


def copy_shards(folder: Path, to: Path) -> None:
    """Copy only the shards of a run, so that a call has to write only its manifest if it accepts them."""
    to.mkdir()
    for shard in folder.glob("shard-*"):
        shutil.copy(shard, to)


async def test_rows_of_a_program_give_the_files_of_the_command(tmp_path: Path) -> None:
    """The call is inside an event loop, as in a notebook. It accepts the command's shards as its own."""
    rows = [{"image": "a.png", "text": "What?", "id": "é"}, {"text": "Hello!"}]
    (tmp_path / "a.png").write_bytes(PNG)
    command = settings(written(tmp_path / "rows.jsonl", rows), shard_rows=128)
    run_in_process(command, tmp_path / "run")
    theirs, mine = content(tmp_path / "run"), tmp_path / "mine"
    copy_shards(tmp_path / "run", mine)
    with chdir(tmp_path):
        run = tokenize_dataset(iter(rows), mine, name="mine", workers=1)
        assert (run.folder, run.num_rows, run.num_errors, run.num_items) == (mine, 2, 0, 1)
        with pytest.raises(InputError, match="the input was the rows 'mine' and is now the rows 'yours'"):
            tokenize_dataset(iter(rows), mine, name="yours")
        with pytest.raises(InputError, match="because the content of the rows 'mine' differs"):
            tokenize_dataset(rows[1:], mine, name="mine")
        assert tokenize_dataset(tuple(rows), mine, name="mine") == run
    own = content(mine)
    assert own.keys() == theirs.keys(), "the file of rows is removed"
    assert [name for name in own if own[name] != theirs[name]] == ["manifest.json", "run.json"], "names of inputs"
    assert json.loads(own["run.json"])["settings"]["inputs"] == ["rows:mine"]


@pytest.mark.slow
def test_a_script_and_a_notebook_need_no_guard(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = written(tmp_path / "rows.jsonl", [{"image": "a.png", "text": "What?"}, {"text": "Hello!"}])
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", path, "mine", "mine.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout == "(2, (2, 0)) (2, (2, 0))\n", done.stderr
    run_in_process(settings(path, shard_rows=128), tmp_path / "run")
    generate = ["generate", "--tokenized", str(tmp_path / "run"), "--output", str(tmp_path / "out.jsonl")]
    shown = CliRunner().invoke(main, [*generate, "--max-tokens", "3"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "mine.jsonl").read_bytes()


def test_media_in_rows_are_those_of_files(tmp_path: Path) -> None:
    """Pixels are written without loss, and a dict of the `datasets` library is its bytes."""
    pixels = np.asarray(IMAGE)
    rows: list[Any] = [
        {"image": IMAGE, "text": "a"},
        {"images": [pixels, io.BytesIO(PNG)], "text": "a"},
        {"image": {"bytes": PNG, "path": "gone.png"}, "text": "a", "label": np.int64(3)},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": IMAGE}, "a"]}], "at": Path("a")},
    ]
    lines = written_lines(rows)
    assert written_lines(iter(rows), limit=2) == lines[:2]
    film = json.loads(written_lines([[{"video": np.stack([pixels, pixels[::-1]]), "sample_fps": 2}, {"text": "a"}]])[0])
    assert len(film[0]["video"]) == film[0]["sample_fps"] == 2
    given = [json.loads(line) for line in lines]
    assert (given[2]["label"], given[3]["at"]) == (3, "a")
    urls = [given[0]["image"], *given[1]["images"], given[2]["image"], given[3]["messages"][0]["content"][0]["image"]]
    for url in [*urls, film[0]["video"][0]]:
        assert (load_image(decode_base64(url, base64_start(url))) == pixels).all()


def test_samples_in_rows_are_those_of_files(tmp_path: Path) -> None:
    """Float32 samples are written without loss, also those of several channels."""
    mono, stereo, rate = tone(0.3, 22_050), tone(0.2, 22_050, channels=2), 22_050
    decoder = SimpleNamespace(
        get_all_samples=lambda: SimpleNamespace(data=torch.from_numpy(stereo.T), sample_rate=rate)
    )
    clips: list[tuple[np.ndarray, Any]] = [
        (mono, {"audio": {"path": None, "array": mono, "sampling_rate": rate}}),
        (mono, {"audio": {"array": mono.tolist(), "sampling_rate": rate}}),
        (mono, {"audio": (mono.tolist(), rate)}),
        (mono, {"audio": (mono, np.int64(rate))}),
        (mono, [{"audio": mono, "sampling_rate": rate}]),
        (stereo, {"audio": decoder}),
        (stereo, {"messages": [{"role": "user", "content": [{"type": "audio", "audio": (stereo.T, rate)}]}]}),
    ]
    for (samples, _), line in zip(clips, written_lines([row for _, row in clips]), strict=True):
        row = parse(line, tmp_path, "")
        (item,) = media_of(row.items or ()) or media_of_messages(row.messages or ())
        found = open_audio(read_source(item)).decode(rate, rate)
        file = encode_audio(samples, rate, subtype="FLOAT")
        assert (found == open_audio(file).decode(rate, rate)).all()
        assert samples.ndim == 2 or (found == samples).all()


NO_NUMBERS: list[dict[str, Any]] = [
    {"text": "a", "score": math.nan},
    {"text": "a", "image": np.zeros((2, 2), np.uint8), "scores": [-math.inf]},
    {"text": "a", "score": np.float32("nan")},
    {"text": np.array([1.0, math.nan])},
]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("a.png", "row 1 is of type str; it must be a dict or a list of items"),
        (
            {"text": "a", "thumb": b"x"},
            "row 1: it has a value of type bytes, which JSON does not have. Convert this value, or leave",
        ),
        (
            {"image": object()},
            "row 1: the image is of type object; it must be a path, bytes, a PIL image, an array or a URL",
        ),
        ({"image": np.zeros((2, 2), int)}, "row 1: image pixels have dtype int64"),
        ({"audio": np.zeros(8)}, "row 1: the audio is an array without a rate; give it as (samples, sampling_rate)"),
        (
            {"audio": (np.zeros(8, int), 8000)},
            "row 1: audio samples have dtype int64 and shape (8,); they must be float",
        ),
        (
            {"audio": (torch.zeros(8, requires_grad=True), 8000)},
            "row 1: it cannot be written as JSON: Can't call numpy",
        ),
        *((row, "row 1: it has NaN or an infinity, which JSON does not have. Use None instead") for row in NO_NUMBERS),
        ({"audio": (np.zeros(8), 0)}, "row 1: the audio.sampling_rate=0 must be from 1 to 768000"),
    ],
)
def test_a_row_that_cannot_be_written_is_named(row: Any, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        written_lines([{"text": "a"}, row])


@pytest.mark.parametrize(
    ("inputs", "options", "why"),
    [
        ({"train": []}, {}, "inputs is of type dict; it must be a path, a list of paths, an iterable of rows, or one"),
        (7, {}, "inputs is of type int; it must be"),
        (pa.table({"text": ["a"]}), {}, "inputs is of type Table. Write this table to a Parquet file, and give its"),
        ([], {"name": "a/b"}, "name='a/b' must have 1 to 100 characters"),
        ([], {"shard_rows": "7"}, "shard_rows='7' must be an integer"),
        ([], {"workers": 0}, "num_workers=0 must be at least 1"),
        ([], {"parse_special": "maybe"}, "parse_special='maybe' must be one of on, off"),
        ([], {"progress": "bar"}, "progress='bar' must be 'auto', 'json' or 'off'"),
        ([], {"resume": "no"}, "resume='no' must be true or false"),
        ([], {"retry_errors": 1}, "retry_errors=1 must be true or false"),
        ([], {"part": 2}, "part=2 must be a string"),
        ([], {"select_columns": ["a", 7]}, "select_columns=['a', 7] must be a list of elements, each a string"),
        ([], {"keep_columns": {"a": 7}}, "the column a has the type 7, which is unknown"),
        ([], {"max_image_pixels": 0}, "max_image_pixels=0 must be"),
        (
            [],
            {"output": "https://host/run"},
            "output is https://host/run, but a run cannot be written to https://, where a file cannot be replaced",
        ),
    ],
)
def test_an_argument_that_is_not_valid_is_refused(
    inputs: Any, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        tokenize_dataset(inputs, **{"output": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match="max_decode_bytes"):
        tokenize_dataset(inputs, tmp_path / "run", max_decode_bytes=1)


def test_a_data_set_is_read_as_its_parquet_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = [{"image": {"bytes": PNG, "path": None}, "text": f"What {number}?"} for number in range(3)]
    given = datasets.Dataset.from_list(rows, features=features).select([2, 0])
    given.to_parquet(tmp_path / "rows.parquet")
    file = io.BytesIO()
    write_rows(given, MediaCaps(), file, None)
    assert file.getvalue() == (tmp_path / "rows.parquet").read_bytes()
    assert rows_named(given, "mine") == "table:mine"
    command = settings(tmp_path / "rows.parquet", shard_rows=128)
    theirs = run_in_process(command, tmp_path / "run")
    copy_shards(tmp_path / "run", tmp_path / "mine")
    tokenize_dataset(given, tmp_path / "mine")
    assert Manifest.read(tmp_path / "mine").digest == theirs.digest
    streamed = io.BytesIO()
    write_rows(given.to_iterable_dataset(), MediaCaps(), streamed, 1)
    assert pq.read_table(streamed).to_pylist() == [{"image": {"bytes": PNG, "path": None}, "text": "What 2?"}]
    changed = given.with_transform(lambda batch: {"image": batch["image"], "text": ["a" for _ in batch["text"]]})
    assert rows_named(changed, "mine") == "rows:mine"
