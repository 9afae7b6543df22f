"""Tests for inputs that change during a run or between two calls. No shard may mix rows of two versions of a file."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.input import file_state, source
from mindie_mm.batch.input.file_state import STATES_FILE, InputStates
from mindie_mm.batch.input.gather import gather, gathered_path
from mindie_mm.batch.input.source import Chunk, chunks
from mindie_mm.batch.on_ray import _Actor
from mindie_mm.batch.output.run_folder import Address
from mindie_mm.batch.settings import Run, Settings
from mindie_mm.batch.stage import Stage
from mindie_mm.errors import InputError, StorageError
from mindie_mm.processes.ipc import Failure
from tests.batch.conftest import content, run, run_in_process, settings, tokenize, written
from tests.batch.gate import Gate
from tests.media_samples import encoded, photograph

NUM_ROWS = 5
"""Number of rows in a file. With three rows per shard, the file is processed in two chunks."""


def write(path: Path, word: str = "row") -> Path:
    """Write rows of text in the format that the path's extension names, and return the path."""
    texts = [f"{word} {index}" for index in range(NUM_ROWS)]
    if path.suffix == ".jsonl":
        return written(path, [{"text": text} for text in texts])
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=2, compression="none")
        return path
    with tarfile.open(path, "w") as tar:
        for index, text in enumerate(texts):
            data = json.dumps({"text": text}).encode()
            member = tarfile.TarInfo(f"{index}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def rewrite(path: Path) -> None:
    """Overwrite a row of the file with a different row of the same size, and restore the file's mtime."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"row 4", b"ROW 4"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def rename(path: Path) -> None:
    """Replace the file with another file that has the same size and mtime but a different row."""
    before, other = path.stat(), path.with_name(f"other{path.suffix}")
    other.write_bytes(path.read_bytes().replace(b"row 4", b"ROW 4"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def truncate(path: Path) -> None:
    """Truncate the file. A JSON lines file is cut at the end of a row."""
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n", 0, -1) + 1 if path.suffix == ".jsonl" else len(data) // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "more"}\n')


CHANGES = (truncate, append, rewrite, rename, Path.unlink)


class Begun:
    """A run that has begun. The test processes its chunks one by one, as a worker would."""

    def __init__(self, given: Settings, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        gather(given.inputs, folder, given.template, io.BytesIO())
        sources = given.sources(folder)
        self.run = Run.of(given, folder, sources)
        self.run.begin(folder)
        states = [one.state for one in sources]
        InputStates(begun=states, now=states).write(folder)
        self.stage = Stage(self.run, folder, InputStates.read(folder).now)
        self.chunks = list(chunks(sources, given.shard_rows, given.limit))


def named_shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".parquet")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "tar"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_leaves_its_shard_unfinished(
    change: Callable[[Path], None], form: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"rows.{form}")
    original, given, folder = path.read_bytes(), settings(path, shard_rows=3), tmp_path / "run"
    begun = Begun(given, folder)
    list(begun.stage.run(begun.chunks[0], {}))
    before = named_shards(folder)
    steps = begun.stage.run(begun.chunks[1], {})
    next(steps)
    change(path)
    with pytest.raises(StorageError, match=rf"rows\.{form} (changed while|was removed while) the run was reading it"):
        list(steps)
    assert named_shards(folder) == before
    with pytest.raises(InputError, match=rf"rows\.{form}"):
        run(given, folder)
    assert named_shards(folder) == before
    path.write_bytes(original)
    run_in_process(given, folder)
    run_in_process(given, tmp_path / "whole")
    assert content(folder) == content(tmp_path / "whole")


@pytest.mark.parametrize(
    "form", ["jsonl", *(pytest.param(form, marks=pytest.mark.slow) for form in ("parquet", "tar"))]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_before_the_manifest_leaves_the_run_unfinished(
    change: Callable[[Path], None], form: str, tmp_path: Path
) -> None:
    """The second of two files changes after an earlier call has finished all its chunks."""
    first, path = write(tmp_path / "first.jsonl"), write(tmp_path / f"rows.{form}")
    original, given, folder = path.read_bytes(), settings(first, path, shard_rows=3), tmp_path / "run"
    begun = Begun(given, folder)
    for chunk in begun.chunks:
        list(begun.stage.run(chunk, {}))
    shown: list[int] = []

    def show(*_: object) -> None:
        shown.append(1)
        if len(shown) == 1 + len(begun.chunks):
            change(path)

    with pytest.raises(StorageError, match=rf"rows\.{form} (changed while|was removed while) the run was reading it"):
        run(given, folder, show=show)
    assert not (folder / "manifest.json").exists()
    path.write_bytes(original)
    run(given, folder)
    run_in_process(given, tmp_path / "whole")
    assert content(folder) == content(tmp_path / "whole")


def test_a_link_that_points_to_another_file_is_detected(tmp_path: Path) -> None:
    """Neither of the two files changes, so the run must notice that it has opened a different file."""
    own, other = write(tmp_path / "own.jsonl"), write(tmp_path / "other.jsonl", "ROW")
    link = tmp_path / "rows.jsonl"
    link.symlink_to(own)
    begun = Begun(settings(link, shard_rows=3), tmp_path / "run")
    link.unlink()
    link.symlink_to(other)
    steps = begun.stage.run(begun.chunks[0], {})
    with pytest.raises(StorageError, match="another file replaced it"):
        next(steps)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "tar"])
def test_a_hard_link_and_a_new_mode_do_not_count_as_changes(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{form}")
    begun = Begun(settings(path, shard_rows=3), tmp_path / "run")
    steps = begun.stage.run(begun.chunks[0], {})
    next(steps)
    (tmp_path / "backup").hardlink_to(path)
    path.chmod(0o600)
    assert len(list(steps)) == 3


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit fingerprints to two pieces of 16 bytes, so that every file counts as large."""
    monkeypatch.setattr(file_state, "_PIECE_BYTES", 16)
    monkeypatch.setattr(file_state, "_MAX_PIECES", 2)
    monkeypatch.setattr(source, "DIGESTED_BYTES", 32)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("form", ["jsonl", "parquet", "tar"])
def test_a_change_of_a_large_file_between_two_calls_is_detected(form: str, tmp_path: Path) -> None:
    """The changed row belongs to a finished shard, and is between the pieces that the fingerprint includes."""
    path = write(tmp_path / f"rows.{form}")
    original, given, folder = path.read_bytes(), settings(path, shard_rows=3), tmp_path / "run"
    begun = Begun(given, folder)
    list(begun.stage.run(begun.chunks[0], {}))
    path.write_bytes(original.replace(b"row 1", b"ROW 1"))
    assert Run.of(given, folder).digest == begun.run.digest
    for _ in range(2):
        with pytest.raises(
            InputError, match=rf"rows\.{form} has changed since an earlier call: rows 0 to 2 differ from"
        ):
            run(given, folder)
    path.write_bytes(original)
    run_in_process(given, folder)
    assert not (folder / STATES_FILE).exists()
    run_in_process(given, tmp_path / "whole")
    assert content(folder) == content(tmp_path / "whole")


@pytest.mark.usefixtures("copied_workers")
def test_a_file_that_is_cut_while_workers_read_it_ends_the_command(tmp_path: Path) -> None:
    rows = [{"image": "gate.jpg", "text": "What?"}, *({"text": f"row {index}"} for index in range(40))]
    path = written(tmp_path / "rows.jsonl", rows)
    original = path.read_bytes()
    gate = Gate(tmp_path / "gate.jpg", lambda: os.truncate(path, original.index(b"\n", len(original) // 2) + 1))
    command = (path, "--output", tmp_path / "run", "--shard-rows", 7, "--workers", 2)
    done = tokenize(*command)
    gate.close()
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        f"Error: {path} changed while the run was reading it: its size was {len(original)} and is now " in done.stderr
    )
    assert done.stderr.endswith("Fix that, then run the same command again to continue\n")
    again = tokenize(*command)
    assert again.returncode == 2
    assert f"the content of {path} differs from that of the earlier input" in again.stderr
    path.write_bytes(original)
    run_in_process(settings(path), tmp_path / "run")
    run_in_process(settings(path), tmp_path / "whole")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.fixture
def images(media: Path, tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for index in range(4):
        shutil.copy(media / f"{index}.jpg", tmp_path / "images" / f"{index}.jpg")
    return tmp_path / "images"


def test_a_removed_image_of_a_listed_folder_ends_the_run(images: Path, tmp_path: Path) -> None:
    given, folder = settings(images), tmp_path / "run"
    begun = Begun(given, folder)
    steps = begun.stage.run(begun.chunks[0], {})
    next(steps)
    data = (images / "2.jpg").read_bytes()
    (images / "2.jpg").unlink()
    with pytest.raises(StorageError, match=r"2\.jpg was removed while the run was reading .*images"):
        list(steps)
    assert named_shards(folder) == []
    with pytest.raises(InputError, match="images differs from that of the earlier input"):
        run(given, folder)
    (images / "2.jpg").write_bytes(data)
    assert run_in_process(given, folder).num_errors == 0
    run_in_process(given, tmp_path / "whole")
    assert content(folder) == content(tmp_path / "whole")


def test_a_media_folder_that_is_moved_away_ends_the_run(images: Path, tmp_path: Path) -> None:
    begun = Begun(settings(images, shard_rows=2), tmp_path / "run")
    list(begun.stage.run(begun.chunks[0], {}))
    before = named_shards(tmp_path / "run")
    images.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"images/2\.jpg was removed while the run was reading .*images"):
        list(begun.stage.run(begun.chunks[1], {}))
    assert named_shards(tmp_path / "run") == before


def test_a_replaced_image_has_the_digest_of_the_bytes_read(images: Path, tmp_path: Path) -> None:
    rows = written(images / "rows.jsonl", [{"image": "0.jpg", "text": "What?"}] * 2)
    begun = Begun(settings(rows), tmp_path / "run")
    steps = begun.stage.run(begun.chunks[0], {})
    next(steps)
    (images / "0.jpg").write_bytes(encoded(photograph(size=(70, 50))))
    list(steps)
    run(settings(rows), tmp_path / "run")
    replaced = Dataset(tmp_path / "run")
    assert replaced.record(0).digests != replaced.record(1).digests
    run_in_process(settings(rows), tmp_path / "after")
    after = Dataset(tmp_path / "after")
    assert after.record(1).digests == replaced.record(1).digests
    for found, own in zip(replaced[1].arrays, after[1].arrays, strict=True):
        assert all(np.array_equal(found[name], own[name]) for name in own)


def test_a_ray_actor_detects_a_change(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", [{"image": "gate.jpg", "text": "What?"}, {"text": "a"}])
    given = settings(rows)
    begun, chunk = Run.of(given, tmp_path), next(chunks(given.sources(tmp_path), 7, None))
    gate = Gate(tmp_path / "gate.jpg", lambda: append(rows))
    actor = _Actor(msgspec.json.encode(begun), msgspec.json.encode(Address(str(tmp_path / "node"))), {}, "call")
    done = actor({"chunk": np.array([msgspec.json.encode(chunk)])})
    gate.close()
    error = msgspec.json.decode(done["failed"][0], type=Failure).exception()
    assert isinstance(error, StorageError)
    assert "rows.jsonl changed while the run was reading it" in str(error)
    assert named_shards(tmp_path / "node") == []


def test_a_change_of_the_stored_standard_input_is_detected(tmp_path: Path) -> None:
    given, folder = Settings(model="", inputs=("-",), stdin_folder=str(tmp_path), shard_rows=3), tmp_path / "run"
    folder.mkdir()
    gather(given.inputs, folder, "", io.BytesIO(b'{"text": "a"}\n' * 4))
    (source,) = given.sources(folder)
    assert source.path == gathered_path(folder, 0)
    begun = Run.of(given, folder)
    stage = Stage(begun, folder)
    steps = stage.run(Chunk(0, 0, 0, 3, 0, 42), {})
    next(steps)
    gather(given.inputs, folder, "", io.BytesIO(b'{"text": "b"}\n' * 4))
    with pytest.raises(StorageError, match="standard input changed while the run was reading it"):
        list(steps)
