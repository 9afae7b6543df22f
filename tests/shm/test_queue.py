"""Tests that a request gets all of its blocks or none, in order of arrival, and that overtaking is limited."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from mindie_mm.errors import ArenaFull, LimitExceeded, SharedMemoryError
from mindie_mm.shm import Arena, ArraySpec, Block, free, release, survey
from tests.shm.at_once import at_once

PAGE = 4096
CAPACITY = 64 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(CAPACITY, quota_bytes=CAPACITY) as arena:
        yield arena


class Asking:
    """A client that requests blocks of given sizes in pages. Each request has its own path file."""

    def __init__(self, arena: Arena, folder: Path, wait_s: float = 300.0) -> None:
        self.arena = arena
        self.wait_s = wait_s
        self._folder = folder
        self._number = 0

    def at_once(self, *pages: int) -> list[Block] | None:
        return at_once(self.arena, _specs(pages), path_file=self.path_file())

    def waiting(self, *pages: int) -> asyncio.Task[list[Block]]:
        """Start a request that waits if there is no room at once, as requests of the tokenizer do."""
        return asyncio.create_task(self.in_line(self.path_file(), *pages))

    async def in_line(self, path_file: Path, *pages: int) -> list[Block]:
        return await self.arena.allocate_together(_specs(pages), path_file=path_file, timeout_s=self.wait_s)

    def path_file(self) -> Path:
        self._number += 1
        return self._folder / f"{self._number}.txt"

    def free(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.arena.free(block)

    @property
    def waiting_bytes(self) -> int:
        return stats(self.arena).waiting_bytes


def _specs(pages: tuple[int, ...]) -> list[dict[str, ArraySpec]]:
    """Return the specs of arrays whose blocks take the given numbers of pages."""
    return [{"bytes": ArraySpec((count * PAGE - 1024,), "uint8")} for count in pages]


def stats(arena: Arena):
    (found,) = [one for one in survey() if one.file == str(arena.path)]
    return found.stats


@pytest.fixture
def asking(arena: Arena, tmp_path: Path) -> Iterator[Asking]:
    asking = Asking(arena, tmp_path)
    yield asking
    assert arena.lost or asking.waiting_bytes == 0


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


async def turn() -> None:
    """Let every task run until it waits for something."""
    for _ in range(5):
        await asyncio.sleep(0)


async def soon(task: Awaitable[list[Block]]) -> list[Block]:
    async with asyncio.timeout(60):
        return await task


async def test_a_request_gets_a_block_for_each_item(asking: Asking) -> None:
    blocks = asking.at_once(3, 4, 5)
    assert blocks is not None
    assert [block.nbytes for block in blocks] == [3 * PAGE, 4 * PAGE, 5 * PAGE]
    asking.free(blocks)


async def test_a_request_may_allocate_all_of_the_arena(asking: Asking) -> None:
    for pages in ((64,), (63,), (32, 32), (1,) * 64, (1, 63), (13, 51)):
        blocks = asking.at_once(*pages)
        assert blocks is not None, pages
        asking.free(blocks)


async def test_a_request_whose_rounded_blocks_cannot_fit_is_refused(asking: Asking) -> None:
    """A block of 63 pages needs 64 pages, so waiting would not help."""
    with pytest.raises(LimitExceeded, match="the arena has only 262144"):
        asking.at_once(63, 1)


async def test_a_waiting_request_holds_no_block(asking: Asking) -> None:
    """Two requests of two blocks each wait. One block of each would fit, but neither request allocates a block."""
    held = asking.at_once(20)
    waiting = [asking.waiting(30, 30), asking.waiting(30, 30)]
    await turn()
    assert asking.arena.num_blocks == 1
    assert asking.waiting_bytes == 120 * PAGE
    asking.free(held)
    first = await soon(waiting[0])
    await turn()
    assert asking.arena.num_blocks == 2
    assert not waiting[1].done()
    asking.free(first)
    asking.free(await soon(waiting[1]))


async def test_requests_are_served_in_order_of_arrival(asking: Asking) -> None:
    held, order = asking.at_once(64), list[int]()

    async def one(number: int) -> None:
        blocks = await asking.waiting(40)
        order.append(number)
        asking.free(blocks)

    tasks = []
    for number in range(6):
        tasks.append(asyncio.create_task(one(number)))
        await turn()
    asking.free(held)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4, 5]


async def test_small_requests_overtake_a_large_one_up_to_its_size(asking: Asking) -> None:
    """Each small request is freed immediately, so that the next small request does not have to wait for space."""
    held = asking.at_once(40)
    large = asking.waiting(32)
    await turn()
    passed = 0
    while (small := asking.at_once(3)) is not None:
        passed += 3
        asking.free(small)
        assert passed <= 32
    assert passed == 30, "the small requests may take at most the 32 pages of the large one"
    late = asking.waiting(3)
    await turn()
    assert not late.done()
    asking.free(held)
    blocks = await soon(large)
    asking.free(await soon(late))
    asking.free(blocks)


async def test_waiting_requests_overtake_within_the_same_bound(asking: Asking) -> None:
    held = [asking.at_once(32), asking.at_once(32)]
    large = asking.waiting(40)
    await turn()
    small = [asking.waiting(10) for _ in range(6)]
    await turn()
    asking.free(held[0])
    done, _ = await asyncio.wait(small, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    await turn()
    assert [task.done() for task in small] == [True, True, True, False, False, False], "three requests fit"
    for task in done:
        asking.free(task.result())
    fourth = await soon(small[3])
    assert not large.done()
    asking.free(fourth)
    await asyncio.sleep(0.1)
    assert [task.done() for task in small[4:]] == [False, False], "later requests have already taken 40 pages"
    asking.free(held[1])
    blocks = await soon(large)
    for task in small[4:]:
        asking.free(await soon(task))
    asking.free(blocks)


async def test_the_queue_advances_at_once_when_its_first_request_leaves(asking: Asking) -> None:
    """Only the limit on overtaking held the last request back. It gets its blocks without another poll."""
    held = asking.at_once(40)
    large = asking.waiting(32)
    await turn()
    while (small := asking.at_once(8)) is not None:
        asking.free(small)
    behind = asking.waiting(8)
    await turn()
    assert not behind.done()
    large.cancel()
    await turn()
    assert behind.done()
    asking.free(behind.result())
    asking.free(held)


@pytest.mark.parametrize("others_wait", [False, True])
async def test_a_request_that_can_never_fit_is_refused_at_once(tmp_path: Path, others_wait: bool) -> None:
    with Arena.create(CAPACITY, quota_bytes=32 * PAGE) as arena:
        asking = Asking(arena, tmp_path)
        held = [asking.at_once(32), asking.at_once(32)]
        waiting = asking.waiting(8) if others_wait else None
        await turn()
        for pages, message in (
            ((65,), "[0-9]+ bytes of shared memory; the arena has only 262144"),
            ((33,), "may hold at most"),
        ):
            with pytest.raises(LimitExceeded, match=message):
                asking.at_once(*pages)
            with pytest.raises(LimitExceeded, match=message):
                await asking.in_line(asking.path_file(), *pages)
        with pytest.raises(LimitExceeded, match="may hold at most"):
            asking.at_once(17, 16)
        for blocks in held:
            asking.free(blocks)
        if waiting is not None:
            asking.free(await soon(waiting))


async def test_an_expired_request_does_not_disturb_the_others(arena: Arena, tmp_path: Path) -> None:
    impatient, patient = Asking(arena, tmp_path, 0.05), Asking(arena, tmp_path / "patient")
    (tmp_path / "patient").mkdir()
    held = impatient.at_once(60)
    task = impatient.waiting(30)
    await turn()
    behind = patient.waiting(8)
    await turn()
    message = r"no room for [0-9]+ bytes within [0-9.]+ s: 16384 of 262144 bytes are free, .*--arena-bytes"
    with pytest.raises(ArenaFull, match=message):
        await task
    assert not behind.done()
    assert stats(arena).waiting_bytes == 8 * PAGE
    impatient.free(held)
    patient.free(await soon(behind))
    assert stats(arena).waits == 2
    assert stats(arena).full == 1


async def test_blocks_granted_at_the_deadline_are_not_lost(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes after the blocks were granted, but before the request's task runs again."""
    monkeypatch.setattr("mindie_mm.shm.owner.queue.POLL_S", 0.1)
    asking = Asking(arena, tmp_path, 0.5)
    held = asking.at_once(60)
    task = asking.waiting(30)
    await turn()
    asking.free(held)

    def block(until_s: float) -> None:
        while time.monotonic() < until_s:
            pass

    started_s, loop = time.monotonic(), asyncio.get_running_loop()
    # Runs after the pause between polls, in the same iteration of the event loop.
    loop.call_later(0.1, block, started_s + 1.0)
    block(started_s + 0.2)
    asking.free(await soon(task))


