"""Tests for path files, and releasing the blocks that they list."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded, SharedMemoryError, StaleReference
from mindie_mm.shm import Arena, ArraySpec, attach, mindie, release
from mindie_mm.shm.format.layout import ArenaHeader, Owner

SPECS = {"x": ArraySpec((1000,), "uint8")}


def publish(arena: Arena, path_file: Path):
    with arena.allocate(SPECS, path_file=path_file) as block:
        return block.publish()


def test_release_frees_exactly_the_blocks_in_the_file(arena: Arena, path_file: Path, tmp_path: Path) -> None:
    refs = [publish(arena, path_file) for _ in range(3)]
    other = publish(arena, tmp_path / "other.txt")
    assert release(path_file) == 3
    assert release(path_file) == 0
    for ref in refs:
        with pytest.raises(StaleReference):
            attach(ref)
    attach(other).verify()
    assert arena.num_blocks == 1


def test_release_works_from_another_process(arena: Arena, path_file: Path, start) -> None:
    for _ in range(2):
        publish(arena, path_file)
    process = start("say(release(Path(sys.argv[1])), release(Path(sys.argv[1])))", path_file)
    assert process.hear() == "2 0"
    assert arena.num_blocks == 0


def test_releasing_a_missing_or_empty_file_frees_nothing(path_file: Path) -> None:
    assert release(path_file) == 0
    path_file.touch()
    assert release(path_file) == 0
    assert release(path_file / "under a file") == 0


def test_references_to_a_removed_arena_are_ignored(path_file: Path) -> None:
    with Arena.create(1 << 16) as arena:
        publish(arena, path_file)
    assert release(path_file) == 0


@pytest.mark.parametrize(
    "line",
    [
        b"psm_8C9D4828\n",
        b"psm_8c9d482\n",
        b"psm_8c9d48280\n",
        b"psm_abCD123\n",
        b"/psm_8c9d4828\n",
        b" psm_8c9d4828\n",
        b"psm_8c9d4828\r\n",
        b"psm_8c9d4828\rmindie_mm-1f2a 17 1234567\n",
        b"mnq_8c9d4828\n",
        b"\n",
        b"mindie_mm-1f2a 17\n",
        b"mindie_mm-1F2A 17 1\n",
        b"mindie_mm-1f2a 16384 1\n",
        b"mindie_mm-1f2a 1 16777216\n",
        b"mindie_mm-1f2a 1 0\n",
        b"mindie_mm-1f2a 01 1\n",
        b"mindie_mm-1f2a  1 1\n",
        b"../../etc/passwd 1 1\n",
        b"\xff\xfe\x00\n",
        b"mindie_mm-1f2a 17 1234567\r\n",
        "mindie_mm-1f2a 1 1\u0665\n".encode(),
    ],
)
def test_an_invalid_line_is_reported_and_the_other_lines_are_released(
    arena: Arena, path_file: Path, line: bytes
) -> None:
    publish(arena, path_file)
    with path_file.open("ab") as file:
        file.write(line)
    publish(arena, path_file)
    with pytest.raises(
        CorruptReference, match=r"1 lines are not references \(line 2\); the other 2 references were released"
    ):
        release(path_file)
    assert arena.num_blocks == 0


def test_a_truncated_line_frees_nothing(arena: Arena, path_file: Path) -> None:
    publish(arena, path_file)
    for cut in range(1, path_file.stat().st_size):
        os.truncate(path_file, path_file.stat().st_size - 1)
        with pytest.raises(CorruptReference, match=f"{path_file}"):
            release(path_file)
        assert arena.num_blocks == 1, cut


def test_a_path_file_that_is_a_directory_or_a_link_is_refused(arena: Arena, tmp_path: Path, path_file: Path) -> None:
    publish(arena, path_file)
    link = tmp_path / "link"
    link.symlink_to(path_file)
    for path in (tmp_path, link):
        with pytest.raises(InputError, match="cannot be read"):
            release(path)
    assert arena.num_blocks == 1


def test_a_path_file_above_16_mib_is_refused(path_file: Path) -> None:
    path_file.touch()
    os.truncate(path_file, (16 << 20) + 1)
    with pytest.raises(LimitExceeded, match="16777216"):
        release(path_file)


def test_a_full_path_file_refuses_lines_and_can_be_released(arena: Arena, path_file: Path) -> None:
    line = b"mindie_mm-ffff 0 1\n"
    path_file.write_bytes(line * ((16 << 20) // len(line) - 100))
    with pytest.raises(LimitExceeded, match=r"Release and remove the file"):
        publish(arena, path_file)
    with pytest.raises(LimitExceeded, match=r"Release and remove the file"):
        mindie.create_shm(10, path_file)
    assert arena.num_blocks == 0
    os.truncate(path_file, len(line) * ((16 << 20) // len(line) - 10_000))
    publish(arena, path_file)
    assert path_file.stat().st_size < 16 << 20
    path_file.write_bytes(path_file.read_bytes()[-100 * len(line) :].partition(b"\n")[2])
    assert release(path_file) == 1


def test_a_path_file_may_be_a_string_and_relative(arena: Arena, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with arena.allocate(SPECS, path_file="shm_name.txt") as block:
        assert block.request == bytes(tmp_path / "shm_name.txt")
        block.publish()
    assert release("shm_name.txt") == 1
    assert arena.num_blocks == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_another_users_path_file_is_neither_released_nor_written(
    arena: Arena, path_file: Path, tmp_path: Path, mode: int
) -> None:
    """Even root refuses the file, because root would free everything that another user lists in it."""
    ref = publish(arena, tmp_path / "other.txt")
    segment = mindie.create_shm(10, tmp_path / "other.txt")
    path_file.write_bytes((tmp_path / "other.txt").read_bytes())
    os.chown(path_file, 12345, 12345)
    path_file.chmod(mode)
    content = path_file.read_bytes()
    for use in (
        lambda: release(path_file),
        lambda: mindie.release_shared_memory(path_file),
        lambda: publish(arena, path_file),
        lambda: mindie.create_shm(10, path_file),
    ):
        with pytest.raises(
            InputError, match=f"path file {path_file} belongs to user 12345; this process runs as user 0"
        ):
            use()
    assert path_file.read_bytes() == content
    attach(ref).verify()
    assert arena.num_blocks == 1
    assert Path("/dev/shm", segment.name).exists()
    assert release(tmp_path / "other.txt") == 2


def test_release_continues_past_an_arena_that_cannot_be_mapped(arena: Arena, path_file: Path) -> None:
    """The arena cannot be mapped, because it is larger than the address space."""
    number = next(n for n in range(65536) if not Path(f"/dev/shm/mindie_mm-{n:04x}").exists())
    large = Path(f"/dev/shm/mindie_mm-{number:04x}")
    path_file.write_text(f"{large.name} 0 1\n", encoding="utf-8")
    publish(arena, path_file)
    header = replace(ArenaHeader.plan(1 << 60, time.time_ns(), Owner.current()), arena=number)
    large.write_bytes(header.pack())
    try:
        os.truncate(large, header.file_bytes)
        with pytest.raises(
            SharedMemoryError, match=rf"1 of 2 references could not be released: {large} cannot be mapped"
        ):
            release(path_file)
    finally:
        large.unlink()
    assert arena.num_blocks == 0


def test_a_path_file_with_a_nul_in_its_name_is_refused(arena: Arena) -> None:
    with pytest.raises(InputError, match=r"NUL|null"):
        release(Path("a\0b"))
    with pytest.raises(InputError, match="NUL"):
        arena.allocate({"x": ArraySpec((1,), "uint8")}, path_file=Path("a\0b"))
    assert arena.num_blocks == 0
