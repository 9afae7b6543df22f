"""Tests for the survey of /dev/shm and the collector."""

from __future__ import annotations

import os
import zlib
from itertools import islice
from pathlib import Path

import pytest

from mindie_mm.errors import SegmentMissing
from mindie_mm.shm import Arena, ArenaInfo, ArraySpec, Collected, Ref, arenas_of, attach, collect, mindie, survey
from mindie_mm.shm.format.layout import STATS_OFFSET, ArenaStats, block_name
from mindie_mm.shm.reclaim import collect_path_file, totals

SPECS = {"x": ArraySpec((10, 588), "uint8"), "grid": ArraySpec((1, 3), "int64")}

OWN = """
arena = Arena.create(1 << 20)
with arena.allocate({"x": ArraySpec((5000,), "uint8")}, path_file=None) as block:
    block["x"][...] = 7
    ref = block.publish()
say(arena.path, *ref.to_words())
hear()
"""


def info(path: Path) -> ArenaInfo | None:
    return next((arena for arena in survey() if arena.file == str(path)), None)


def own(start):
    process = start(OWN)
    path, name_word, shape_word = process.hear().split()
    return process, Path(path), Ref.from_words(int(name_word), int(shape_word))


def test_reading_the_counters_of_a_truncated_file_raises(tmp_path: Path) -> None:
    """Another program may truncate an arena while its counters are read."""
    cut = tmp_path / "cut"
    cut.write_bytes(bytes(STATS_OFFSET + 8))
    with cut.open("rb") as file, pytest.raises(SegmentMissing, match="end at byte 584"):
        ArenaStats.read(file.fileno())


def test_survey_describes_an_arena_and_its_blocks(arena: Arena, path_file: Path) -> None:
    with arena.allocate(SPECS, path_file=path_file) as block:
        ref = block.publish()
    with arena.allocate(SPECS, path_file=None) as filling:
        found = info(arena.path)
        assert found is not None
        assert (found.number, found.alive, found.capacity_bytes) == (arena.number, True, 1 << 20)
        assert found.owner.pid == os.getpid()
        assert found.owner.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        assert found.used_bytes == arena.used_bytes > 0
        first, second = found.blocks
        assert (first.block, first.generation, first.state) == (ref.block, ref.generation, "published")
        assert dict(first.arrays) == SPECS
        assert first.request == str(path_file)
        assert 0 <= first.age_s < 60
        assert (second.block, second.state, second.request) == (filling.ref.block, "filling", "")


def test_the_collector_keeps_a_live_arena_and_removes_a_dead_one(start) -> None:
    process, path, ref = own(start)
    view = attach(ref)
    assert info(path).alive
    assert str(path) not in collect().of("owner_dead")
    process.kill()
    assert not info(path).alive
    attach(ref).verify()
    size = path.stat().st_size
    collected = collect()
    assert str(path) in collected.of("owner_dead")
    assert {one.num_bytes for one in collected.reclaimed if one.what == str(path)} == {size}
    assert info(path) is None
    assert not path.exists()
    assert (view["x"] == 7).all(), "readers that have mapped a removed arena must keep its pages"
    view.verify()
    with pytest.raises(SegmentMissing):
        attach(ref)
    assert str(path) not in collect().of("owner_dead")


def test_a_removed_arena_is_unmapped_when_no_array_is_left(start) -> None:
    process, path, ref = own(start)
    attach(ref)
    process.kill()
    collect()
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_keep_a_dead_owners_arena_alive(start) -> None:
    process = start("""
arena = Arena.create(1 << 16)
say(arena.path)
if os.fork() == 0:
    say("the child runs")
hear()
""")
    path = Path(process.hear())
    assert process.hear() == "the child runs"
    process.kill()
    assert str(path) in collect().of("owner_dead")
    assert not path.exists()


def test_a_dead_arena_with_a_damaged_header_is_removed(start) -> None:
    process, path, _ = own(start)
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    assert info(path).owner is None
    assert str(path) not in collect().of("owner_dead")
    process.kill()
    assert str(path) in collect().of("owner_dead")


def test_files_other_than_this_users_arenas_are_left_alone(start, tmp_path: Path) -> None:
    number = next(n for n in range(65536) if not Path(f"/dev/shm/mindie_mm-{n:04x}").exists())
    stranger = Path(f"/dev/shm/mindie_mm-{number:04x}")
    other_name = Path("/dev/shm/mindie_mm-of-somebody")
    stranger.write_bytes(b"another program's")
    other_name.write_bytes(b"mindieMM")
    process, path, _ = own(start)
    process.kill()
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    try:
        collected = collect()
        assert str(stranger) not in collected.of("owner_dead")
        assert stranger.exists()
        assert other_name.exists()
        if os.geteuid() == 0:
            assert info(path) is None
            assert path.exists()
    finally:
        stranger.unlink()
        other_name.unlink()
        path.unlink(missing_ok=True)


def test_links_and_directories_with_an_arena_name_are_left_alone(tmp_path: Path) -> None:
    paths = (Path(f"/dev/shm/mindie_mm-{number:04x}") for number in range(65536))
    link, folder = islice((path for path in paths if not path.exists()), 2)
    target = tmp_path / "target"
    target.write_bytes(b"mindieMM")
    link.symlink_to(target)
    folder.mkdir()
    try:
        collect()
        assert info(link) is None
        assert target.exists()
        assert link.is_symlink()
        assert folder.is_dir()
    finally:
        link.unlink()
        folder.rmdir()


