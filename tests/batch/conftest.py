"""Fixtures with rows about images, and functions that execute runs over the rows."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import fsspec
import msgspec
import pytest

from mindie_mm.batch.input.gather import gather
from mindie_mm.batch.input.source import chunks
from mindie_mm.batch.output.manifest import Manifest
from mindie_mm.batch.output.shard import complete_shards
from mindie_mm.batch.run import run_batch
from mindie_mm.batch.settings import Run, Settings, part_of
from mindie_mm.batch.stage import Stage
from tests import warm
from tests.audio_samples import encode_audio, tone
from tests.media_samples import PHOTOGRAPHS, encode_video, encoded, moving_frames, photograph

CLI = str(Path(sys.executable).with_name("mindie-mm"))
UNEQUAL = ("timings.jsonl", ".lock")
"""Files that may differ between two runs over the same input."""


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ten images of different sizes and one video."""
    folder = tmp_path_factory.mktemp("media")
    for index in range(10):
        size = (60 + 17 * index, 200 - 13 * index)
        image = photograph(PHOTOGRAPHS[index % len(PHOTOGRAPHS)], size)
        (folder / f"{index}.jpg").write_bytes(encoded(image, quality=80))
    (folder / "clip.mp4").write_bytes(encode_video(moving_frames(6)))
    return folder


@pytest.fixture
def rows(media: Path) -> list[dict[str, Any]]:
    """Return thirty rows that cover all formats of rows. Three rows are invalid."""
    all_rows: list[dict[str, Any]] = [
        {"id": f"picture {i}", "inputs": [{"image": f"{i % 10}.jpg"}, {"text": f"What is picture {i}?"}]}
        for i in range(20)
    ]
    all_rows += [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": f"{i}.jpg"}]}]} for i in range(3)
    ]
    all_rows += [{"text": "Just words.", "id": 7}, {"images": ["1.jpg", "2.jpg"], "text": "Two?"}]
    all_rows += [{"inputs": [{"video": "clip.mp4"}, {"text": "What moves?"}]}]
    all_rows.insert(4, {"id": "gone", "inputs": [{"image": "gone.jpg"}]})
    all_rows.insert(9, {"id": "broken", "inputs": [{"image": "data:image/jpeg;base64,/9j/4AAQ"}]})
    all_rows.append({"id": "odd", "question": "?"})
    all_rows.append({"inputs": [{"image": "3.jpg"}]})
    return all_rows


@pytest.fixture
def lines(media: Path, rows: list[dict[str, Any]], request: pytest.FixtureRequest) -> Path:
    """Write `rows` to a file in the folder of the images, and return the file's path."""
    path = media / f"{request.node.name.replace('/', '-')}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def eight_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with eight rows in two shards. One row has failed."""
    here = tmp_path_factory.mktemp("rows")
    for index in range(4):
        (here / f"{index}.png").write_bytes(encoded(photograph(size=(90 + 40 * index, 120)), "PNG"))
    rows = [{"id": f"r{i}", "inputs": [{"image": f"{i}.png"}, {"text": "What?"}]} for i in range(4)]
    rows += [{"text": "Hello!"}, {"images": ["0.png", "1.png"], "text": "Both?"}]
    (here / "clip.mp4").write_bytes(encode_video(moving_frames(6)))
    (here / "tone.wav").write_bytes(encode_audio(tone(0.5), 16_000))
    rows += [{"video": "clip.mp4", "text": "What moves?"}, {"audio": "tone.wav", "text": "What is it?"}]
    rows[2]["inputs"][0]["image"] = "gone.png"
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_in_process(settings(here / "rows.jsonl", shard_rows=4), here / "run")
    return here / "run"


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a real S3 server, whose address is in the environment. It has an empty bucket named bucket."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    urlopen(f"{address}/moto-api/reset", data=b"").close()  # the servers of a process share their buckets
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of a server of another test
    fsspec.filesystem("s3").mkdir("bucket")
    yield server
    server.stop()


def run(settings: Settings, folder: Path, *, num_workers: int = 1, **options: Any) -> Manifest:
    return run_batch(settings, folder, num_workers=num_workers, **options)[0]


def run_in_process(settings: Settings, folder: Path) -> Manifest:
    """Complete a run as `run` does, but process the chunks in this process, because starting a worker takes longer."""
    write_shards(settings, folder)
    return run(settings, folder)


def write_shards(settings: Settings, folder: Path, part: str = "") -> None:
    """Write the shards of a run or of a part of it, so that a call has to write only its manifest."""
    folder.mkdir(exist_ok=True)
    gather(settings.inputs, folder, settings.template, io.BytesIO())
    for source in settings.sources(folder):
        source.check()
    begun = msgspec.structs.replace(Run.of(settings, folder), part=part)
    begun.begin(folder)
    stage = Stage(begun, folder)
    every = [*chunks(settings.sources(folder), settings.shard_rows, settings.limit)]
    for number in part_of(part, len(every)):
        chunk = every[number]
        if complete_shards(folder, chunk, begun.digest) is None:
            for _ in stage.run(chunk, {}):
                pass


def settings(*inputs: Path, **others: Any) -> Settings:
    return Settings(model="", inputs=tuple(map(str, inputs)), **{"shard_rows": 7} | others)


def content(folder: Path) -> Mapping[str, bytes]:
    """Return the content of every file that must be the same in equal runs, by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in UNEQUAL}


def written(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines, and return the path. Rows that are bytes are written unchanged."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def tokenize(*arguments: object, given: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `mindie-mm tokenize` to its end.

    `given` is the command's standard input. Without `given`, the command starts faster, as a copy of a process that has
    already imported all modules.
    """
    command = [CLI, "tokenize", *map(str, arguments)]
    if given is None:
        return warm.run(command, timeout=300)
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=300, cwd=cwd)
