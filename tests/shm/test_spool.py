"""Tests for the spool and its request directories."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mindie_mm.errors import InputError, SharedMemoryError
from mindie_mm.shm import Arena, ArraySpec, collect, make_spool, request_directory, require_spool
from mindie_mm.shm.liveness_lock import is_locked, lock_of_the_dead

SPECS = {"x": ArraySpec((1000,), "uint8")}


def publish(arena: Arena, path_file: Path):
    with arena.allocate(SPECS, path_file=path_file) as block:
        return block.publish()


def test_a_spool_is_created_private_with_its_parents(tmp_path: Path) -> None:
    root = tmp_path / "a" / "spool"
    make_spool(root)
    make_spool(root)
    assert root.stat().st_mode & 0o777 == 0o700
    with request_directory(tmp_path / "b" / "spool") as directory:
        assert directory.path_file.exists()


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def _writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def _anothers(path: Path) -> None:
    path.mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_link, "is not a directory"),
        (lambda path: path.symlink_to("/nowhere"), "cannot be created: File exists"),
        (Path.touch, "cannot be created: File exists"),
        (_writable, "has mode 770: other users can write to it"),
        (_anothers, "belongs to user 12345, not to user 0"),
    ],
)
def test_a_spool_that_other_users_could_write_is_refused(
    tmp_path: Path, make: Callable[[Path], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "spool"
    make(root)
    for use in (lambda: make_spool(root), lambda: request_directory(root).__enter__()):
        with pytest.raises(SharedMemoryError, match=f"{root} {message}"):
            use()
    collect([root])
    assert str(root) in caplog.text


def test_a_request_directory_is_private_and_removed_with_its_request(arena: Arena, tmp_path: Path) -> None:
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
def test_every_exception_releases_the_request(arena: Arena, tmp_path: Path, error: type[BaseException]) -> None:
    def request() -> None:
        with request_directory(tmp_path, "r1") as directory:
            publish(arena, directory.path_file)
            raise error

    with pytest.raises(error):
        request()
    assert arena.num_blocks == 0
    assert list(tmp_path.iterdir()) == []


def test_a_request_directory_may_already_be_removed(tmp_path: Path) -> None:
    with request_directory(tmp_path) as directory:
        directory.path_file.unlink()
        directory.path.rmdir()


@pytest.mark.parametrize("request_id", ["", ".", "..", "a/b", "/etc", "a\0b", "x" * 256])
def test_a_request_id_that_is_not_a_file_name_is_refused(tmp_path: Path, request_id: str) -> None:
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


def test_the_collector_removes_only_directories_of_dead_requests(arena: Arena, tmp_path: Path, start) -> None:
    process = start(REQUEST, tmp_path)
    path_file = Path(process.hear())
    publish(arena, path_file)
    assert collect([tmp_path]).of("request_dead") == ()
    assert arena.num_blocks == 1
    process.kill()
    assert collect([tmp_path]).of("request_dead") == (str(tmp_path / "r1"),)
    assert list(tmp_path.iterdir()) == []
    assert arena.num_blocks == 0


def test_running_out_of_descriptors_leaves_no_directory(tmp_path: Path, start) -> None:
    process = start(
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))
try:
    with request_directory(Path(sys.argv[1])):
        pass
except SharedMemoryError as error:
    say(error)
""",
        tmp_path,
    )
    assert process.hear().endswith("cannot be created: Too many open files")
    assert list(tmp_path.iterdir()) == []


def test_a_request_directory_that_cannot_be_removed_is_left_to_the_collector(
    arena: Arena, tmp_path: Path, start
) -> None:
    process = start(
        """
import resource
try:
    with request_directory(Path(sys.argv[1])) as directory:
        say(directory.path_file)
        hear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))
except SharedMemoryError as error:
    say(error)
hear()
""",
        tmp_path,
    )
    publish(arena, Path(process.hear()))
    process.say("end")
    assert process.hear().endswith("cannot be removed: Too many open files")
    (left,) = tmp_path.iterdir()
    assert collect([tmp_path]).of("request_dead") == (), "a young directory may still be in creation"
    os.utime(left / "shm_name.txt", (0, 0))
    assert collect([tmp_path]).of("request_dead") == (str(left),), (
        "the directory must be removed, although the process is alive"
    )
    assert list(tmp_path.iterdir()) == []
    assert arena.num_blocks == 0


