"""Tests for arenas when a signal handler raises an exception, when a process forks, and when `close` is not called."""

from __future__ import annotations

import linecache
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mindie_mm.errors import SharedMemoryError
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, collect, free, release, survey
from mindie_mm.shm.format import block, layout
from mindie_mm.shm.owner import arena as arena_module
from mindie_mm.shm.owner import arena_file, heap, queue, table
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import noise

SPECS = {"x": ArraySpec((100 << 10,), "uint8")}
SMALL = {"x": ArraySpec((15 << 10,), "uint8")}
MODULES = (arena_module, arena_file, block, heap, layout, queue, table)
FILES = {module.__file__ for module in MODULES}


class Interrupt(BaseException):
    """A stand-in for KeyboardInterrupt, which would end the test run."""


class InterruptAt:
    """A trace function that raises Interrupt after `number` lines of the arena's code have been executed."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        del argument
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not _takes_a_lock(frame):
            if not self.left:
                raise Interrupt
            self.left -= 1
        return self


def _takes_a_lock(frame: FrameType) -> bool:
    """Return whether the next line acquires the arena's lock.

    Such lines are skipped, because the interpreter checks no signals between the end of a `with` block and the release
    of its lock.
    """
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "with self._mutex:"


def interrupted(work: Callable[[], None], number: int) -> bool:
    """Run `work`, and interrupt it after `number` lines of the arena's code. The exception is caught.

    Return False if `work` ended before the interrupt.
    """
    before = sys.gettrace()
    sys.settrace(InterruptAt(number))
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def fragmented(arena: Arena) -> None:
    """Leave holes of 16 KiB between the blocks, and free half of the table entries."""
    refs = []
    for _ in range(arena.capacity_bytes >> 14):
        with arena.allocate(SMALL, path_file=None) as block:
            refs.append(block.publish())
    for ref in refs[::2]:
        free(ref)


class Kept:
    """An arena with a block that stays published, and the arena's state before a test."""

    def __init__(self, in_pieces: bool) -> None:
        self.arena = Arena.create(1 << 20)
        if in_pieces:
            fragmented(self.arena)
        with self.arena.allocate(SMALL, path_file=None) as kept:
            kept["x"][...] = 7
            self.ref = kept.publish()
        self.before = self.state()

    def state(self) -> tuple[int, ...]:
        arena = self.arena
        return arena.num_blocks, arena.used_bytes, arena._table.num_free, arena._heap.largest_bytes