def test_a_block_whose_path_file_was_removed_is_freed(arena: Arena, path_file: Path, tmp_path: Path) -> None:
    with arena.allocate(SPECS, path_file=path_file) as block:
        kept = block.publish()
    with arena.allocate(SPECS, path_file=tmp_path / "gone.txt") as block:
        orphan = block.publish()
    with arena.allocate(SPECS, path_file=None) as block:
        unowned = block.publish()
    (tmp_path / "gone.txt").unlink()
    with arena.allocate(SPECS, path_file=tmp_path / "filling.txt") as block:
        (tmp_path / "filling.txt").unlink()
        assert collect().of("request_gone") == (block_name(orphan.arena, orphan.block),)
        filled = block.publish()
    for ref in (kept, unowned, filled):
        attach(ref).verify()
    assert arena.num_blocks == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_inaccessible_path_file_is_not_taken_for_removed(tmp_path: Path, start) -> None:
    """If this user may not search the folder of a path file, the path file is not treated as removed."""
    private = tmp_path / "private"
    private.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    process = start(
        """
os.setuid(65534)
from mindie_mm.shm import reclaim
say("ready"); hear()
try: say(reclaim._is_gone(sys.argv[1]))
except PermissionError: say("cannot tell")
""",
        private / "shm_name.txt",
    )
    assert process.hear() == "ready"
    private.chmod(0o700)
    process.say("look")
    assert process.hear() == "cannot tell"


def test_an_impossible_path_in_a_block_header_frees_nothing(arena: Arena, path_file: Path) -> None:
    with arena.allocate(SPECS, path_file=path_file) as block:
        ref = block.publish()
    path_file.unlink()
    with arena.path.open("r+b") as file:
        whole = file.read()
        start = whole.index(b"MMB1")
        size = int.from_bytes(whole[start + 8 : start + 12], "little")
        body = whole[start + 12 : start + size].replace(bytes(str(path_file), "ascii"), bytes(len(str(path_file))))
        file.seek(start + 4)
        file.write(zlib.crc32(body, size).to_bytes(4, "little"))
        file.seek(start + 12)
        file.write(body)
    assert set(info(arena.path).blocks[0].request) == {"\0"}
    assert collect().of("request_gone") == ()
    attach(ref).verify()


def test_a_dry_run_reports_the_same_and_changes_nothing(start, arena: Arena, tmp_path: Path) -> None:
    process, path, ref = own(start)
    process.kill()
    with arena.allocate(SPECS, path_file=tmp_path / "gone.txt") as block:
        orphan = block.publish()
    (tmp_path / "gone.txt").unlink()
    old = tmp_path / ".mindie_mm-0"
    old.mkdir(mode=0o1700)
    os.utime(old, (0, 0))

    def outcome(collected: Collected) -> dict[str, tuple[str, int]]:
        mine = (str(path), str(old), block_name(arena.number, orphan.block))
        return {one.what: (one.cause, one.num_bytes) for one in collected.reclaimed if one.what in mine}

    expected = {
        str(path): ("owner_dead", path.stat().st_size),
        str(old): ("request_dead", 0),
        block_name(arena.number, orphan.block): ("request_gone", info(arena.path).blocks[0].num_bytes),
    }
    before = totals()
    assert outcome(collect([tmp_path], dry_run=True)) == expected
    assert totals() == before
    attach(ref).verify()
    attach(orphan).verify()
    assert outcome(collect([tmp_path])) == expected
    gone = totals()["request_gone"]
    assert gone.number == before["request_gone"].number + 1
    assert gone.num_bytes == before["request_gone"].num_bytes + expected[block_name(arena.number, orphan.block)][1]
    assert outcome(collect([tmp_path])) == {}
    assert not path.exists()
    assert not old.exists()


def test_collecting_a_path_file_frees_its_blocks_and_segments_once(arena: Arena, tmp_path: Path) -> None:
    path_file = tmp_path / "shm_name.txt"
    with arena.allocate(SPECS, path_file=path_file) as block:
        ref = block.publish()
    num_bytes = arena.used_bytes
    segment = mindie.create_shm(5000, path_file)
    stranger = Path("/dev/shm/psm_not-a-segment")
    with path_file.open("a") as file:
        file.write(f"{stranger.name}\nmindie_mm-1f2a 17")
    stranger.touch()
    expected = [("path_file", block_name(arena.number, ref.block)), ("path_file", segment.name)]
    try:
        for dry_run in (True, False):
            collected = collect_path_file(path_file, dry_run=dry_run)
            assert [(one.cause, one.what) for one in collected.reclaimed] == expected
            assert collected.num_bytes == num_bytes + 5000
            assert len(collected.failures) == 1
            assert "2 lines are not references (line 3, 4)" in collected.failures[0]
        assert collect_path_file(path_file).reclaimed == ()
        assert stranger.exists()
        assert arena.num_blocks == 0
    finally:
        stranger.unlink()


def test_arenas_of_returns_the_arenas_of_live_processes(arena: Arena, start, path_file: Path) -> None:
    process, path, _ = own(start)
    with arena.allocate(SPECS, path_file=path_file) as block:
        block.publish()
    (mine,) = arenas_of([os.getpid()])
    assert mine.file == str(arena.path)
    assert mine.used_bytes == arena.used_bytes
    assert [(block.state, block.request, dict(block.arrays)) for block in mine.blocks] == [("published", "", {})]
    assert [found.file for found in arenas_of([process.popen.pid])] == [str(path)]
    process.kill()
    assert arenas_of([process.popen.pid]) == []
    collect()


def test_survey_reports_the_populated_fraction_and_the_counters(arena: Arena) -> None:
    arena.populated.wait()
    found = info(arena.path)
    assert found.populated_fraction == 1.0
    assert found.stats.allocations == 0
    arena.allocate(SPECS, path_file=None).__exit__(None, None, None)
    after = info(arena.path)
    assert (after.stats.allocations, after.stats.used_bytes) == (1, 0)
    assert after.stats.peak_bytes > 0