def test_a_late_tokenizer_does_not_recreate_the_path_file(arena: Arena, tmp_path: Path) -> None:
    why: list[str] = []

    def record(path_file: Path) -> None:
        try:
            while True:
                arena.allocate(SPECS, path_file=path_file).__exit__(None, None, None)
        except SharedMemoryError as error:
            why.append(str(error))

    for _ in range(3):
        with request_directory(tmp_path) as directory:
            for number in range(2000):
                (directory.path / str(number)).touch()
            tokenizer = threading.Thread(target=record, args=(directory.path_file,))
            tokenizer.start()
        tokenizer.join()
        assert why.pop() == f"path file {directory.path_file} cannot be written: No such file or directory"
        assert list(tmp_path.iterdir()) == []


def test_half_made_and_half_removed_directories_are_collected_when_old(tmp_path: Path) -> None:
    half_made, half_removed = tmp_path / ".mindie_mm-0", tmp_path / ".mindie_mm-1"
    half_made.mkdir(mode=0o1700)
    half_removed.mkdir(mode=0o1700)
    (half_removed / "0.jpg").touch()
    anothers = tmp_path / "not-ours"
    anothers.mkdir()
    os.utime(anothers, (0, 0))
    assert collect([tmp_path]).of("request_dead") == (), "young directories may still be in creation"
    for path in (half_made, half_removed):
        os.utime(path, (0, 0))
    assert collect([tmp_path]).of("request_dead") == (str(half_made), str(half_removed))
    assert list(tmp_path.iterdir()) == [anothers]


TROUBLE = """
import resource
spool = Path(sys.argv[1])
deep = spool / "deep"
deep.joinpath(*map(str, range(20))).mkdir(parents=True)
deep.chmod(0o1700)
(deep / "shm_name.txt").touch()
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 1024))
collected = collect([spool])
say(*(Path(request).name for request in collected.of("request_dead")))
say(*collected.of("owner_dead"))
"""


def test_collecting_continues_past_failures(tmp_path: Path, start) -> None:
    dead = start("arena = Arena.create(1 << 16); say(arena.path); hear()")
    arena_path = dead.hear()
    dead.kill()
    for name in ("a_pipe", "large", "z_last"):
        (tmp_path / name).mkdir(mode=0o1700)
    os.mkfifo(tmp_path / "a_pipe" / "shm_name.txt")
    with (tmp_path / "large" / "shm_name.txt").open("wb") as file:
        file.truncate((16 << 20) + 1)
    (tmp_path / "z_last" / "shm_name.txt").touch()
    process = start(TROUBLE, tmp_path)
    assert process.hear() == "z_last"
    assert arena_path in process.hear().split()
    assert [path.name[:11] for path in tmp_path.iterdir()] == [".mindie_mm-"], "only the deep directory must remain"


def test_a_dataset_is_not_taken_for_a_dead_request(tmp_path: Path) -> None:
    """A directory is kept if it has a path file, but was not created as a request directory."""
    (tmp_path / "a" / "image").mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "a" / "shm_name.txt").touch()
    assert collect([tmp_path]).of("request_dead") == ()
    assert (tmp_path / "a" / "image").is_dir()
    with pytest.raises(
        InputError, match=f"{tmp_path / 'a'} is not a request directory, .*{tmp_path} is therefore not a spool"
    ):
        require_spool(tmp_path)


def test_a_concurrent_survey_does_not_make_a_dead_file_look_alive(tmp_path: Path) -> None:
    """A survey holds the lock for a few microseconds, so acquiring the lock is retried."""
    path = tmp_path / "file"
    path.touch()
    stop = threading.Event()

    def look() -> None:
        with path.open("rb") as file:
            while not stop.wait(0.001):
                is_locked(file.fileno())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            with path.open("rb") as file:
                assert lock_of_the_dead(file.fileno())
    finally:
        stop.set()
        thread.join()
    with path.open("rb") as looking, path.open("rb") as file:
        fcntl.flock(looking, fcntl.LOCK_SH)
        scheduled_again = threading.Timer(0.1, looking.close)
        scheduled_again.start()
        assert lock_of_the_dead(file.fileno())
        scheduled_again.join()
    with path.open("rb") as owner, path.open("rb") as file:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert not lock_of_the_dead(file.fileno())
