"""Actions of a decoder that an attacker controls. `python -m tests.lockdown.acts USER < ACTS` prints each outcome.

ACTS is a JSON list of pairs: the name of an act and the name of a mechanism. The process runs as USER and forks a child
for each pair. That mechanism, or all mechanisms if it is "all", sandboxes the child, which then runs the act. The child
reports "done" or the name of an exception, unless a signal kills it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.lockdown import landlock, limit_processor_time, lock_in, seccomp
from mindie_mm.lockdown.resource_limits import limit_resources
from mindie_mm.lockdown.system_calls import NUMBERS, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, number_of, prctl
from tools.arguments import parser

MEMORY_BYTES = 2**26
LIBC = ctypes.CDLL(None, use_errno=True)
ACTS: dict[str, Callable[[World], object]] = {}
_PTRACE_SEIZE = 0x4206


@dataclass(frozen=True)
class World:
    """The objects that acts try to reach."""

    folder: Path
    port: int
    """Port on which a TCP socket listens."""
    parent: int
    channel: socket.socket
    """Unix socket. A message with a file descriptor waits in it."""
    closed: int
    """Inherited descriptor of the same file. The child does not need it."""
    program: bytes
    """Bytes of an executable that does nothing."""

    def received(self) -> int:
        """Receive the descriptor of a file with three pages. Only the middle page belongs to the child."""
        _, descriptors, _, _ = socket.recv_fds(self.channel, 1, 1)
        return descriptors[0]


def act(do: Callable[[World], object]) -> Callable[[World], object]:
    ACTS[do.__name__] = do
    return do


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


@act
def read_a_file(_: World) -> None:
    Path("/etc/passwd").read_bytes()


@act
def list_a_folder(_: World) -> None:
    [*Path("/").iterdir()]


@act
def look_a_path_up(_: World) -> None:
    Path("/etc/passwd").stat()


@act
def make_a_file(world: World) -> None:
    (world.folder / "made").touch()


@act
def remove_a_file(world: World) -> None:
    (world.folder / "file").unlink()


@act
def connect_by_tcp(world: World) -> None:
    with socket.socket() as client:
        client.connect(("127.0.0.1", world.port))


@act
def listen_on_tcp(_: World) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        pass


@act
def send_by_udp(world: World) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.sendto(b"a", ("127.0.0.1", world.port))


@act
def connect_to_an_abstract_socket(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{world.folder}")


@act
def connect_to_a_socket_by_path(world: World) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(world.folder / "socket"))


@act
def fork(_: World) -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


@act
def start_a_thread(_: World) -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


@act
def execute(_: World) -> None:
    os.execv("/bin/true", ["true"])


@act
def execute_from_memory(world: World) -> None:
    program = os.memfd_create("program")
    os.write(program, world.program)
    os.execve(program, ["true"], {})


@act
def write_to_a_received_descriptor(world: World) -> None:
    os.pwrite(world.received(), b"a", 0)


@act
def grow_a_received_file(world: World) -> None:
    os.write(descriptor := world.received(), bytes(4 * mmap.PAGESIZE))
    os.ftruncate(descriptor, 2**20)


@act
def cut_a_received_file(world: World) -> None:
    os.ftruncate(world.received(), 0)


@act
def write_to_an_inherited_descriptor(world: World) -> None:
    os.write(world.closed, b"a")


@act
def write_behind_its_block(world: World) -> None:
    """Map the middle page of the file, without access to the memory around it, and write to the page after it."""
    descriptor = world.received()
    LIBC.mmap.restype = ctypes.c_void_p
    page = mmap.PAGESIZE
    around = LIBC.mmap(None, ctypes.c_size_t(3 * page), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    where, flags = ctypes.c_void_p(around + page), mmap.MAP_SHARED | 0x10  # MAP_FIXED
    block = LIBC.mmap(where, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, page)
    assert block == around + page
    os.close(descriptor)
    ctypes.memset(block, 7, page)
    ctypes.memset(block + page, 7, 1)


@act
def write_its_block(world: World) -> None:
    descriptor = world.received()
    LIBC.mmap.restype = ctypes.c_void_p
    protection, size = mmap.PROT_READ | mmap.PROT_WRITE, ctypes.c_size_t(mmap.PAGESIZE)
    block = LIBC.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    ctypes.memset(block, 7, mmap.PAGESIZE)


@act
def allocate_without_end(_: World) -> None:
    held = []
    while len(held) < 256:
        held.append(bytearray(2**20))


@act
def share_memory_without_end(_: World) -> None:
    mmap.mmap(-1, 2 * MEMORY_BYTES)


@act
def raise_the_limit_of_memory(_: World) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    bytearray(2 * MEMORY_BYTES)


@act
def spin(_: World) -> None:
    limit_processor_time(0.1)
    while True:
        pass


@act
def spin_within_a_later_limit(_: World) -> None:
    """Raise a limit on processor time, and spin for longer than the first limit allowed."""
    limit_processor_time(0.1)
    limit_processor_time(30)
    while resource.getrusage(resource.RUSAGE_SELF).ru_utime < 1.5:
        pass


@act
def signal_its_parent(world: World) -> None:
    os.kill(world.parent, signal.SIGCONT)


@act
def trace_its_parent(world: World) -> None:
    checked(LIBC.ptrace(_PTRACE_SEIZE, world.parent, None, None))


@act
def read_its_parents_memory(world: World) -> None:
    here, there = ctypes.create_string_buffer(8), ctypes.addressof(ACTS_KEPT)
    local, remote = struct.pack("PN", ctypes.addressof(here), 8), struct.pack("PN", there, 8)
    checked(LIBC.process_vm_readv(world.parent, local, 1, remote, 1, 0))


@act
def map_executable_memory(_: World) -> None:
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)


@act
def make_memory_executable(_: World) -> None:
    checked(LIBC.mprotect(ctypes.c_void_p(_page()), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC))


@act
def dump_its_core(_: World) -> None:
    os.abort()


@act
def call_by_the_second_interface(_: World) -> None:
    """Call getpid through the x32 interface of x86-64."""
    checked(LIBC.syscall(0x40000000 | 39))


@act
def call_as_another_architecture(_: World) -> None:
    """Call getpid through the i386 interface of x86-64. The code was made executable before the sandbox was entered."""
    CODE()


@act
def make_every_other_call(_: World) -> None:
    """Make each system call that the filter does not list. Raise an error if one of them is not refused."""
    listed = {number_of(name, platform.machine()) for name in NUMBERS}
    listed |= {335, 336}  # uprobe calls of x86-64 have no other use, and kernels since 6.14 exempt them from filters
    for number in range(1024):
        if number not in listed and (LIBC.syscall(number, -1, -1, -1, -1, -1, -1), ctypes.get_errno()) != (-1, 1):
            raise OSError(ctypes.get_errno(), f"{number}")
    for name in NUMBERS:
        if name not in LISTED and (number := number_of(name, platform.machine())) is not None:
            LIBC.syscall(number, -1, -1, -1, -1)
            assert ctypes.get_errno() == errno.EPERM, name


LISTED = {*seccomp.FREE, *seccomp.SENDING, "mmap", "mprotect", "prlimit64", "tgkill"}
ACTS_KEPT = ctypes.create_string_buffer(8)


def _page() -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(PAGE))


PAGE = mmap.mmap(-1, mmap.PAGESIZE)
CODE: Callable[[], int] = int
if platform.machine() == "x86_64":
    _code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    _code.write(b"\xb8\x14\0\0\0\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    CODE = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(_code)))


def lock(mechanism: str, keep: list[int]) -> None:
    """Sandbox this process by one mechanism, by all mechanisms, or not at all."""
    if mechanism == "all":
        lock_in(keep, MEMORY_BYTES)
    elif mechanism == "limits":
        limit_resources(MEMORY_BYTES)
    elif mechanism == "landlock":
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        landlock.forbid_all()
    elif mechanism == "seccomp":
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        seccomp.allow_decoding(keep)


def ending(do: Callable[[World], object], world: World) -> str:
    try:
        do(world)
    except OSError as error:
        return f"{type(error).__name__} {errno.errorcode.get(error.errno or 0)} {error.strerror}".strip()
    except (MemoryError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__} {error}".strip()
    return "done"


def become(user: int) -> None:
    if user != os.getuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        prctl(PR_SET_DUMPABLE, 1)  # the value in a process that this user has started


def main() -> None:
    options = parser(__doc__)
    options.add_argument("user", type=int, metavar="USER")
    become(options.parse_args().user)
    for name, mechanism in json.load(sys.stdin):
        folder = Path(tempfile.mkdtemp())
        try:
            print(json.dumps(observed(ACTS[name], mechanism, folder)))
        finally:
            shutil.rmtree(folder)


def observed(do: Callable[[World], object], mechanism: str, folder: Path) -> dict[str, object]:
    os.chdir(folder)  # a core dump would be written here
    file = folder / "file"
    file.write_bytes(bytes(3 * mmap.PAGESIZE))
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract, by_path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    for one, address in ((abstract, f"\0{folder}"), (by_path, str(folder / "socket"))):
        one.bind(address)
        one.listen()
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    sys.stdout.flush()
    with file.open("r+b") as opened:
        socket.send_fds(ours, [b"a"], [opened.fileno()])
        pid = os.fork()
        if pid == 0:
            world = World(
                folder, tcp.getsockname()[1], os.getppid(), theirs, opened.fileno(), Path("/bin/true").read_bytes()
            )
            try:
                lock(mechanism, [theirs.fileno(), writing])
                os.write(writing, ending(do, world).encode())
            except BaseException:  # noqa: BLE001 - the child never returns
                os.write(writing, traceback.format_exc().encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        outcome = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        outcome = signal.Signals(os.WTERMSIG(status)).name + (" with a core dump" if os.WCOREDUMP(status) else "")
    for one in (tcp, abstract, by_path, ours, theirs):
        one.close()
    content = file.read_bytes() if file.exists() else b""
    pages = [content[start : start + mmap.PAGESIZE] for start in range(0, 3 * mmap.PAGESIZE, mmap.PAGESIZE)]
    return {"outcome": outcome or "ended", "pages": [max(page, default=None) for page in pages], "bytes": len(content)}


if __name__ == "__main__":
    main()
