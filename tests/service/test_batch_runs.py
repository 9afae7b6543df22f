"""Tests for runs of batches that are interrupted, on disk and without a model."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mindie_mm.errors import LimitExceeded, NotStored
from service.batches import run
from service.batches.batches import Batches
from service.batches.requests import Limits
from service.batches.run import BatchRun
from service.batches.store import BatchFolder
from service.files.store import FileStore, replace_file
from tests.namespaces import UNSHARE, require
from tests.service.batch_place import OWNER, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "files")


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(line["custom_id"] for line in lines)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let files grow to `num_bytes` bytes only."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_interrupts_a_batch_and_costs_no_line(place: Place) -> None:
    folder = place.create(30)
    with full_disk(2000), pytest.raises(OSError, match="too large"):
        await place.run(folder)
    written = folder.output.read_bytes()
    assert 0 < len(written) <= 2000
    assert written.endswith(b"\n")
    kept = {json.loads(line)["custom_id"] for line in written.splitlines()}
    place.model.asked.clear()
    batch = await place.run(folder)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 30, 30, 0)
    assert ids(place.lines(batch.output_file_id)) == sorted(f"{i}" for i in range(30))
    assert kept.isdisjoint(place.model.asked)
    assert place.means.slots._value == 2


async def test_an_expiry_that_is_interrupted_writes_each_line_once(place: Place) -> None:
    """A later process writes the rest of the lines, and does not answer again."""
    folder = place.create(30, expires_at=0)
    with full_disk(1000), pytest.raises(OSError, match="too large"):
        await place.run(folder)
    place.model.asked.clear()
    batch = await place.run(folder)
    assert (batch.status, batch.total, batch.completed + batch.failed) == ("expired", 30, 30)
    lines = [*place.lines(batch.output_file_id), *place.lines(batch.error_file_id)]
    assert ids(lines) == sorted(f"{i}" for i in range(30))
    assert not place.model.asked


def test_a_batch_on_a_full_disk_ends(tmp_path: Path) -> None:
    """It waits for a time, and then fails with the lines that it has. None of its requests is answered twice."""
    prefix = (*UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o size=512k tmpfs "$1" && shift && exec "$@"', "sh")
    require((*UNSHARE, "--mount"))
    command = [*prefix, str(tmp_path), sys.executable, "-m", "tests.service.full_disk", str(tmp_path)]
    ended = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout)
    for one in ended.values():
        assert one["lines"] == one["counted"]
        assert (one["unfinished"], one["left"]) == (0, ["batch.json", "lock"])
    emptied, later, early, expired = ended.values()
    assert (emptied["status"], emptied["codes"], emptied["lines"], emptied["asked"]) == ("completed", [], 60, 60)
    assert (later["status"], later["codes"]) == ("failed", ["disk_full"])
    assert 0 < later["lines"] < later["asked"] < 60
    assert (early["status"], early["codes"], early["asked"]) == ("failed", ["disk_full"], 0)
    assert (expired["status"], expired["codes"], expired["asked"]) == ("expired", ["disk_full"], 0)


@pytest.mark.parametrize("step", ["first", "second", "last"])
async def test_an_interrupted_end_is_completed_with_the_same_files(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The process dies before, between or after the two files of the output are stored."""

    async def some_fail(prompt: str) -> int:
        return 400 if prompt == "3" else 200

    place.model.before = some_fail
    folder = place.create()
    put, calls = FileStore.put, 0

    def failing(*args: Any, **fields: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == {"first": 1, "second": 2}.get(step):
            raise KeyboardInterrupt
        return put(*args, **fields)

    def dying(_: BatchFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "put", failing)
        if step == "last":
            patched.setattr(BatchFolder, "end", dying)
        with pytest.raises(KeyboardInterrupt):
            await place.run(folder)
    early = folder.read()
    assert early is not None
    batch = await place.run(folder) if not early.has_ended else early
    assert (batch.output_file_id, batch.error_file_id) == (early.output_file_id, early.error_file_id)
    assert ids(place.lines(batch.output_file_id)) == ["0", "1", "2", "4", "5"]
    assert ids(place.lines(batch.error_file_id)) == ["3"]
    assert [*place.store.unfinished()] == []
    assert {path.name for path in folder.path.iterdir()} == {"batch.json", "lock"}
    assert len(place.model.asked) == 6


async def test_requests_that_fail_because_of_the_service_are_repeated(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_RETRIES_S", (0.0, 0.0))

    async def status(prompt: str) -> int:
        return {"0": 400, "1": 503}.get(prompt, 200 if place.model.asked.count(prompt) > 1 else 429)

    place.model.before = status
    batch = await place.run(place.create(3))
    assert {prompt: place.model.asked.count(prompt) for prompt in "012"} == {"0": 1, "1": 3, "2": 2}
    assert (batch.completed, batch.failed) == (1, 2)


async def test_one_process_runs_a_batch_at_a_time(place: Place) -> None:
    folder, gate = place.create(), asyncio.Event()

    async def waiting(_: str) -> int:
        await gate.wait()
        return 200

    place.model.before = waiting
    other = Batches(place.store, place.means)
    async with Batches(place.store, place.means).running(3600), asyncio.timeout(60):
        while len(place.model.asked) < 2:  # noqa: ASYNC110 - the limit on requests in progress
            await asyncio.sleep(0.01)
        async with other.running(0.01):
            await asyncio.sleep(0.1)
            assert len(place.model.asked) == 2
            gate.set()
            while (batch := folder.read()) is None or not batch.has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert sorted(place.model.asked) == ["0", "1", "2", "3", "4", "5"]
    assert batch.completed == 6


async def test_the_oldest_batches_that_have_ended_make_room(place: Place) -> None:
    folders = [place.create(1) for _ in range(3)]
    with pytest.raises(LimitExceeded, match="3 batches in progress"):
        place.create(1)
    await place.run(folders[1])
    place.create(1)
    assert [folder.read() is None for folder in folders] == [False, True, False]


async def test_outputs_of_batches_count_toward_the_quota_of_the_key(tmp_path: Path) -> None:
    """The batch that reaches the quota fails, and keeps its answers. A later one answers nothing."""
    quota = 12_000
    place = Place(tmp_path / "files", max_file_bytes_per_key=quota)
    folders = [place.create(30), place.create(30)]
    late = place.create(1)
    batches = [await place.run(folder) for folder in folders]
    assert [batch.status for batch in batches] == ["completed", "failed"]
    assert 0 < batches[1].completed < 30
    assert len(place.lines(batches[1].output_file_id)) == batches[1].completed
    assert [mistake["code"] for mistake in batches[1].mistakes] == ["quota_exceeded"]
    assert f"the limit is {quota} (--max-file-bytes-per-key)" in batches[1].mistakes[0]["message"]
    assert quota - 300 < place.files.used(OWNER).num_bytes <= quota
    (place.files.root / OWNER / "files" / f"file-{0:024x}").write_bytes(
        bytes(quota - place.files.used(OWNER).num_bytes)
    )
    place.model.asked.clear()
    assert (await place.run(late)).status == "failed"
    assert place.model.asked == []
    assert place.means.slots._value == 2


@pytest.mark.parametrize("outcome", ["expired", "cancelled"])
async def test_lines_without_answers_count_toward_the_quota_of_the_key(tmp_path: Path, outcome: str) -> None:
    place = Place(tmp_path / "files", max_file_bytes_per_key=6000)
    folder = place.create(30, **({"expires_at": 0} if outcome == "expired" else {}))
    if outcome == "cancelled":
        folder.cancel()
    batch = await place.run(folder)
    assert (batch.status, batch.completed) == (outcome, 0)
    assert 0 < batch.failed < 30
    assert [mistake["code"] for mistake in batch.mistakes] == ["quota_exceeded"]
    assert place.files.used(OWNER).num_bytes <= 6000
    assert not place.model.asked


def test_batches_in_progress_count_toward_the_quota(place: Place) -> None:
    """The input is a link to its file, and counts once. It still counts if the client deletes the file."""
    folder = place.create(30)
    used = place.files.used(OWNER)
    assert used.num_bytes == folder.input.stat().st_size
    place.files.delete(OWNER, place.files.files(OWNER)[0].id)
    assert place.files.used(OWNER).num_bytes == used.num_bytes
    folder.output.write_bytes(bytes(1000))
    assert place.files.used(OWNER).num_bytes == used.num_bytes + 1000


async def test_the_output_of_batches_in_progress_counts_as_files(tmp_path: Path) -> None:
    """Each batch has one file of input and up to two of output. A batch that has ended has the files of its output."""
    place = Place(tmp_path / "files", max_files_per_key=8)
    folders = [place.create(), place.create()]
    with pytest.raises(LimitExceeded, match="has 6 files, with 2 for the output of each batch in progress; the limit"):
        place.files.require_room(OWNER, num_files=3)
    place.files.delete(OWNER, place.files.files(OWNER)[0].id)  # the batch has a link to it
    place.create()
    with pytest.raises(LimitExceeded, match="has 8 files"):
        place.files.require_room(OWNER)
    assert (await place.run(folders[0])).error_file_id is None
    assert place.files.used(OWNER).files == 7


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": "\xff"}', None], ids=repr)
async def test_a_description_that_cannot_be_read_stops_no_other_batch(
    place: Place, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    """The files of the batch stay, so that the operator can repair it."""
    bad, good = place.create(1), place.create(1)
    description = bad.path / "batch.json"
    description.unlink()
    if content is None:
        description.mkdir()
    else:
        description.write_bytes(content)
    os.utime(bad.marker, (0, 0))
    assert [*place.store.unfinished()] == [(OWNER, good.read())]
    assert str(description) in caplog.text
    assert [batch.id for batch in place.store.batches(OWNER)] == [good.path.name]
    with pytest.raises(NotStored):
        place.store.get(OWNER, bad.path.name)
    assert bad.input.exists()
    place.create(1)
    assert (await place.run(good)).status == "completed"


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append("folder" if path == tmp_path else path.read_text("utf-8"))
        calls.append((tmp_path / "a").read_text())

    monkeypatch.setattr(os, "fsync", synced)
    (tmp_path / "a").write_text("old")
    replace_file(tmp_path / "a", b"new")
    assert calls == ["new", "old", "folder", "new"]


async def test_limits_do_not_apply_to_a_batch_that_has_been_accepted(tmp_path: Path) -> None:
    """A service that starts again with lower limits continues the batch, and keeps its answers."""
    place = Place(tmp_path / "files")
    folder = place.create(30)
    with full_disk(2000), pytest.raises(OSError, match="too large"):
        await place.run(folder)
    kept = folder.output.read_bytes()
    for limits in (
        Limits(requests=1, line_bytes=1000),
        Limits(requests=100, line_bytes=5),
    ):
        place.means = replace(place.means, limits=limits)
        assert (await place.run(place.create(2))).status == "failed"
    batch = await place.run(folder)
    assert (batch.status, batch.completed) == ("completed", 30)
    content = place.files.content(place.files.get(OWNER, str(batch.output_file_id)), OWNER)
    assert content.read_bytes().startswith(kept)


@pytest.mark.parametrize("lost", [["output.jsonl"], ["errors.jsonl"], ["output.jsonl", "errors.jsonl"]], ids=len)
async def test_a_batch_whose_output_is_lost_before_its_end_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch, lost: list[str]
) -> None:
    """The process dies after the output was stored. A file is deleted before a later process continues."""

    async def some_fail(prompt: str) -> int:
        return 400 if prompt == "3" else 200

    place.model.before = some_fail
    folder, become = place.create(), BatchRun._become

    async def dying_at_the_end(batch_run: BatchRun, status: Any) -> None:
        if status == "completed":
            raise KeyboardInterrupt
        await become(batch_run, status)

    with monkeypatch.context() as patched:
        patched.setattr(BatchRun, "_become", dying_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            await place.run(folder)
    names = {f"{folder.path.name}_{name}" for name in lost}
    for file in place.files.files(OWNER):
        if file.filename in names:
            place.files.delete(OWNER, file.id)
    batch = await place.run(folder)
    assert batch.status == "failed"
    assert {mistake["code"] for mistake in batch.mistakes} == {"output_lost"}
    assert (batch.output_file_id is None, batch.error_file_id is None) == tuple(
        f"{name}.jsonl" in lost for name in ("output", "errors")
    )
    assert len(batch.mistakes) == len(lost)
    assert [*place.store.unfinished()] == []


@pytest.mark.parametrize(
    ("is_missing", "expires_at", "status"), [(True, 2**40, "failed"), (True, 0, "expired"), (False, 0, "expired")]
)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_batch_whose_input_cannot_be_read_ends(
    place: Place, has_begun: bool, is_missing: bool, expires_at: int, status: str
) -> None:
    """Its answers so far are kept."""
    folder = place.create(30)
    if has_begun:
        with full_disk(2000), pytest.raises(OSError, match="too large"):
            await place.run(folder)
    folder.input.unlink()
    if not is_missing:
        folder.input.mkdir()
        with pytest.raises(IsADirectoryError):  # it may be readable again before the batch expires
            await place.run(folder)
    stored = folder.read()
    assert stored is not None
    folder.write(msgspec.structs.replace(stored, expires_at=expires_at))
    if not is_missing:
        folder.input.rmdir()
        folder.input.symlink_to(folder.input)
    batch = await place.run(folder)
    assert (batch.status, [mistake["code"] for mistake in batch.mistakes]) == (status, ["unreadable_input"])
    assert (len(place.lines(batch.output_file_id)) == batch.completed > 0) == has_begun


@pytest.mark.parametrize(("cancelled_at", "outcome"), [(None, "expired"), (99, "cancelled"), (101, "expired")])
async def test_the_first_of_cancellation_and_expiry_counts(
    place: Place, cancelled_at: float | None, outcome: str
) -> None:
    folder = place.create(expires_at=100)
    if cancelled_at is not None:
        folder.cancel()
        os.utime(folder.path / "cancelled", (cancelled_at, cancelled_at))
        folder.cancel()
    batch = await place.run(folder)
    assert (batch.status, batch.failed, place.model.asked) == (outcome, 6, [])
