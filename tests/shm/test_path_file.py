"""Path files and request directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded, StaleReference
from mindie_mm.shm import Arena, ArraySpec, attach, collect, release, request_directory

SPECS = {"x": ArraySpec((1000,), "uint8")}


def publish(arena: Arena, path_file: Path):
    with arena.allocate(SPECS, path_file=path_file) as block:
        return block.publish()


def test_release_frees_all_and_only_what_the_file_names(arena: Arena, path_file: Path, tmp_path: Path) -> None:
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


def test_a_missing_or_empty_file_names_nothing(path_file: Path) -> None:
    assert release(path_file) == 0
    path_file.touch()
    assert release(path_file) == 0
    assert release(path_file / "under a file") == 0


def test_a_file_that_names_a_vanished_arena_is_fine(path_file: Path) -> None:
    with Arena.create(1 << 16) as arena:
        publish(arena, path_file)
    assert release(path_file) == 0


@pytest.mark.parametrize(
    "line",
    [
        b"psm_8c9d4828\n",
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
def test_a_line_that_is_no_reference_is_named_and_the_others_released(
    arena: Arena, path_file: Path, line: bytes
) -> None:
    publish(arena, path_file)
    with path_file.open("ab") as file:
        file.write(line)
    publish(arena, path_file)
    with pytest.raises(CorruptReference, match=r"1 lines are no reference \(line 2\); the other 2 were released"):
        release(path_file)
    assert arena.num_blocks == 0


def test_a_line_cut_short_frees_nothing(arena: Arena, path_file: Path) -> None:
    publish(arena, path_file)
    for cut in range(1, path_file.stat().st_size):
        os.truncate(path_file, path_file.stat().st_size - 1)
        with pytest.raises(CorruptReference, match=f"{path_file}"):
            release(path_file)
        assert arena.num_blocks == 1, cut


def test_a_path_that_is_no_regular_file_is_refused(arena: Arena, tmp_path: Path, path_file: Path) -> None:
    publish(arena, path_file)
    link = tmp_path / "link"
    link.symlink_to(path_file)
    for path in (tmp_path, link):
        with pytest.raises(InputError, match="cannot be read"):
            release(path)
    assert arena.num_blocks == 1


def test_a_path_file_has_at_most_16_mib(path_file: Path) -> None:
    path_file.touch()
    os.truncate(path_file, (16 << 20) + 1)
    with pytest.raises(LimitExceeded, match="16777216"):
        release(path_file)


def test_a_request_directory_is_private_and_ends_with_its_request(arena: Arena, tmp_path: Path) -> None:
    with request_directory(tmp_path) as directory:
        assert directory.path.parent == tmp_path
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert directory.path_file == directory.path / "shm_name.txt"
        assert directory.path_file.read_bytes() == b""
        (directory.path / "image").mkdir()
        (directory.path / "image" / "0.jpg").touch()
        publish(arena, directory.path_file)
        assert arena.num_blocks == 1
    assert arena.num_blocks == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_any_way_out_releases(arena: Arena, tmp_path: Path, error: type[BaseException]) -> None:
    def request() -> None:
        with request_directory(tmp_path, "r1") as directory:
            publish(arena, directory.path_file)
            raise error

    with pytest.raises(error):
        request()
    assert arena.num_blocks == 0
    assert list(tmp_path.iterdir()) == []


def test_a_request_directory_that_was_removed_meanwhile_is_fine(tmp_path: Path) -> None:
    with request_directory(tmp_path) as directory:
        directory.path_file.unlink()
        directory.path.rmdir()


@pytest.mark.parametrize("request_id", ["", ".", "..", "a/b", "/etc", "a\0b", "x" * 256])
def test_a_request_id_is_a_file_name(tmp_path: Path, request_id: str) -> None:
    with pytest.raises(InputError, match="request id"), request_directory(tmp_path, request_id):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_request_id_in_use_is_refused_and_its_directory_stays(tmp_path: Path) -> None:
    with request_directory(tmp_path, "r1") as directory:
        with pytest.raises(InputError, match="exists"), request_directory(tmp_path, "r1"):
            pass
        assert directory.path_file.exists()


REQUEST = """
with request_directory(Path(sys.argv[1]), "r1") as directory:
    say(directory.path_file)
    hear()
"""


def test_the_directory_of_a_dead_request_is_collected_and_of_a_living_one_kept(
    arena: Arena, tmp_path: Path, start
) -> None:
    process = start(REQUEST, tmp_path)
    path_file = Path(process.hear())
    publish(arena, path_file)
    assert collect([tmp_path]).requests == ()
    assert arena.num_blocks == 1
    process.kill()
    assert collect([tmp_path]).requests == (tmp_path / "r1",)
    assert list(tmp_path.iterdir()) == []
    assert arena.num_blocks == 0
