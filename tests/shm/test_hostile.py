"""Tests for arenas that are full, truncated, replaced or damaged, or that belong to other users and namespaces."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from mindie_mm.errors import (
    ArenaFull,
    BadReference,
    InputError,
    MindieMMError,
    SegmentMissing,
    SharedMemoryError,
    StaleReference,
)
from mindie_mm.shm import (
    Arena,
    ArenaInfo,
    ArraySpec,
    Ref,
    attach,
    collect,
    free,
    release,
    request_directory,
    survey,
)
from mindie_mm.shm.format.layout import ENTRY_BYTES, NEXT, PAGE, SIZE, ArenaHeader
from tests.namespaces import FULL_SHM, UNSHARE, require
from tests.shm.conftest import PREAMBLE

SHM = Path("/dev/shm")
SPECS = {"x": ArraySpec((3000,), "uint8"), "y": ArraySpec((2, 3), "int64")}
OTHER_PIDS = (*UNSHARE, "--pid", "--fork", "--kill-child", "--mount-proc")


def publish(arena: Arena, path_file: Path | None = None) -> Ref:
    with arena.allocate(SPECS, path_file=path_file) as block:
        for array in block.values():
            array[...] = 7
        return block.publish()


def is_whole(ref: Ref) -> bool:
    with attach(ref) as view:
        return all((array == 7).all() for array in view.values())


def info(path: Path) -> ArenaInfo | None:
    return next((arena for arena in survey() if arena.file == str(path)), None)


def free_paths(number: int) -> list[Path]:
    """Return `number` paths that no arena uses."""
    return list(islice((path for n in range(65536) if not (path := SHM / f"mindie_mm-{n:04x}").exists()), number))


@contextmanager
def process(prefix: tuple[str, ...], script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a process whose command starts with `prefix`, which may create namespaces.

    Yield the process, which exchanges lines with the test.
    """
    command = [*prefix, sys.executable, "-c", PREAMBLE + script, *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def run(prefix: tuple[str, ...], script: str, *args: object) -> list[str]:
    """Run a script to its end, and return the lines that it prints."""
    command = [*prefix, sys.executable, "-c", PREAMBLE + script, *map(str, args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"the script exited with status {done.returncode}: {done.stdout}"
    return done.stdout.splitlines()


FILL = """
def fill():
    with open("/dev/shm/another-program", "ab") as file:
        try:
            while True: file.write(bytes(1 << 16)); file.flush()
        except OSError: pass
SPECS = {"x": ArraySpec((250_000,), "uint8")}
"""

NO_ROOM = """
Path("/dev/shm/another-program").write_bytes(bytes(20 << 20))
try: Arena.create(16 << 20)
except SharedMemoryError as error: say(error)
say(sorted(os.listdir("/dev/shm")))
fill()
try: Arena.create(1)
except SharedMemoryError as error: say(error)
say(sorted(os.listdir("/dev/shm")))
"""


def test_a_nearly_full_dev_shm_reports_the_free_bytes_and_how_to_add_more() -> None:
    require(FULL_SHM)
    some, left_then, none, left = run(FULL_SHM, FILL + NO_ROOM)
    assert f"has {12 << 20} of {32 << 20} bytes free, but the arena needs " in some
    for message in (some, none):
        for advice in ("mindie-mm shm gc", "request less memory", "mount -o remount,size=", "--shm-size", "emptyDir"):
            assert advice in message
    assert f"has 0 of {32 << 20} bytes free" in none
    assert left_then == left == "['another-program']", "a failed creation must not leave a file"


KILLED = """
import signal, subprocess
killed = "from mindie_mm.shm import Arena; import os; a = Arena.create(20 << 20); os.kill(os.getpid(), 9)"
assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
(left,) = os.listdir("/dev/shm")
from mindie_mm.tokenize import Tokenizer, stores
stores.ARENA_BYTES = 20 << 20
with Tokenizer.from_pretrained() as tokenizer:
    tokenizer.tokenize([{"image": sys.argv[1]}], sys.argv[2])
    (own,) = os.listdir("/dev/shm")
    say(own != left)
say(os.listdir("/dev/shm"))
"""


def test_a_tokenizer_reclaims_the_arena_of_a_killed_tokenizer(tmp_path: Path) -> None:
    require(FULL_SHM)
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    assert run(FULL_SHM, KILLED, tmp_path / "a.png", tmp_path / "shm_name.txt") == ["True", "[]"]


RESERVED = """
import subprocess
arena = Arena.create(16 << 20)
fill()
refs = []
try:
    while True:
        with arena.allocate(SPECS, path_file=None, timeout_s=0) as block:
            block["x"][...] = len(refs)
            refs.append(block.publish(bytes([len(refs)]) * 16))
except ArenaFull: pass
say(len(refs))
reader = '''
from mindie_mm.shm import Ref, attach
import sys
for number, words in enumerate(sys.argv[1:]):
    with attach(Ref.from_words(*map(int, words.split(",")))) as view:
        assert (view["x"] == number).all()
'''
words = [",".join(map(str, ref.to_words())) for ref in refs]
say(subprocess.run([sys.executable, "-c", reader, *words]).returncode)
for ref in refs: free(ref)
say(arena.num_blocks, arena.populated.wait(120))
arena.close()
del block  # its arrays keep their pages, as does a reader's mapping until it looks again
collect()
Arena.create(8 << 20).close()
say("closed")
"""


def test_a_reserved_arena_works_when_another_program_fills_the_rest() -> None:
    """Two processes write and read every byte of the arena without SIGBUS."""
    require(FULL_SHM)
    blocks, reader, left, closed = run(FULL_SHM, FILL + RESERVED)
    assert int(blocks) >= 56
    assert (reader, left, closed) == ("0", "0 True", "closed")


def test_closing_an_arena_unmaps_its_file() -> None:
    """The file is unmapped even if the arena object still exists, as in a tokenizer that replaces its arena."""
    with Arena.create(1 << 20) as arena:
        inode = arena.path.stat().st_ino
        assert arena.populated.wait(120)
        free(publish(arena))
        assert arena.used_bytes == 0
    collect()  # the reader in this process unmaps a removed arena at its next use
    assert not arena.path.exists()
    mapped = [
        line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if "/dev/shm/" in line
    ]
    assert str(inode) not in [fields[4] for fields in mapped]


LEDGER_ON_A_FULL_FILE_SYSTEM = """
arena = Arena.create(1 << 20)
with open("/dev/shm/shm_name.txt", "wb"): pass
fill()
try: arena.allocate(SPECS, path_file=Path("/dev/shm/shm_name.txt"))
except SharedMemoryError as error: say(error)
say(arena.num_blocks)
"""


def test_a_block_that_cannot_be_recorded_is_not_handed_out() -> None:
    require(FULL_SHM)
    message, left = run(FULL_SHM, FILL + LEDGER_ON_A_FULL_FILE_SYSTEM)
    assert message == "path file /dev/shm/shm_name.txt cannot be written: No space left on device"
    assert left == "0"


def settled(arena: Arena) -> None:
    """Wait until the owner notices that its file has changed. It checks the file at most once per millisecond."""
    deadline = os.times().elapsed + 5
    while os.times().elapsed < deadline:
        try:
            arena.allocate(SPECS, path_file=None).__exit__(None, None, None)
        except SharedMemoryError:
            return


def test_an_unlinked_arena_raises_for_its_owner_and_for_each_reader(arena: Arena, path_file: Path) -> None:
    first, second = publish(arena, path_file), publish(arena)
    view = attach(first)
    arena.path.unlink()
    settled(arena)
    with pytest.raises(SharedMemoryError, match=f"{arena.path} was removed.* create a new arena"):
        arena.allocate(SPECS, path_file=None)
    for ref in (first, second):
        with pytest.raises(BadReference, match=f"mindie_mm-{arena.number:04x}"):
            attach(ref)
        free(ref)
    assert release(path_file) == 0
    assert (view["x"] == 7).all(), "readers that have mapped a removed arena must keep its pages"
    with Arena.create(1 << 20) as other:
        assert is_whole(publish(other)), "a new arena must not be affected by the removed one"


CUT_WHILE_OWNED = """
arena = Arena.create(1 << 20)
with arena.allocate({"x": ArraySpec((3000,), "uint8")}, path_file=None) as block: ref = block.publish()
os.truncate(arena.path, int(sys.argv[1]) if int(sys.argv[1]) >= 0 else os.stat(arena.path).st_size + int(sys.argv[1]))
time.sleep(0.01)  # longer than the owner goes without looking at its file
try: arena.allocate({"x": ArraySpec((3000,), "uint8")}, path_file=None)
except SharedMemoryError as error: say(error)
try: attach(ref)
except SegmentMissing as error: say(error)
free(ref)
survey(); collect()
arena.close()
say(os.path.exists(arena.path))
"""


@pytest.mark.parametrize("size", [0, 100, PAGE, -1, -PAGE])
def test_a_truncated_arena_raises_instead_of_ending_the_process(size: int) -> None:
    with process((), CUT_WHILE_OWNED, size) as owner:
        lines = owner.stdout.read().splitlines()
    assert owner.wait() == 0, f"the owner exited with status {owner.returncode}: {lines}"
    owners, readers, left = lines
    assert "create a new arena" in owners
    assert "mindie_mm-" in readers
    assert left == "False"


def test_another_arena_with_the_same_number_is_not_taken_for_this_one(arena: Arena) -> None:
    """The arena is replaced by a copy of another arena with a corrected header.

    The blocks of the copy have other generations.
    """
    ref = publish(arena)
    view = attach(ref)
    with Arena.create(1 << 20) as other:
        stranger = publish(other)
        content = bytearray(other.path.read_bytes())
    content[12:16] = struct.pack("<I", arena.number)
    content[112:116] = struct.pack("<I", zlib.crc32(content[:112]))
    scratch = SHM / f"scratch-{arena.path.name}"
    scratch.write_bytes(content)
    scratch.chmod(0o600)
    try:
        scratch.rename(arena.path)
        renamed = Ref(arena.number, stranger.block, stranger.generation, stranger.dtype, stranger.shape)
        assert is_whole(renamed), "the copy must be readable as an arena"
        if (stranger.block, stranger.generation) != (ref.block, ref.generation):
            with pytest.raises(StaleReference):
                attach(ref)
        assert (view["x"] == 7).all()
        settled(arena)
        with pytest.raises(SharedMemoryError, match="create a new arena"):
            arena.allocate(SPECS, path_file=None)
        arena.close()
        assert arena.path.exists(), "the owner must not remove another arena's file"
    finally:
        arena.path.unlink()


@pytest.mark.parametrize("word", [8, 16], ids=["offset", "size"])
@pytest.mark.parametrize("value", [0, 64, PAGE, 1 << 19, 1 << 40, (1 << 64) - 1])
def test_a_damaged_table_entry_does_not_mislead_the_owner(arena: Arena, word: int, value: int) -> None:
    """Whatever the damaged entry contains, no byte outside the file and no byte of another block is allocated."""
    damaged, other = publish(arena), publish(arena)
    with arena.path.open("r+b") as file:
        file.seek(PAGE + ENTRY_BYTES * damaged.block + word)
        file.write(struct.pack("<Q", value))
    with suppress(BadReference):
        attach(damaged)
    survey()
    collect()
    free(damaged)
    held = []
    with suppress(ArenaFull):
        while True:
            held.append(arena.allocate(SPECS, path_file=None, timeout_s=0))
            held[-1]["x"][...] = len(held) % 251
    assert len(held) >= 60
    assert all((block["x"] == (number + 1) % 251).all() for number, block in enumerate(held))
    assert is_whole(other)
    for block in held:
        block.__exit__(None, None, None)
    free(other)
    assert arena.used_bytes == 0


CIRCLE = """
ref = Ref(*map(int, sys.argv[1:]))
try: attach(ref)
except SegmentMissing: say("missing")
survey()
say("seen")
"""


@pytest.mark.parametrize("size", [0, 1, PAGE])
def test_a_cycle_of_pieces_does_not_hang_readers(arena: Arena, size: int) -> None:
    ref, other = publish(arena), publish(arena)
    with arena.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        words = memoryview(memory).cast("Q")
        at, round_about = ((PAGE + ENTRY_BYTES * block) // 8 for block in (ref.block, other.block))
        words[at + SIZE], words[at + NEXT] = 1 << 62, 1 + other.block
        words[round_about + SIZE], words[round_about + NEXT] = size, 1 + other.block
        words.release()
    with process((), CIRCLE, ref.arena, ref.block, ref.generation) as reader:
        output, _ = reader.communicate(timeout=300)
    assert output.split() == ["missing", "seen"]
    for one in (ref, other):
        free(one)
    assert arena.used_bytes == 0


def test_damaged_release_words_free_no_published_block(arena: Arena) -> None:
    refs = [publish(arena) for _ in range(10)]
    with arena.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        header = ArenaHeader.unpack(memory[:PAGE], len(memory))
        for at in range(header.releases_offset, header.data_offset, 8):
            memory[at : at + 8] = struct.pack("<Q", (1 << 64) - 1)
    arena.sweep()
    assert all(is_whole(ref) for ref in refs)
    for ref in refs:
        free(ref)
    assert arena.num_blocks == 0


def test_a_path_file_that_is_a_fifo_is_refused_without_blocking(arena: Arena, path_file: Path) -> None:
    os.mkfifo(path_file)
    with pytest.raises(InputError, match="is not a regular file"):
        release(path_file)
    with pytest.raises(SharedMemoryError, match=f"{path_file} cannot be written"):
        arena.allocate(SPECS, path_file=path_file)
    assert arena.num_blocks == 0


def test_an_unreadable_path_file_raises_input_error(tmp_path: Path, path_file: Path) -> None:
    path_file.write_text("mindie_mm-0000 0 1\n", encoding="utf-8")
    path_file.chmod(0)
    tmp_path.chmod(0o755)
    script = """
if os.geteuid() == 0:
    os.seteuid(12345)
try: release(Path(sys.argv[1]))
except InputError as error: say(error)
"""
    with process((), script, path_file) as reader:
        message = reader.stdout.read().strip()
    assert message == f"path file {path_file} cannot be read: Permission denied"


def test_a_path_file_with_foreign_names_frees_only_own_blocks(arena: Arena, path_file: Path) -> None:
    """Another user's arena, files of other programs, and paths outside /dev/shm are not touched."""
    mine = publish(arena, path_file)
    program, users = free_paths(2)
    program.write_bytes(b"another program's" + bytes(1 << 16))
    content = program.read_bytes()
    psm = SHM / "psm_0123abcd_not"
    psm.write_bytes(b"theirs")
    with Arena.create(1 << 16) as other:
        theirs = publish(other)
        root = os.geteuid() == 0
        if root:
            os.chown(other.path, 12345, 12345)
        try:
            with path_file.open("a", encoding="utf-8") as file:
                print(program.name, 0, 1, file=file)
                print(users.name, 0, 1, file=file)
                if root:
                    print(other.path.name, theirs.block, theirs.generation, file=file)
                for line in ("../../etc/passwd 0 1", "psm_0123abcd_not", f"/dev/shm/{program.name} 0 1", "psm_../x"):
                    print(line, file=file)
            with pytest.raises(MindieMMError, match=r"lines? are not references|could not be released"):
                release(path_file)
            assert program.read_bytes() == content
            assert psm.read_bytes() == b"theirs"
            if root:
                os.chown(other.path, 0, 0)
            assert is_whole(theirs)
        finally:
            program.unlink()
            psm.unlink()
    with pytest.raises(StaleReference):
        attach(mine)
    assert arena.num_blocks == 0


OWN = """
arena = Arena.create(1 << 20)
with arena.allocate({"x": ArraySpec((3000,), "uint8"), "y": ArraySpec((2, 3), "int64")}, path_file=None) as block:
    for array in block.values(): array[...] = 7
    ref = block.publish()
say(arena.path, *ref.to_words())
hear()
"""


def owned(owner: subprocess.Popen[str]) -> tuple[Path, Ref]:
    path, *words = owner.stdout.readline().split()
    return Path(path), Ref.from_words(*map(int, words))


def name_owner(path: Path, pid: int) -> None:
    """Write a different pid into an arena's header, with a valid checksum."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), PAGE) as memory:
        memory[56:64] = struct.pack("<Q", pid)
        memory[112:116] = struct.pack("<I", zlib.crc32(memory[:112]))


def test_a_reused_pid_does_not_keep_a_dead_arena_alive() -> None:
    with process((), OWN) as owner:
        path, _ = owned(owner)
        name_owner(path, os.getpid())
        owner.kill()
        owner.wait()
        found = info(path)
        assert found is not None
        assert (found.alive, found.owner.pid) == (False, os.getpid()), (
            "the lock, not the pid, shows whether the owner is alive"
        )
        assert str(path) in collect().of("owner_dead")
        assert not path.exists()


def test_an_unused_pid_does_not_make_a_live_arena_dead(arena: Arena) -> None:
    ref = publish(arena)
    name_owner(arena.path, (1 << 22) + 1)
    assert info(arena.path).alive
    assert str(arena.path) not in collect().of("owner_dead")
    assert is_whole(ref)


@pytest.mark.parametrize("death", ["killed", "ended"])
def test_an_arena_of_another_pid_namespace_is_kept_until_its_owner_ends(death: str) -> None:
    require(OTHER_PIDS)
    with process(OTHER_PIDS, OWN) as owner:
        path, ref = owned(owner)
        found = info(path)
        assert found is not None
        assert found.alive
        assert found.owner.pid == 1, "the owner has pid 1 in its own namespace"
        assert found.owner.pid_namespace != Path("/proc/self/ns/pid").stat().st_ino
        collect()
        assert is_whole(ref), "the arena must be kept while its owner is alive"
        if death == "killed":
            owner.kill()
        else:
            print(file=owner.stdin, flush=True)
        owner.wait()
        if death == "ended":
            assert not path.exists(), "the arena must be removed when its process ends"
            return
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # wait for the kernel to drop the owner's lock, shortly after unshare ends
        collected = collect().of("owner_dead")
        assert str(path) in collected
        assert not path.exists()


def test_a_block_of_another_mount_namespace_is_not_freed_for_an_unseen_path_file(tmp_path: Path) -> None:
    """A path file in a container is not visible to this process, so its absence does not prove that it was removed."""
    prefix = (*UNSHARE, "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {tmp_path} && exec "$@"', "sh")
    require(prefix)
    script = """
arena = Arena.create(1 << 20)
with arena.allocate({"x": ArraySpec((3000,), "uint8")}, path_file=Path(sys.argv[1])) as block:
    block["x"][...] = 7
    ref = block.publish()
say(arena.path, *ref.to_words())
hear()
"""
    with process(prefix, script, tmp_path / "shm_name.txt") as owner:
        path, ref = owned(owner)
        assert not (tmp_path / "shm_name.txt").exists()
        collect()
        assert is_whole(ref)
        owner.kill()
        owner.wait()
        assert str(path) in collect().of("owner_dead")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
def test_a_block_of_a_chroot_is_not_freed_for_an_unseen_path_file(tmp_path: Path) -> None:
    """The path file is not visible to the collector, although both processes have the same namespaces."""
    script = """
arena = Arena.create(1 << 20)
os.chroot(sys.argv[1])
with arena.allocate({"x": ArraySpec((3000,), "uint8")}, path_file=Path("/shm_name.txt")) as block:
    block["x"][...] = 7
    ref = block.publish()
say(arena.path, *ref.to_words())
hear()
"""
    with process((), script, tmp_path) as owner:
        path, ref = owned(owner)
        assert (tmp_path / "shm_name.txt").exists()
        assert not Path("/shm_name.txt").exists()
        collect()
        assert is_whole(ref)
        owner.kill()
        owner.wait()
        assert str(path) in collect().of("owner_dead")


def test_the_path_files_of_an_unknown_owner_are_not_taken_for_removed(arena: Arena, path_file: Path) -> None:
    ref = publish(arena, path_file)
    path_file.unlink()
    name_owner(arena.path, (1 << 22) + 1)
    collect()
    assert is_whole(ref)
    name_owner(arena.path, os.getpid())
    assert f"{arena.path.name}:{ref.block}" in collect().of("request_gone")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), a_socket])
def test_a_special_file_with_an_arena_name_is_missing_and_left_alone(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    (path,) = free_paths(1)
    make(path)
    try:
        collect()
        assert info(path) is None
        with pytest.raises(SegmentMissing, match=path.name):
            attach(Ref(int(path.name[-4:], 16), 0, 1))
        with request_directory(tmp_path / "spool") as request:
            request.path_file.write_text(f"{path.name} 0 1\n")
            assert release(request.path_file) == 0
        assert os.path.lexists(path)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
