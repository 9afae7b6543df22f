"""Tests for readers: readers in other processes, stale references and removed arenas."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import CorruptReference, SegmentMissing, StaleReference
from mindie_mm.shm import Arena, ArraySpec, Ref, attach, free
from mindie_mm.shm.format.layout import PAGE
from tests.removed_arenas import removed_arenas

SPECS = {"x": ArraySpec((300, 588), "uint8"), "grid": ArraySpec((2, 3), "int64")}


def publish(arena: Arena, seed: int = 0) -> tuple[Ref, str]:
    rng = np.random.default_rng(seed)
    with arena.allocate(SPECS, path_file=None) as block:
        block["x"][...] = rng.integers(0, 256, block["x"].shape)
        block["grid"][...] = rng.integers(-9, 9, block["grid"].shape)
        return block.publish(b"d" * 32), checksum(block)


def checksum(arrays) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()


READ = """
import hashlib
view = attach(Ref.from_words(int(sys.argv[1]), int(sys.argv[2])))
say(hashlib.sha256(b"".join(array.tobytes() for array in view.values())).hexdigest(), view.digest)
say([array.flags.writeable for array in view.values()])
hear()
say(hashlib.sha256(b"".join(array.tobytes() for array in view.values())).hexdigest())
try: view.verify()
except StaleReference: say("stale")
else: say("fresh")
"""


def test_another_process_reads_the_same_bits_and_cannot_write(arena: Arena, start) -> None:
    ref, expected = publish(arena)
    reader = start(READ, *ref.to_words())
    assert reader.hear() == f"{expected} {b'd' * 32!r}"
    assert reader.hear() == "[False, False]"
    reader.say()
    assert reader.hear() == expected
    assert reader.hear() == "fresh"


def test_readers_share_pages_with_the_writer(arena: Arena) -> None:
    with arena.allocate(SPECS, path_file=None) as block:
        ref = block.publish()
        view = attach(ref)
        block["grid"][...] = 41
        assert (view["grid"] == 41).all()
        with pytest.raises(ValueError, match="read-only"):
            view["grid"][...] = 1


def test_a_name_word_alone_attaches_its_block(arena: Arena) -> None:
    ref, expected = publish(arena)
    with attach(Ref.from_words(ref.name_word, None)) as view:
        assert checksum(view) == expected


def test_a_reference_with_a_wrong_dtype_or_shape_is_refused(arena: Arena) -> None:
    ref, _ = publish(arena)
    for wrong in (
        Ref(ref.arena, ref.block, ref.generation, "int8", ref.shape),
        Ref(ref.arena, ref.block, ref.generation, ref.dtype, (588, 300)),
    ):
        with pytest.raises(CorruptReference, match="first array of the block, which has dtype uint8"):
            attach(wrong)


def test_a_freed_block_is_stale_before_and_after_the_owner_sweeps(arena: Arena) -> None:
    ref, _ = publish(arena)
    view = attach(ref)
    free(ref)
    free(ref)
    for _ in range(2):
        with pytest.raises(StaleReference, match=str(ref.generation)):
            attach(ref)
        with pytest.raises(StaleReference):
            view.verify()
        arena.sweep()


def test_an_old_reference_is_stale_while_its_entry_is_reused(arena: Arena) -> None:
    ref, _ = publish(arena)
    view = attach(ref)
    free(ref)
    for _ in range(64):  # often enough to reuse the entry
        with arena.allocate(SPECS, path_file=None) as block:
            for stale in (lambda: attach(ref), view.verify):
                with pytest.raises(StaleReference):
                    stale()
    assert block.ref.block == ref.block
    assert block.ref.generation == ref.generation % ((1 << 24) - 1) + 1
    free(ref)


def test_leaving_a_view_verifies_it_unless_an_exception_propagates(arena: Arena) -> None:
    ref, _ = publish(arena)
    with pytest.raises(StaleReference), attach(ref):
        free(ref)
    ref, _ = publish(arena)
    view = attach(ref)
    free(ref)
    with pytest.raises(ZeroDivisionError), view:
        _ = 1 // 0


def test_a_removed_arena_is_missing_and_its_readers_keep_their_pages() -> None:
    with Arena.create(1 << 20) as arena:
        ref, expected = publish(arena)
        view = attach(ref)
    assert checksum(view) == expected
    view.verify()
    with pytest.raises(SegmentMissing, match=f"mindie_mm-{ref.arena:04x}"):
        attach(ref)
    free(ref)


def test_the_owner_unmaps_a_closed_arena_after_its_last_view() -> None:
    with Arena.create(1 << 20) as arena:
        ref, expected = publish(arena)
        view = attach(ref)
        assert arena.path.name in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert checksum(view) == expected
    assert arena.path.name in Path("/proc/self/maps").read_text(encoding="utf-8")
    del view
    assert removed_arenas([os.getpid()]) == set()


def test_a_removed_arena_is_not_mapped_again_for_a_device(arena: Arena) -> None:
    ref, _ = publish(arena)
    place = attach(ref).file_offset("x")
    assert place is not None
    mapped, _ = place
    assert mapped.writable_pages() is not None
    arena.close()
    assert mapped.writable_pages() is None


def test_an_arena_that_never_existed_is_missing() -> None:
    number = next(n for n in range(65536) if not Path(f"/dev/shm/mindie_mm-{n:04x}").exists())
    with pytest.raises(SegmentMissing, match=r"/dev/shm/mindie_mm-.*No such file"):
        attach(Ref(number, 0, 1))
    free(Ref(number, 0, 1))


def test_a_truncated_arena_is_missing(arena: Arena) -> None:
    ref, _ = publish(arena)
    view = attach(ref)
    os.truncate(arena.path, arena.path.stat().st_size - PAGE)
    with pytest.raises(SegmentMissing, match="its header requires"):
        attach(ref)
    free(ref)
    assert len(view) == 2


def test_a_replaced_arena_is_missing(arena: Arena) -> None:
    ref, _ = publish(arena)
    attach(ref)
    with Arena.create(1 << 20) as other:
        stranger, _ = publish(other)
        other.path.replace(arena.path)
        with pytest.raises(SegmentMissing, match="belongs to another arena"):
            attach(ref)
    arena.path.unlink()
    arena.path.write_bytes(b"somebody's notes")
    with pytest.raises(SegmentMissing, match="is not an arena"):
        attach(ref)
    free(ref)
    arena.path.unlink()
    assert stranger.arena != ref.arena


@pytest.mark.parametrize("at", [8, 16, 40, 72])
def test_a_damaged_arena_header_is_missing(arena: Arena, at: int) -> None:
    ref, _ = publish(arena)
    with arena.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SegmentMissing, match="damaged"):
        attach(ref)


def test_a_damaged_block_header_is_missing(arena: Arena) -> None:
    ref, expected = publish(arena)
    offset = arena._table._entries[8 * ref.block + 1]
    size = int.from_bytes(arena._file.mapping[offset + 8 : offset + 12], "little")
    before = arena._file.mapping[offset : offset + size]
    for at in range(size):
        arena._file.mapping[offset + at] ^= 0x10
        with pytest.raises(SegmentMissing, match="damaged"):
            attach(ref)
        arena._file.mapping[offset : offset + size] = before
    with attach(ref) as view:
        assert checksum(view) == expected


def test_a_block_beyond_the_table_is_stale(arena: Arena) -> None:
    with pytest.raises(StaleReference, match="has only 64 entries for blocks"):
        attach(Ref(arena.number, 64, 1))
    free(Ref(arena.number, 64, 1))


def test_another_users_arena_is_missing(arena: Arena) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    ref, _ = publish(arena)
    os.chown(arena.path, 12345, 12345)
    with pytest.raises(SegmentMissing, match="belongs to user 12345"):
        attach(ref)
    free(ref)
    os.chown(arena.path, 0, 0)
    assert arena.num_blocks == 1


def test_freeing_another_generation_does_nothing(arena: Arena) -> None:
    ref, expected = publish(arena)
    free(Ref(ref.arena, ref.block, ref.generation - 1))
    free(Ref(ref.arena, ref.block, ref.generation + 1))
    free(Ref(ref.arena, (ref.block + 1) % 64, ref.generation))
    assert arena.num_blocks == 1
    with attach(ref) as view:
        assert checksum(view) == expected


def test_a_killed_reader_changes_nothing(arena: Arena, start) -> None:
    ref, expected = publish(arena)
    reader = start(READ, *ref.to_words())
    reader.hear()
    reader.kill()
    assert arena.num_blocks == 1
    with attach(ref) as view:
        assert checksum(view) == expected
    free(ref)
    assert arena.num_blocks == 0


def test_a_process_frees_a_block_that_another_published(arena: Arena, start) -> None:
    ref, _ = publish(arena)
    process = start("free(Ref.from_words(int(sys.argv[1]), None)); say('done')", ref.name_word)
    assert process.hear() == "done"
    assert arena.num_blocks == 0


def test_an_array_outlives_its_view_and_its_arena(arena: Arena) -> None:
    ref, _ = publish(arena)
    array = attach(ref)["x"]
    expected = array.tobytes()
    arena.close()
    assert array.tobytes() == expected


def test_survey_collect_and_release_do_not_import_numpy() -> None:
    script = "import sys; from mindie_mm.shm import survey, collect, release; survey(); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