@pytest.mark.parametrize(
    ("how", "in_pieces"),
    [
        ("free", False),
        ("sweep", False),
        ("leave", False),
        ("free", True),
        pytest.param("sweep", True, marks=pytest.mark.slow),
        pytest.param("leave", True, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_line_leaks_nothing(path_file: Path, how: str, in_pieces: bool) -> None:
    """After an interrupt, the arena is unchanged or marked as lost.

    A lost arena allocates no more blocks, and is removed when it is closed.
    """

    def work() -> None:
        with kept.arena.allocate(SPECS, path_file=path_file) as block:
            if how == "leave":
                return
            ref = block.publish()
        if how == "free":
            kept.arena.free(block)
        else:
            free(ref)
            kept.arena.sweep()

    kept, number, lost = Kept(in_pieces), 0, 0
    try:
        while interrupted(work, number):
            interrupted(kept.arena.sweep, number % 101)
            release(path_file)
            path_file.unlink(missing_ok=True)
            assert (attach(kept.ref)["x"] == 7).all(), number
            if kept.arena.lost:
                lost += 1
                with pytest.raises(SharedMemoryError, match=r"interrupted a change .* create a new one"):
                    kept.arena.allocate(SMALL, path_file=path_file)
                assert kept.arena.sweep() == 0
                kept.arena.close()
                assert not kept.arena.path.exists()
                kept = Kept(in_pieces)
            else:
                assert kept.state() == kept.before, number
            number += 1
        work()
        assert not kept.arena.lost
        assert number > 60
        assert 10 < lost < number - 10, "some interrupts must lose the arena, and some must not"
    finally:
        kept.arena.close()


def test_a_block_filled_during_an_interrupted_change_is_published_whole_or_refused(path_file: Path) -> None:
    refused = 0
    for number in range(0, 200, 3):
        with Arena.create(1 << 20) as arena:
            fragmented(arena)
            with arena.allocate(SPECS, path_file=path_file) as kept:
                kept["x"][...] = 7
                interrupted(lambda: arena.free(arena.allocate(SPECS, path_file=path_file)), number)
                if arena.lost:
                    refused += 1
                    with pytest.raises(SharedMemoryError, match="interrupted"):
                        kept.publish()
                    continue
                with arena.allocate(SMALL, path_file=None) as other:
                    other["x"][...] = 1
                    assert (other.entry, other.generation) != (kept.entry, kept.generation)
                ref = kept.publish()
            assert (attach(ref)["x"] == 7).all()
            arena.sweep()
            assert arena._used_by[str(path_file).encode()] == kept.nbytes
    assert 5 < refused < 60


def test_an_interrupted_change_wakes_a_waiting_thread(arena: Arena) -> None:
    with arena.allocate({"x": ArraySpec((1000 << 10,), "uint8")}, path_file=None) as block:
        block.publish()
    errors: list[SharedMemoryError] = []

    def wait() -> None:
        with pytest.raises(SharedMemoryError, match="interrupted") as caught:
            arena.allocate(SPECS, path_file=None, timeout_s=60)
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    while not arena._queue.line:
        pass
    number = 0
    while not arena.lost:
        interrupted(lambda: arena.free(block), number)
        number += 1
    thread.join()
    assert errors


@pytest.mark.slow
def test_a_tokenizer_replaces_an_arena_lost_to_an_interrupt(path_file: Path) -> None:
    replaced, number = 0, 0

    def tokenize() -> Ref:
        ids = tokenizer.tokenize([{"image": noise(30, 40)}], path_file)
        return Ref.from_words(*ids[ids < 0].tolist())

    def own() -> list[int]:
        return [info.number for info in survey() if info.owner and info.owner.pid == os.getpid()]

    with Tokenizer.from_pretrained() as tokenizer:
        last = tokenize().arena
        while interrupted(tokenize, number):
            ref = tokenize()
            attach(ref).verify()
            release(path_file)
            assert own() == [ref.arena]
            replaced += ref.arena != last
            last = ref.arena
            number += 4
    assert 2 < replaced < number // 4
    assert not own()


def test_a_garbage_collected_block_is_freed(arena: Arena) -> None:
    block = arena.allocate(SPECS, path_file=None)
    assert arena.num_blocks == 1
    del block
    assert (arena.num_blocks, arena.used_bytes) == (0, 0)


def test_an_interrupted_wait_leaves_neither_a_request_nor_a_lock() -> None:
    """After an interrupt, the arena is usable or marked as lost.

    A waiting thread looks for room every 2 ms. An interrupt while it changes the arena loses the arena.
    """

    def handler(*_: object) -> None:
        raise Interrupt

    def interrupted(arena: Arena) -> None:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-3, 6e-3))
        arena.allocate(SPECS, path_file=None, timeout_s=120)

    chance, lost = random.Random(0), 0
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(50):
            with Arena.create(1 << 20) as arena:
                with arena.allocate({"x": ArraySpec((1000 << 10,), "uint8")}, path_file=None) as block:
                    block.publish()
                with pytest.raises(Interrupt):
                    interrupted(arena)
                assert not arena._queue.line
                assert not arena._mutex.locked()
                if arena.lost:
                    lost += 1
                    continue
                arena.free(block)
                with arena.allocate(SPECS, path_file=None, timeout_s=0):
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert lost < 25


@pytest.mark.parametrize("patched", ["mindie_mm.shm.owner.arena_file.reserve", "fcntl.flock"])
def test_a_child_forked_during_creation_does_not_keep_the_arena_alive(start, patched: str) -> None:
    module, name = patched.rsplit(".", 1)
    owner = start(f"""
import {module} as module
real = module.{name}
def forking(*args):
    real(*args)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, b"1")  # the child has closed the arena's file
        hear()  # until the test is over
        os._exit(0)
    os.read(reader, 1)
module.{name} = forking
arena = Arena.create(1 << 20)
say(arena.path)
time.sleep(600)
""")
    path = owner.hear()
    assert [info.alive for info in survey() if info.file == path] == [True]
    owner.kill()
    assert collect().of("owner_dead") == (path,)


FORKED = """
import signal
from mindie_mm.shm import mapped
arena = Arena.create(1 << 20)
specs = {"x": ArraySpec((10,), "uint8")}
with arena.allocate(specs, path_file=None) as block:
    ref = block.publish()
arena._mutex.acquire()  # as threads do that are in there at the fork
mapped._cache._lock.acquire()
child = os.fork()
if child == 0:
    signal.alarm(120)
    try: arena.allocate(specs, path_file=None)
    except SharedMemoryError: pass
    assert (arena.sweep(), len(attach(ref))) == (0, 1)
    arena.close()
    os._exit(0)
say(os.waitpid(child, 0)[1], arena.path.exists())
arena._mutex.release()
arena.close()
say("closed")
"""


def test_a_child_forked_while_a_lock_is_held_does_not_hang(start) -> None:
    process = start(FORKED)
    assert process.hear() == "0 True"
    assert process.hear() == "closed"


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)"])
def test_an_unclosed_arena_is_removed_when_the_process_ends(start, end: str) -> None:
    process = start(f"""
arena = Arena.create(1 << 20)
say(arena.path)
hear()
{end}
""")
    path = Path(process.hear())
    assert path.exists()
    process.say("go on")
    process.popen.wait(120)
    assert not path.exists()


def test_a_garbage_collected_arena_is_removed() -> None:
    path = Arena.create(1 << 20).path
    assert not path.exists()


def test_a_multiprocessing_worker_removes_its_arena_when_it_ends(start) -> None:
    process = start("""
import multiprocessing
def work():
    global arena
    arena = Arena.create(1 << 20)
    say(arena.path)
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
say(worker.exitcode)
""")
    path = Path(process.hear())
    assert process.hear() == "0"
    assert not path.exists()


def test_an_arena_works_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with Arena.create(1 << 20) as arena:
        assert arena.populated.is_set()
        with arena.allocate(SPECS, path_file=None) as block:
            block["x"][...] = 3
            ref = block.publish()
        assert (attach(ref)["x"] == 3).all()
    arena.close()


def test_closing_an_arena_stops_its_population() -> None:
    with Arena.create(256 << 20) as arena:
        pass
    assert "mindie_mm-populate" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}
    assert arena.populated.wait(0)
