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
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.lockdown import landlock, lock_in, seccomp
from mindie_mm.lockdown.allowed_calls import allowed_calls
from mindie_mm.lockdown.resource_limits import limit_resources
from mindie_mm.lockdown.system_calls import NUMBERS, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, number_of, prctl
from tools.arguments import parser

MEMORY_BYTES = 2**26
LIBC = ctypes.CDLL(None, use_errno=True)
ACTS: dict[str, Callable[[World], object]] = {}
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
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


def address_of(result: int) -> int:
    if result == 2**64 - 1:  # MAP_FAILED
        raise OSError(ctypes.get_errno(), "")
    return result


def mapped(address: int | None, nbytes: int, protection: int, flags: int) -> int:
    LIBC.mmap.restype = ctypes.c_void_p
    return address_of(LIBC.mmap(address, ctypes.c_size_t(nbytes), protection, flags, -1, ctypes.c_long(0)))


def clock_of(process: int) -> int:
    """Return the clock of the processor time of another process."""
    return ~process << 3 | 2


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
def map_a_received_file(world: World) -> None:
    mmap.mmap(world.received(), mmap.PAGESIZE, offset=mmap.PAGESIZE)


@act
def allocate_without_end(_: World) -> None:
    held = []
    while len(held) < 256:
        held.append(bytearray(2**20))


@act
def share_memory_without_end(_: World) -> None:
    mmap.mmap(-1, 2 * MEMORY_BYTES)


@act
def map_read_only_memory(_: World) -> None:
    """Map memory without contents. Reading it needs page tables, which no limit counts."""
    mapped(None, 2**30, mmap.PROT_READ, PRIVATE)


@act
def map_memory_that_grows_downwards(_: World) -> None:
    mapped(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE | 0x100)  # MAP_GROWSDOWN


@act
def map_huge_pages(_: World) -> None:
    """Map the machine's reserved huge pages. If there is none, the kernel returns ENOMEM to a process without locks."""
    mapped(None, 2**21, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE | 0x40000)  # MAP_HUGETLB


@act
def keep_more_memory_by_protecting_it(_: World) -> None:
    """Write to memory and make it read-only, so that RLIMIT_DATA does not count it."""
    checked(LIBC.mprotect(ctypes.c_void_p(_page()), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ))


@act
def grow_a_page_of_its_stack(_: World) -> None:
    """Move and grow a page of the stack, which RLIMIT_DATA does not count."""
    page = (ctypes.c_void_p.in_dll(LIBC, "__libc_stack_end").value or 0) & -mmap.PAGESIZE
    LIBC.mremap.restype = ctypes.c_void_p
    old, new = ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_size_t(2**30)
    address_of(LIBC.mremap(ctypes.c_void_p(page - 20 * mmap.PAGESIZE), old, new, 1))  # MREMAP_MAYMOVE


@act
def page_out_memory(_: World) -> None:
    """Ask the kernel to take a page out of memory. Pages of libraries are shared with other processes."""
    checked(LIBC.madvise(ctypes.c_void_p(_page()), ctypes.c_size_t(mmap.PAGESIZE), 21))  # MADV_PAGEOUT


@act
def raise_the_limit_of_the_stack(_: World) -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@act
def ignore_the_signal_of_a_limit(_: World) -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)


@act
def block_the_signal_of_a_limit(_: World) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})


@act
def read_its_parents_clock(world: World) -> None:
    time.clock_gettime(clock_of(world.parent))


@act
def read_the_resolution_of_its_parents_clock(world: World) -> None:
    time.clock_getres(clock_of(world.parent))


@act
def sleep_by_its_parents_clock(world: World) -> None:
    past = ctypes.byref((ctypes.c_long * 2)())
    if number := LIBC.clock_nanosleep(clock_of(world.parent), 1, past, None):  # TIMER_ABSTIME
        raise OSError(number, "")


@act
def read_its_parents_affinity(world: World) -> None:
    os.sched_getaffinity(world.parent)


@act
def read_its_parents_limits(world: World) -> None:
    resource.prlimit(world.parent, resource.RLIMIT_CPU)


@act
def send_out_of_band(world: World) -> None:
    world.channel.send(b"a", socket.MSG_OOB)


@act
def peek_at_a_message(world: World) -> None:
    world.channel.recv(1, socket.MSG_PEEK)


@act
def send_a_descriptor(world: World) -> None:
    socket.send_fds(world.channel, [b"a"], [world.channel.fileno()])


@act
def signal_itself(_: World) -> None:
    checked(LIBC.tgkill(os.getpid(), threading.get_native_id(), signal.SIGCONT))


@act
def raise_the_limit_of_memory(_: World) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    bytearray(2 * MEMORY_BYTES)


@act
def raise_the_limit_of_time(_: World) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))


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
        if name not in ALLOWED:
            LIBC.syscall(number_of(name, platform.machine()), -1, -1, -1, -1)
            assert ctypes.get_errno() == errno.EPERM, name


ALLOWED = allowed_calls((), 0)
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
