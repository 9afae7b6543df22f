"""Tests for an arena's owner: creation, allocation, publishing, waiting and closing."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, SharedMemoryError, StaleReference
from mindie_mm.shm import Arena, ArraySpec, Block, Ref, attach, free, release
from mindie_mm.shm.format.layout import PAGE, ArenaStats
from mindie_mm.shm.owner import queue

PAGE_SPECS = {"x": ArraySpec((1000,), "uint8")}
HALF_SPECS = {"x": ArraySpec(((1 << 19) - 1000,), "uint8")}
SPECS = {
    "pixel_values": ArraySpec((37, 588), "uint8"),
    "grid": ArraySpec((1, 3), "int64"),
    "scale": ArraySpec((3,), "float32"),
}


def publish(arena: Arena, specs: dict[str, ArraySpec] = PAGE_SPECS, path_file: Path | None = None) -> Ref:
    with arena.allocate(specs, path_file=path_file) as block:
        return block.publish()


def test_an_arena_is_a_private_fully_reserved_file_until_it_is_closed() -> None:
    with Arena.create(3_000_000) as arena:
        status = arena.path.stat()
        assert arena.path == Path(f"/dev/shm/mindie_mm-{arena.number:04x}")
        assert status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 >= status.st_size > arena.capacity_bytes >= 3_000_000
        assert arena.populated.wait(120)
        with arena.path.open("rb") as file:
            assert ArenaStats.read(file.fileno()).populated_bytes == status.st_size
    assert not arena.path.exists()
    arena.close()


@pytest.mark.parametrize("capacity", [0, -5, 1.5, "x", True])
def test_an_invalid_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(InputError, match=str(capacity)):
        Arena.create(capacity)


def test_a_capacity_above_dev_shm_reports_the_free_bytes_and_how_to_add_more() -> None:
    space = os.statvfs("/dev/shm")
    total = space.f_blocks * space.f_frsize
    with pytest.raises(SharedMemoryError, match=rf"of {total} bytes free.*--shm-size.*emptyDir") as raised:
        Arena.create(total + 1)
    needs = re.search(r"needs (\d+)", str(raised.value))
    assert needs is not None
    assert int(needs[1]) > total


def test_arrays_are_written_in_place_and_aligned(arena: Arena) -> None:
    rng = np.random.default_rng(0)
    with arena.allocate(SPECS, path_file=None) as block:
        assert list(block) == list(SPECS)
        for name, spec in SPECS.items():
            assert (block[name].shape, str(block[name].dtype)) == (spec.shape, spec.dtype)
            assert block[name].ctypes.data % 64 == 0
            block[name].view(np.uint8)[...] = rng.integers(0, 256, block[name].view(np.uint8).shape)
        expected = {name: array.tobytes() for name, array in block.items()}
        ref = block.publish(digest=bytes(range(16)))
    assert (ref.arena, ref.dtype, ref.shape) == (arena.number, "uint8", (37, 588))
    with attach(Ref.from_words(*ref.to_words())) as view:
        assert {name: array.tobytes() for name, array in view.items()} == expected
        assert view.digest == bytes(range(16))
        assert view.ref == ref


def test_an_unpublished_block_is_freed(arena: Arena) -> None:
    with arena.allocate(SPECS, path_file=None) as block:
        assert arena.num_blocks == 1
        with pytest.raises(StaleReference, match="filling"):
            attach(block.ref)
    assert (arena.num_blocks, arena.used_bytes) == (0, 0)
    with pytest.raises(StaleReference, match="free"):
        attach(block.ref)


def test_a_block_is_freed_when_filling_it_fails(arena: Arena) -> None:
    with pytest.raises(ZeroDivisionError), arena.allocate(SPECS, path_file=None):
        _ = 1 // 0
    assert arena.used_bytes == 0


def test_a_block_is_recorded_in_the_path_file_before_it_is_filled(arena: Arena, path_file: Path) -> None:
    with arena.allocate(SPECS, path_file=path_file) as block:
        ref = block.ref
        line = f"mindie_mm-{ref.arena:04x} {ref.block} {ref.generation}\n"
        assert path_file.read_text(encoding="utf-8") == line
        block.publish()
    second = publish(arena, path_file=path_file)
    assert (
        path_file.read_text(encoding="utf-8")
        == line + f"mindie_mm-{second.arena:04x} {second.block} {second.generation}\n"
    )


def test_an_unwritable_path_file_allocates_no_block(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match=r"gone/shm_name\.txt cannot be written"):
        arena.allocate(SPECS, path_file=tmp_path / "gone" / "shm_name.txt")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SharedMemoryError, match="link cannot be written"):
        arena.allocate(SPECS, path_file=link)
    assert not (tmp_path / "elsewhere").exists()
    assert arena.num_blocks == 0


def test_a_block_freed_while_it_is_filled_is_not_published(arena: Arena, path_file: Path) -> None:
    with arena.allocate(SPECS, path_file=path_file) as block:
        assert release(path_file) == 1
        assert arena.num_blocks == 1, "the block must stay until its writer has finished"
        with pytest.raises(StaleReference, match="freed while"):
            block.publish()
    assert arena.num_blocks == 0


def test_the_owner_frees_a_published_block_at_once_without_a_descriptor(path_file: Path) -> None:
    with Arena.create(PAGE, quota_bytes=PAGE) as arena:
        descriptors = psutil.Process().num_fds()
        with arena.allocate(PAGE_SPECS, path_file=path_file) as block:
            ref = block.publish()
        arena.free(block)
        assert psutil.Process().num_fds() == descriptors
        with pytest.raises(StaleReference, match="is free"):
            attach(ref)
        # The first block is freed, so the arena and the request's quota have room for another block.
        with arena.allocate(PAGE_SPECS, path_file=path_file, timeout_s=0) as second:
            second.publish()
        arena.free(block)  # no effect: the second block has reused the space of the first
        assert arena.num_blocks == 1
        assert release(path_file) == 1
        arena.free(second)  # the block has been released, but the owner has not swept it yet
        assert arena.num_blocks == 0
    arena.free(second)


def test_a_waiting_request_wakes_when_the_owner_frees_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "POLL_S", 600.0)  # only a notification can end the wait in time
    with Arena.create(PAGE) as arena:
        with arena.allocate(PAGE_SPECS, path_file=None) as block:
            block.publish()
        taken: list[Block] = []
        waiter = threading.Thread(
            target=lambda: taken.append(arena.allocate(PAGE_SPECS, path_file=None, timeout_s=600.0)), daemon=True
        )
        waiter.start()
        while not arena._queue.line:
            waiter.join(0.01)
        arena.free(block)
        waiter.join(120)
        assert taken, "the waiting thread was not woken"


@pytest.mark.parametrize("size", [15, 65])
def test_a_digest_has_16_to_64_bytes(arena: Arena, size: int) -> None:
    with (
        pytest.raises(LimitExceeded, match=f"digest has {size} bytes; it must have 16 to 64"),
        arena.allocate(SPECS, path_file=None) as block,
    ):
        block.publish(digest=bytes(size))
    assert arena.num_blocks == 0


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({}, "0 arrays; it must have 1 to 64"),
        ({f"a{i}": ArraySpec((1,), "bool") for i in range(65)}, "65 arrays; it must have 1 to 64"),
        ({"": ArraySpec((1,), "bool")}, "0 bytes; it must have 1 to 255"),
        ({"n" * 256: ArraySpec((1,), "bool")}, "256 bytes; it must have 1 to 255"),
        (
            {"x": ArraySpec((1 << 20,), "uint8")},
            "the request.s media take [0-9]+ bytes of shared memory; the arena has only 1048576",
        ),
        ({"x": ArraySpec((1 << 41,), "uint8")}, "limits are 47"),
    ],
)
def test_a_block_beyond_a_limit_is_refused(arena: Arena, specs: dict[str, ArraySpec], message: str) -> None:
    with pytest.raises(LimitExceeded, match=message):
        arena.allocate(specs, path_file=None)
    assert arena.num_blocks == 0


def test_a_full_arena_raises_arena_full_after_the_timeout(arena: Arena) -> None:
    kept = [publish(arena, HALF_SPECS) for _ in range(2)]
    with pytest.raises(ArenaFull, match=r"no room for 4096 bytes within 0.05 s: 0 of 1048576 bytes are free"):
        arena.allocate(PAGE_SPECS, path_file=None, timeout_s=0.05)
    free(kept[0])
    assert publish(arena, HALF_SPECS).block != kept[0].block, "the entry of a freed block must not be reused at once"


def test_a_waiting_request_wakes_when_another_process_releases_a_block(arena: Arena, path_file: Path, start) -> None:
    process = start("say(); hear(); say(release(Path(sys.argv[1])))", path_file)
    publish(arena, HALF_SPECS, path_file)
    publish(arena, HALF_SPECS)
    process.hear()
    process.say("free it")
    publish(arena, HALF_SPECS)
    assert process.hear() == "1"


def test_a_small_request_overtakes_a_waiting_large_one(arena: Arena) -> None:
    kept = [publish(arena, HALF_SPECS) for _ in range(2)]
    order: list[str] = []

    def wait(name: str, specs: dict[str, ArraySpec]) -> None:
        with arena.allocate(specs, path_file=None, timeout_s=30):
            order.append(name)

    threads = []
    for name, specs in (("large", {"x": ArraySpec(((1 << 20) - PAGE,), "uint8")}), ("small", PAGE_SPECS)):
        threads.append(threading.Thread(target=wait, args=(name, specs)))
        threads[-1].start()
        while len(arena._queue.line) < len(threads):
            threading.Event().wait(0.001)
    free(kept[0])
    threads[1].join()
    assert order == ["small"], "there is room for the small request only"
    free(kept[1])
    for thread in threads:
        thread.join()
    assert order == ["small", "large"]


def test_a_closed_arena_refuses_allocation_while_other_threads_wait(arena: Arena) -> None:
    arena._queue.join(
        queue.Demand([], None, arena._file.header), 60
    )  # a thread that has not yet noticed that the arena is closed
    arena.close()
    with pytest.raises(SharedMemoryError, match="is closed"):
        arena.allocate(PAGE_SPECS, path_file=None)


def test_an_arena_closed_at_the_deadline_is_reported_as_closed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(demand: queue.Demand, look: Callable[[], float]) -> None:
        arena.close()
        look()

    publish(arena, HALF_SPECS)
    publish(arena, HALF_SPECS)
    monkeypatch.setattr(queue.Demand, "wait", wait)
    with pytest.raises(SharedMemoryError, match="is closed"):
        arena.allocate(PAGE_SPECS, path_file=None)


def test_closing_an_arena_wakes_waiting_requests(arena: Arena) -> None:
    for _ in range(2):
        publish(arena, HALF_SPECS)
    closer = threading.Timer(0.05, arena.close)
    closer.start()
    with pytest.raises(SharedMemoryError, match="closed"):
        arena.allocate(PAGE_SPECS, path_file=None, timeout_s=30)
    closer.join()


def test_a_closed_arena_refuses_allocation_and_publishing() -> None:
    with Arena.create(1 << 20) as arena, arena.allocate(SPECS, path_file=None) as block:
        arena.close()
        block["grid"][...] = 1
        with pytest.raises(SharedMemoryError, match="closed"):
            block.publish()
        with pytest.raises(SharedMemoryError, match="closed"):
            arena.allocate(SPECS, path_file=None)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"something else")


@pytest.mark.parametrize("take_away", [Path.unlink, lambda path: os.truncate(path, PAGE), overwrite])
def test_a_removed_truncated_or_overwritten_arena_is_reported_as_lost(
    arena: Arena, take_away: Callable[[Path], None]
) -> None:
    assert not arena.lost
    take_away(arena.path)
    assert arena.lost
    with pytest.raises(SharedMemoryError, match="removed, truncated or overwritten by another process"):
        arena.allocate(SPECS, path_file=None)


@pytest.mark.parametrize("size", [0, PAGE])
def test_freeing_a_block_of_a_truncated_arena_does_nothing(arena: Arena, size: int) -> None:
    """Freeing does not write into the table of a truncated arena, because the write would raise SIGBUS."""
    with arena.allocate(SPECS, path_file=None) as block:
        block.publish()
    os.truncate(arena.path, size)
    arena.free(block)


def test_an_arena_without_free_entries_is_full() -> None:
    with Arena.create(1 << 20) as arena:
        refs = [publish(arena) for _ in range(64)]
        with pytest.raises(ArenaFull, match="0 of 64 entries"):
            arena.allocate(PAGE_SPECS, path_file=None, timeout_s=0)
        for ref in refs:
            free(ref)
        assert arena.sweep() == 64


def test_each_reuse_of_an_entry_has_another_generation(arena: Arena) -> None:
    seen = set()
    for _ in range(3 * 64):
        ref = publish(arena)
        seen.add((ref.block, ref.generation))
        free(ref)
    assert len(seen) == 3 * 64
    entry = arena._table._free[0]
    arena._table._generations[entry] = (1 << 24) - 1
    last = publish(arena)
    assert last.generation == (1 << 24) - 1
    free(last)
    arena.sweep()
    assert arena._table._generations[entry] == 1


def test_many_threads_allocate_and_free_without_corruption(arena: Arena) -> None:
    """More blocks are allocated than fit at once. Each block contains the bytes that its thread wrote."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(50):
            with arena.allocate({"x": ArraySpec((50_000 + seed,), "uint8")}, path_file=None) as block:
                block["x"][...] = (seed + i) % 256
                ref = block.publish()
            with attach(ref) as view:
                if not (view["x"] == (seed + i) % 256).all():
                    wrong.append(i)
            free(ref)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.used_bytes == 0
    assert arena._heap.largest_bytes == arena.capacity_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_read_but_not_allocate(arena: Arena) -> None:
    ref = publish(arena)

    def child() -> None:
        try:
            arena.allocate(SPECS, path_file=None)
        except SharedMemoryError:
            arena.close()
            os._exit(0 if len(attach(ref)) == 1 else 3)
        os._exit(2)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert arena.path.exists()
    publish(arena)


def test_an_arena_does_not_start_the_resource_tracker(start) -> None:
    process = start("""
from multiprocessing import resource_tracker
with Arena.create(1 << 16) as arena:
    with arena.allocate({"x": ArraySpec((1,), "uint8")}, path_file=None) as block:
        ref = block.publish()
    attach(ref); free(ref)
say(resource_tracker._resource_tracker._pid)
""")
    assert process.hear() == "None"