async def test_room_freed_after_the_last_poll_is_granted_in_order(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindie_mm.shm.owner.queue.POLL_S", 300.0)  # requests look when they begin and when they end
    monkeypatch.setattr("mindie_mm.shm.owner.queue.LOOK_S", 300.0)
    (held,) = asking.at_once(60)
    ref = held.publish()
    asking.wait_s = 0.2
    tasks = [asking.waiting(30) for _ in range(3)]
    await turn()
    free(ref)
    blocks = [await soon(tasks[0]), await soon(tasks[1])]
    with pytest.raises(ArenaFull):
        await tasks[2]
    assert stats(asking.arena).full == 1
    for held in blocks:
        asking.free(held)


async def test_scripts_and_requests_wait_in_one_queue(asking: Asking) -> None:
    """A script waits in a thread. The request that arrived before it is served first, and the next one after it."""
    held, order = asking.at_once(64), list[str]()

    async def request(name: str) -> None:
        blocks = await asking.waiting(40)
        order.append(name)
        asking.free(blocks)

    def script() -> None:
        with asking.arena.allocate(_specs((40,))[0], path_file=None, timeout_s=60):
            order.append("script")

    first = asyncio.create_task(request("first"))
    await turn()
    thread = Thread(target=script)
    thread.start()
    until(lambda: asking.waiting_bytes == 80 * PAGE)
    last = asyncio.create_task(request("last"))
    await turn()
    asking.free(held)
    await asyncio.gather(first, last)
    await asyncio.to_thread(thread.join)
    assert order == ["first", "script", "last"]


@pytest.mark.parametrize("served", [False, True])
async def test_a_cancelled_request_leaves_no_block(asking: Asking, served: bool) -> None:
    held = asking.at_once(60)
    task, behind = asking.waiting(30), asking.waiting(30)
    await turn()
    if served:
        asking.free(held)
        asking.arena._queue.serve(asking.arena._allocate_all)  # grants the blocks before the task runs again
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if not served:
        asking.free(held)
    asking.free(await soon(behind))
    assert asking.arena.num_blocks == 0


async def test_a_block_that_another_process_frees_wakes_the_queue(asking: Asking) -> None:
    path_file = asking.path_file()
    (block,) = at_once(asking.arena, _specs((60,)), path_file=path_file)
    block.publish()
    task = asking.waiting(30)
    await turn()
    script = "import sys; from mindie_mm.shm import release; print(release(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(path_file)]
    freed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert freed.stdout.strip() == "1"
    asking.free(await soon(task))


async def test_waiting_is_counted_in_the_arena_file(asking: Asking) -> None:
    before = stats(asking.arena)
    held = asking.at_once(60)
    tasks = [asking.waiting(30), asking.waiting(10)]
    await turn()
    assert asking.waiting_bytes == 40 * PAGE
    await asyncio.sleep(0.05)
    asking.free(held)
    for task in tasks:
        asking.free(await soon(task))
    after = stats(asking.arena)
    assert after.waits - before.waits == 2
    assert after.full == before.full
    assert after.waited_ns - before.waited_ns >= 2 * 0.05e9
    assert after.waiting_bytes == 0


async def test_a_lost_arena_fails_all_waiting_requests(asking: Asking) -> None:
    held = asking.at_once(60)
    tasks = [asking.waiting(30), asking.waiting(30)]
    await turn()
    asking.arena.path.unlink()
    for task in tasks:
        with pytest.raises(SharedMemoryError):
            await soon(task)
    asking.free(held)


async def test_an_unwritable_path_file_fails_only_its_request(asking: Asking, tmp_path: Path) -> None:
    held = asking.at_once(64)
    (tmp_path / "folder").mkdir()
    bad = asyncio.create_task(asking.in_line(tmp_path / "folder", 8, 8))
    await turn()
    good = asking.waiting(8)
    await turn()
    asking.free(held)
    with pytest.raises(Exception, match="folder"):
        await bad
    asking.free(await soon(good))
    assert asking.arena.num_blocks == 0


async def test_all_blocks_are_recorded_before_they_are_handed_out(asking: Asking) -> None:
    path_file = asking.path_file()
    blocks = at_once(asking.arena, _specs((3, 4)), path_file=path_file)
    for block in blocks:
        block.publish()
    assert release(path_file) == 2
    assert asking.arena.num_blocks == 0
