"""Tests that every block store must pass: arenas in shared memory, and files on disk."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import ArenaFull, InputError, LimitExceeded, SegmentMissing, SharedMemoryError, StaleReference
from mindie_mm.shm import Arena, ArraySpec, DiskArena, Ref, attach, disk_writer, free, mount
from mindie_mm.shm import disk_arena as disk
from mindie_mm.shm.disk_writer import digest_of
from mindie_mm.shm.liveness_lock import LivenessLock

SPECS = {"pixel_values": ArraySpec((37, 588), "uint8"), "grid": ArraySpec((3,), "int64")}
CAPACITY = 1 << 20


def own_memory() -> int:
    """Return the number of bytes of anonymous memory that this process uses."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class StoreContract:
    """Tests that every block store must pass. Each store has a subclass."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Arena | DiskArena]:
        raise NotImplementedError

    @contextmanager
    def readable(self, store: Arena | DiskArena) -> Iterator[None]:
        """Make all published blocks readable inside the context."""
        raise NotImplementedError

    def test_blocks_are_written_and_read_in_place(self, store: Arena | DiskArena) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (37, 588), np.uint8)
        refs = []
        for number in range(5):
            with store.allocate(SPECS, path_file=None) as block:
                assert list(block) == list(SPECS)
                block["pixel_values"][...] = pixels + number
                block["grid"][...] = (1, 2, number)
                refs.append(block.publish(bytes([number]) * 32))
        assert store.num_blocks == 5
        assert 5 * pixels.nbytes <= store.used_bytes <= store.capacity_bytes
        with self.readable(store):
            for number, ref in enumerate(refs):
                assert Ref.from_words(*ref.to_words()) == ref
                assert (ref.arena, ref.dtype, ref.shape) == (store.number, "uint8", (37, 588))
                with attach(ref) as view:
                    assert np.array_equal(view["pixel_values"], pixels + number)
                    assert view["grid"].tolist() == [1, 2, number]
                    assert view.digest == bytes([number]) * 32
                    assert not view["grid"].flags.writeable

    def test_an_unpublished_block_returns_its_space(self, store: Arena | DiskArena) -> None:
        used = store.used_bytes
        with pytest.raises(ZeroDivisionError), store.allocate(SPECS, path_file=None) as block:
            block["grid"][...] = 1 // 0
        assert store.num_blocks == 0
        assert store.used_bytes == used

    def test_a_block_that_does_not_fit_is_refused(self, store: Arena | DiskArena) -> None:
        with pytest.raises(LimitExceeded, match=str(CAPACITY)):
            store.allocate({"x": ArraySpec((CAPACITY + 1,), "uint8")}, path_file=None)
        with pytest.raises(LimitExceeded, match="bits of a shape word; the limits are 47"):
            store.allocate({"x": ArraySpec((1, 2**31, 2**23), "uint8")}, path_file=None)

    def test_a_block_cannot_be_published_after_its_context_has_ended(self, store: Arena | DiskArena) -> None:
        with store.allocate(SPECS, path_file=None) as left:
            pass
        with store.allocate(SPECS, path_file=None) as block:
            block["grid"][...] = 7
            ref = block.publish()
        with pytest.raises(SharedMemoryError, match="after its context has ended"):
            left.publish()
        with self.readable(store):
            assert attach(ref)["grid"].tolist() == [7, 7, 7]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_forked_child_changes_nothing(self, store: Arena | DiskArena) -> None:
        with store.allocate(SPECS, path_file=None) as block:
            child = os.fork()
            if child == 0:
                store.discard(block)
                _ = store.num_blocks, store.used_bytes
                store.__exit__(None, None, None)
                store.__exit__(SystemExit, SystemExit(), None)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            block["grid"][...] = 3
            ref = block.publish()
        with self.readable(store), attach(ref) as view:
            assert view["grid"].tolist() == [3, 3, 3]

    def test_many_threads_fill_blocks(self, store: Arena | DiskArena) -> None:
        refs: dict[int, Ref] = {}

        def fill(number: int) -> None:
            with store.allocate(SPECS, path_file=None) as block:
                block["pixel_values"][...] = number
                block["grid"][...] = number
                refs[number] = block.publish()

        threads = [threading.Thread(target=fill, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.readable(store):
            for number, ref in refs.items():
                with attach(ref) as view:
                    assert (view["pixel_values"] == number).all()
                    assert (view["grid"] == number).all()

    @pytest.mark.parametrize("specs", [{5: ArraySpec((1,), "bool")}, {"x": (1, 2)}])
    def test_a_spec_that_is_not_an_array_is_refused(
        self, store: Arena | DiskArena, specs: dict[str, ArraySpec]
    ) -> None:
        with pytest.raises(InputError, match="must have a string as its name and an ArraySpec"):
            store.allocate(specs, path_file=None)

    def test_a_closed_store_refuses_allocation(self, store: Arena | DiskArena) -> None:
        store.close()
        store.close()
        with pytest.raises(SharedMemoryError, match="closed"):
            store.allocate(SPECS, path_file=None)


class TestArena(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Arena]:
        with Arena.create(CAPACITY) as arena:
            yield arena

    @contextmanager
    def readable(self, store: Arena | DiskArena) -> Iterator[None]:
        yield


class TestDiskArena(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[DiskArena]:
        with DiskArena.create(tmp_path / "shard-0", 7, CAPACITY) as store:
            yield store

    @contextmanager
    def readable(self, store: Arena | DiskArena) -> Iterator[None]:
        store.close()
        with mount(store.path) as number:
            assert number == store.number
            yield

    def test_the_file_appears_only_when_it_is_complete(self, store: DiskArena) -> None:
        with store.allocate(SPECS) as block:
            block.publish()
        assert not store.path.exists()
        store.close()
        assert [path.name for path in store.path.parent.iterdir()] == ["shard-0"]
        assert store.path.stat().st_size < CAPACITY

    def test_an_error_leaves_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), DiskArena.create(tmp_path / "shard-1", 7, CAPACITY):
            _ = 1 // 0
        assert list(tmp_path.iterdir()) == []

    def test_equal_blocks_produce_equal_files(self, tmp_path: Path) -> None:
        """Discarded blocks and the leftovers of an earlier writer do not affect the file."""

        def write(path: Path, discarded: Callable[[DiskArena], None]) -> bytes:
            with DiskArena.create(path, 7, CAPACITY) as store:
                for number in range(3):
                    discarded(store)
                    with store.allocate({"x": ArraySpec((5001,), "uint8")}) as block:
                        block["x"][...] = number
                        block.publish(b"d" * 16)
            return path.read_bytes()

        def discard(store: DiskArena) -> None:
            with store.allocate({"y": ArraySpec((90_000,), "uint8")}) as block:
                block["y"][...] = 255

        (tmp_path / "b.partial").write_bytes(b"left behind" * 1000)
        assert write(tmp_path / "a", lambda _: None) == write(tmp_path / "b", discard)

    def test_rolled_back_blocks_leave_no_trace_in_the_file(self, tmp_path: Path) -> None:
        def write(name: str, *, also: bool) -> bytes:
            with DiskArena.create(tmp_path / name, 7, CAPACITY, 8) as arena:
                fill(arena, 1)
                if also:
                    for value in (2, 3):
                        fill(arena, value)
                    arena.roll_back(1)
                    assert (arena.num_blocks, arena.num_free) == (1, 7)
                fill(arena, 4)
            return (tmp_path / name).read_bytes()

        def fill(arena: DiskArena, value: int) -> None:
            with arena.allocate(SPECS) as block:
                block["pixel_values"][...] = value
                block.publish(bytes([value]) * 32)

        assert write("a", also=True) == write("b", also=False)

    def test_blocks_of_many_write_batches_read_back_unchanged(self, tmp_path: Path) -> None:
        """Some blocks are rolled back or discarded after their batch was written, and some are larger than a batch."""
        sizes = [disk_writer.WRITE_BATCH_BYTES * share // 10 for share in (3, 4, 9, 1, 12, 2, 2, 8, 11, 5)]

        def fill(arena: DiskArena, value: int) -> Ref:
            with arena.allocate({"x": ArraySpec((sizes[value],), "uint8")}) as block:
                block["x"][...] = value
                return block.publish(bytes([value]) * 32)

        with DiskArena.create(tmp_path / "a", 7, 2 * sum(sizes)) as arena:
            refs = []
            for value in range(len(sizes)):
                kept = arena.num_blocks
                for again in range(value % 4):
                    fill(arena, (value + again) % len(sizes))
                arena.roll_back(kept)
                with arena.allocate({"x": ArraySpec((disk_writer.WRITE_BATCH_BYTES,), "uint8")}) as left:
                    left["x"][...] = 255
                refs.append(fill(arena, value))
        assert digest_of(tmp_path / "a") == arena.digest
        with mount(tmp_path / "a"):
            for value, ref in enumerate(refs):
                view = attach(ref)
                view.verify()
                assert view["x"].shape == (sizes[value],)
                assert (view["x"] == value).all()

    def test_files_that_share_batch_memory_share_no_contents(self, tmp_path: Path) -> None:
        def write(name: str, memory: disk_writer.WriteBatchMemory, value: int, size: int) -> bytes:
            with DiskArena.create(tmp_path / name, 7, CAPACITY, memory=memory) as arena:
                for _ in range(2):
                    with arena.allocate({"x": ArraySpec((size,), "uint8"), "y": ArraySpec((1,), "int64")}) as block:
                        block["x"][...] = block["y"][...] = value
                        block.publish()
                arena.flush()
            return (tmp_path / name).read_bytes()

        memory = disk_writer.WriteBatchMemory()
        write("full", memory, 255, 4001)
        taken = [memory.allocate(1)]
        memory.free(taken[0])
        assert write("a", memory, 3, 101) == write("b", disk_writer.WriteBatchMemory(), 3, 101)
        assert memory.allocate(1) is taken[0]

    def test_a_write_batch_waits_for_the_last_of_its_blocks(self, tmp_path: Path) -> None:
        """The last block of a batch is filled while the next batch is being written."""
        quarter = {"x": ArraySpec((disk_writer.WRITE_BATCH_BYTES // 4,), "uint8")}
        with DiskArena.create(tmp_path / "a", 7, 4 * disk_writer.WRITE_BATCH_BYTES) as arena:
            refs = []
            with arena.allocate(quarter) as slow, arena.allocate(quarter) as left:
                for value in range(6):
                    with arena.allocate(quarter) as block:
                        block["x"][...] = value
                        refs.append(block.publish())
                left["x"][...] = 255
                slow["x"][...] = 6
                refs.append(slow.publish())
            assert arena.num_blocks == 8
        assert digest_of(tmp_path / "a") == arena.digest
        with mount(tmp_path / "a"):
            assert [int(attach(ref)["x"].max()) for ref in refs] == [0, 1, 2, 3, 4, 5, 6]

    def test_a_published_large_block_keeps_no_memory(self, tmp_path: Path) -> None:
        nbytes = disk_writer.WRITE_BATCH_BYTES + 1

        def fill(arena: DiskArena) -> None:
            with arena.allocate({"frames": ArraySpec((nbytes,), "uint8")}) as block:
                block["frames"][...] = 1
                block.publish()

        with DiskArena.create(tmp_path / "a", 7, 3 * nbytes, 3) as arena:
            before = own_memory()
            fill(arena)
            fill(arena)
            assert own_memory() - before < nbytes
            arena.abandon()

    def test_a_block_larger_than_memory_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error says that the block is too large, not that the disk is full."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        nbytes = 2 * disk_writer.WRITE_BATCH_BYTES
        with DiskArena.create(tmp_path / "a", 7, nbytes + CAPACITY, 3) as arena:
            with monkeypatch.context() as patched:
                patched.setattr(disk_writer.mmap, "mmap", refuse)
                with pytest.raises(LimitExceeded, match=f"there is no memory for a block of {nbytes + 4096} bytes"):
                    arena.allocate({"frames": ArraySpec((nbytes,), "uint8")})
            with arena.allocate(SPECS) as block:
                ref = block.publish()
        with mount(tmp_path / "a"):
            attach(ref).verify()

    def test_a_block_being_filled_cannot_be_rolled_back(self, store: DiskArena) -> None:
        with store.allocate(SPECS), pytest.raises(InputError, match="still being filled"):
            store.roll_back(0)

    def test_leaving_a_writer_while_a_block_is_filled_leaves_no_file(self, tmp_path: Path) -> None:
        with (
            pytest.raises(InputError, match=r"blocks \[0\] are still being filled"),
            DiskArena.create(tmp_path / "a", 7, CAPACITY) as arena,
        ):
            arena.allocate(SPECS)
        assert list(tmp_path.iterdir()) == []
        DiskArena.create(tmp_path / "a", 7, CAPACITY).abandon()  # creation succeeds only if no lock remains

    @pytest.mark.parametrize("num_entries", [0, 16385])
    def test_an_invalid_number_of_blocks_is_refused(self, tmp_path: Path, num_entries: int) -> None:
        with pytest.raises(
            InputError, match=f"of entries of a file of blocks is {num_entries}; it must be from 1 to 16384"
        ):
            DiskArena.create(tmp_path / "x", 1, CAPACITY, num_entries)

    def test_a_file_beyond_the_limit_of_the_file_system_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SharedMemoryError, match=r"cannot be extended to [0-9]+ bytes: File too large"):
            DiskArena.create(tmp_path / "huge", 7, 1 << 61)
        assert list(tmp_path.iterdir()) == []

    def test_a_second_writer_of_a_file_is_refused(self, store: DiskArena) -> None:
        with pytest.raises(SharedMemoryError, match="another process"):
            DiskArena.create(store.path, 7, CAPACITY)

    def test_a_file_that_another_writer_has_just_finished_is_kept(
        self, store: DiskArena, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file was opened under its temporary name. The other writer renamed it before the lock was acquired."""
        with store.allocate(SPECS) as block:
            block.publish()
        lock = disk.LivenessLock

        def close_first(descriptor: int, **options: bool) -> LivenessLock:
            store.close()
            return lock(descriptor, **options)

        monkeypatch.setattr(disk, "LivenessLock", close_first)
        with pytest.raises(SharedMemoryError, match="just finished"):
            DiskArena.create(store.path, 7, CAPACITY)
        monkeypatch.undo()
        with mount(store.path):
            attach(block.ref).verify()

    def test_a_full_file_raises_arena_full(self, store: DiskArena) -> None:
        half = {"x": ArraySpec((CAPACITY // 2,), "uint8")}
        with store.allocate(half) as block:
            block.publish()
        with pytest.raises(ArenaFull, match=rf"{store.path}.*{CAPACITY}"):
            store.allocate(half)

    def test_a_store_with_a_block_being_filled_cannot_be_closed(self, store: DiskArena) -> None:
        with store.allocate(SPECS), pytest.raises(InputError, match="being filled"):
            store.close()

    def test_a_block_on_disk_cannot_be_freed(self, store: DiskArena) -> None:
        with store.allocate(SPECS) as block:
            ref = block.publish()
        with self.readable(store):
            free(ref)
            attach(ref).verify()
            with pytest.raises(StaleReference):
                attach(Ref(ref.arena, ref.block, 2))

    def test_arrays_outlive_the_mount_and_references_do_not(self, store: DiskArena) -> None:
        with store.allocate(SPECS) as block:
            block["grid"][...] = 5
            ref = block.publish()
        with self.readable(store):
            grid = attach(ref)["grid"]
        assert grid.tolist() == [5, 5, 5]
        with pytest.raises(SegmentMissing):
            attach(ref)

    def test_an_arena_number_is_mounted_only_once(self, store: DiskArena, tmp_path: Path) -> None:
        with self.readable(store), pytest.raises(SharedMemoryError, match="number 7 is in use"), mount(store.path):
            pass
        with Arena.create(CAPACITY) as arena:
            with DiskArena.create(tmp_path / "shard-9", arena.number, CAPACITY) as other:
                pass
            with pytest.raises(SharedMemoryError, match="in use"), mount(other.path):
                pass

    @pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda _: b""])
    def test_an_incomplete_file_is_not_mounted(self, store: DiskArena, damage: Callable[[bytes], bytes]) -> None:
        with store.allocate(SPECS) as block:
            block.publish()
        store.close()
        store.path.write_bytes(damage(store.path.read_bytes()))
        with pytest.raises(SegmentMissing, match=str(store.path)), mount(store.path):
            pass

    def test_a_symbolic_link_to_a_file_is_mounted(self, store: DiskArena, tmp_path: Path) -> None:
        """A folder may contain links to shards instead of the shards themselves."""
        with store.allocate(SPECS) as block:
            block["grid"][...] = 3
            ref = block.publish()
        store.close()
        (tmp_path / "link").symlink_to(store.path)
        with mount(tmp_path / "link"):
            assert attach(ref)["grid"].tolist() == [3, 3, 3]
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(SegmentMissing, match="Too many levels of symbolic links"), mount(tmp_path / "loop"):
            pass

    def test_mounting_a_missing_file_raises(self, tmp_path: Path) -> None:
        with pytest.raises(SegmentMissing, match="nowhere"), mount(tmp_path / "nowhere"):
            pass
