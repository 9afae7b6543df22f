"""Tests for batches and files in a folder that several processes share: turns, models, expiry and leftovers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from service.batches.batches import Batches
from service.batches.record import Batch
from service.batches.store import BatchFolder
from service.files.store import FileStore, Used
from tests.service.batch_place import OWNER, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "files")


async def until_ended(folder: BatchFolder) -> Batch:
    async with asyncio.timeout(30):
        while (batch := folder.read()) is None or not batch.has_ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return batch


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_that_waits_ends_when_it_expires_or_is_cancelled(place: Place, is_cancelled: bool) -> None:
    gate = asyncio.Event()

    async def waiting(_: str) -> int:
        await gate.wait()
        return 200

    place.model.before = waiting
    batches = Batches(place.store, place.means)
    async with batches.running(3600):
        first = place.create()
        batches.start(OWNER, stored(first))
        while not place.model.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        second = place.create(expires_at=2**40 if is_cancelled else int(time.time()) + 1)
        batches.start(OWNER, stored(second))
        if is_cancelled:
            second.cancel()
            batches.cancel(OWNER, stored(second))
        ended = await until_ended(second)
        assert (ended.status, ended.failed) == ("cancelled" if is_cancelled else "expired", 6)
        assert time.time() - ended.expires_at < 2
        assert stored(first).status == "in_progress"
        gate.set()
        assert (await until_ended(first)).completed == 6


def stored(folder: BatchFolder) -> Batch:
    batch = folder.read()
    assert batch is not None
    return batch


async def test_one_batch_of_a_key_runs_at_a_time_in_all_processes(place: Place) -> None:
    """Another process does not begin a second batch, but does so when the first has ended."""
    gate = asyncio.Event()

    async def waiting(_: str) -> int:
        await gate.wait()
        return 200

    place.model.before = waiting
    folders = [place.create(1), place.create(1)]
    mine, other = Batches(place.store, place.means), Batches(place.store, place.means)
    async with mine.running(3600), other.running(0.01):
        while not place.model.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert sorted(stored(folder).status for folder in folders) == ["in_progress", "validating"]
        gate.set()
        assert [(await until_ended(folder)).completed for folder in folders] == [1, 1]


async def test_a_service_leaves_batches_of_another_model_alone_until_they_are_over(place: Place) -> None:
    folders = [place.create(1, model=name) for name in ("other", "alias")]
    batches = Batches(place.store, place.means)
    async with batches.running(0.01):
        assert (await until_ended(folders[1])).completed == 1
        await asyncio.sleep(0.1)
        assert stored(folders[0]).status == "validating"
        folders[0].cancel()
        assert (await until_ended(folders[0])).status == "cancelled"
    assert len(place.model.asked) == 1


async def test_expired_files_and_leftovers_of_kills_are_removed_without_a_request(place: Place) -> None:
    folder = place.create(1)
    description = place.files.root / OWNER / "files" / "file-x.json"
    leftovers = [path.with_name(f".{path.name}.12ab34cd") for path in (description, folder.path / "batch.json")]
    for path in leftovers:
        path.touch()
    place.files.clean(OWNER)
    assert all(path.exists() for path in leftovers)  # a live process may be about to rename them
    for path in leftovers:
        os.utime(path, (0, 0))
    ids = []
    for owner, expires_after_s in ((OWNER, -1), ("ab" * 32, -1), ("ab" * 32, 3600)):
        path = place.files.root / "new"
        path.write_text("x")
        given = {"filename": "x", "purpose": "user_data", "expires_after_s": expires_after_s}
        ids.append((owner, place.files.add(owner, path, **given).id))
    contents = [place.files.root / owner / "files" / name for owner, name in ids]
    async with Batches(place.store, replace(place.means, model_names=())).running(0.01), asyncio.timeout(30):
        while any(path.exists() for path in [*contents[:2], *leftovers]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    left = [path.name for path in place.files.root.glob("*/files/*") if path.name.startswith(tuple(n for _, n in ids))]
    assert sorted(left) == [ids[2][1], f"{ids[2][1]}.json"]


def test_a_file_whose_description_is_damaged_is_passed_over_and_kept(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    content = place.files.content(place.files.get(OWNER, stored(place.create(1)).input_file_id), OWNER)
    description = content.with_name(f"{content.name}.json")
    description.write_bytes(b"")
    os.utime(description, (0, 0))
    assert place.files.files(OWNER) == []
    place.files.clean(OWNER)
    assert content.exists()
    assert str(description) in caplog.text


def test_an_upload_in_progress_is_counted_while_another_thread_adds_a_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop counts bytes, so it must not wait until descriptions have been read."""
    reading, counted = threading.Event(), threading.Event()

    def slow(self: FileStore, owner: str) -> Used:
        reading.set()
        assert counted.wait(30)
        return Used(0, 0)

    monkeypatch.setattr(FileStore, "require_room", slow)
    path = place.files.root / "new"
    path.write_text("x")
    with ThreadPoolExecutor() as threads:
        adding = threads.submit(place.files.add, OWNER, path, filename="x", purpose="user_data")
        assert reading.wait(30)
        with place.files.receiving(OWNER, Used(0, 0)) as spend:
            spend(1)
        counted.set()
        assert adding.result().bytes == 1
