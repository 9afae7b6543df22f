"""Tests for the channels between a process and its worker processes."""

import asyncio
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import uvloop

from mindie_mm import errors
from mindie_mm.errors import ArenaFull, LimitExceeded, MindieMMError, ProcessDied
from mindie_mm.processes import ipc
from mindie_mm.processes.ipc import Channel, Child, ChildChannel, Failure, open_channel
from mindie_mm.processes.receiving import ReceivingChannel
from tests.starting_worker import Begun
from tools.random_checkpoint import write_checkpoint

BY = f"it was started with sys.executable, {sys.executable}"


async def connected() -> tuple[Channel, ChildChannel]:
    ours, theirs = socket.socketpair()
    return await open_channel(ours), ChildChannel(theirs.detach())


class NoRoom(ArenaFull):
    """An error class that the receiving process may not be able to import."""


@pytest.mark.parametrize(
    ("error", "kind"), [(LimitExceeded("3 of 2"), LimitExceeded), (NoRoom("none"), ArenaFull), (MindieMMError(), None)]
)
def test_an_error_arrives_as_its_nearest_public_class(error: MindieMMError, kind: type | None) -> None:
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(Failure.of(error)), type=Failure).exception()
    assert (type(crossed), str(crossed)) == (kind or MindieMMError, str(error))


def test_the_old_name_of_an_error_is_an_alias() -> None:
    assert errors.WorldError is errors.OperationalError
    with pytest.raises(errors.WorldError):
        raise Failure("OperationalError", "a disk failed").exception()
    with pytest.raises(errors.OperationalError):
        raise Failure("WorldError", "a disk failed").exception()


async def test_messages_are_sent_both_ways():
    channel, child = await connected()
    with child:
        for message in (b"", b"a", bytes(range(256)) * 20_000):
            channel.send(message)
            assert await asyncio.to_thread(child.recv) == message
            sender = threading.Thread(target=child.send, args=(message,))
            sender.start()
            assert await channel.recv() == message
            sender.join()
        assert not child.poll()
        await channel.close()


async def test_a_message_has_a_length_prefix_on_the_wire():
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours)
    with theirs:
        channel.send(b"abc")
        assert theirs.recv(100) == b"\x00\x00\x00\x03abc"
        theirs.sendall(struct.pack("!i", 2) + b"xy")
        assert await channel.recv() == b"xy"
        await channel.close()


async def test_a_closed_end_raises_eof_error():
    channel, child = await connected()
    with child:
        pass
    with pytest.raises(EOFError):
        await channel.recv()
    await channel.close()

    channel, child = await connected()
    await channel.close()
    with child, pytest.raises(EOFError):
        child.recv()


async def test_a_truncated_message_raises_eof_error():
    ours, theirs = socket.socketpair()
    channel = await open_channel(ours)
    with theirs:
        theirs.sendall(struct.pack("!i", 10) + b"short")
    with pytest.raises(EOFError):
        await channel.recv()
    await channel.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("send", [Channel.send, lambda channel, message: channel.send_with(message, [])])
def test_messages_to_a_dead_peer_are_dropped(
    loop: Callable[[], asyncio.AbstractEventLoop], send: Callable[[Channel, bytes], None]
) -> None:
    """A request that is sent between the death of a process and its discovery waits for the next process."""

    async def main() -> None:
        channel, child = await connected()
        with child:
            pass
        receiving = asyncio.create_task(channel.recv())
        while not receiving.done():
            send(channel, b"a message")
            await asyncio.sleep(0)
        with pytest.raises(EOFError):
            receiving.result()
        send(channel, b"a message")
        await channel.close()
        send(channel, b"a message")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("size", [0, 1, 10**6], ids=["empty", "small", "larger than the buffer"])
def test_files_arrive_with_their_whole_message(loop: Callable[[], asyncio.AbstractEventLoop], size: int) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = await open_channel(ours)
        with theirs:
            for number in (1, 2):
                message = bytes([number]) * size
                channel.send_with(message, [theirs.fileno()])
                received, files = await asyncio.to_thread(ReceivingChannel(theirs).receive)
                assert (received, len(files)) == (message, 1)
                assert os.fstat(files[0]).st_ino == os.fstat(theirs.fileno()).st_ino
                os.close(files[0])
            await channel.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_peer_that_does_not_read_its_messages_is_disconnected(
    loop: Callable[[], asyncio.AbstractEventLoop], size: int
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = await open_channel(ours)
        receiving = asyncio.create_task(channel.recv())
        with theirs:
            while not receiving.done():
                channel.send_with(bytes(size), [theirs.fileno()])
                await asyncio.sleep(0)
            with pytest.raises(EOFError):
                receiving.result()
            await channel.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow workers a long time to end, so that they are not killed if the machine is busy."""
    monkeypatch.setattr(ipc, "PATIENCE_S", 60.0)


@pytest.mark.usefixtures("unhurried")
async def test_a_busy_worker_ends_with_its_channel_and_removes_its_files(tmp_path):
    file = tmp_path / "made"
    child = await Child.start("tests.busy_worker", str(file))
    assert await child.channel.recv() == b"made"
    assert file.exists()
    await child.close()
    assert child.status == 0, "the worker must exit by itself, not by a signal"
    assert not file.exists()
    await child.close()


@pytest.mark.parametrize(
    ("how", "error"),
    [("fails", ArenaFull("no room")), ("ends", ProcessDied(f"it exited with status 3 before it was ready; {BY}"))],
)
async def test_an_error_during_the_startup_of_a_worker_is_raised(how: str, error: MindieMMError) -> None:
    child = await Child.start("tests.starting_worker", "begins")
    shares: list[float] = []
    assert await child.ready(Begun, "it", shares.append) == Begun(42)
    assert shares == [0.25, 0.5]
    await child.close()
    child = await Child.start("tests.starting_worker", how)
    with pytest.raises(type(error), match=f"^{error}$"):
        await child.ready(Begun, "it")
    await child.close()


@pytest.mark.parametrize(
    ("executable", "message"),
    [
        (None, "no worker process can be started: sys.executable is None, as in some programs that embed Python"),
        ("", "no worker process can be started: sys.executable is ''"),
        ("/no/python", r"with sys.executable \(/no/python\): No such file or directory"),
        ("/dev/null", r"with sys.executable \(/dev/null\): Permission denied"),
        ("/bin/false", "it exited with status 1 before it was ready; it was started with sys.executable, /bin/false"),
    ],
)
async def test_the_error_mentions_an_executable_that_is_not_python(
    monkeypatch: pytest.MonkeyPatch, executable: str, message: str
) -> None:
    """In a program that embeds Python, sys.executable may be empty or that program, so the error mentions it."""
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ProcessDied, match=message):
        await (await Child.start("tests.starting_worker", "ends")).ready(Begun, "it")


async def test_a_process_that_cannot_be_started_raises_process_died():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(
            ProcessDied,
            match=r"^tests\.starting_worker cannot be started with sys.executable \(.*\): Too many open files$",
        ):
            await Child.start("tests.starting_worker", "begins")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def forked() -> Iterator[Callable[[], None]]:
    """Yield a function that forks this process. Each child sleeps until the test ends."""
    children: list[int] = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            signal.pause()
            os._exit(0)
        children.append(child)

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.usefixtures("unhurried")
async def test_a_worker_sees_its_channel_close_despite_a_forked_process(forked, tmp_path):
    child = await Child.start("tests.busy_worker", str(tmp_path / "made"))
    assert await child.channel.recv() == b"made"
    forked()
    await child.close()
    assert child.status == 0, "the worker must exit by itself, not by a signal"


async def test_the_end_of_a_worker_is_seen_despite_a_process_forked_at_its_start(forked, monkeypatch):
    def starting(*arguments, **options):
        forked()
        return subprocess.Popen(*arguments, **options)

    monkeypatch.setattr(ipc, "subprocess", SimpleNamespace(Popen=starting, DEVNULL=subprocess.DEVNULL))
    child = await Child.start("tests.starting_worker", "ends")
    with pytest.raises(ProcessDied):
        async with asyncio.timeout(300):
            await child.ready(Begun, "it")


@pytest.mark.slow
async def test_a_killed_parent_ends_its_child(tmp_path):
    """If a parent dies by SIGKILL, the kernel closes the parent's end of the channel."""
    checkpoint_path = write_checkpoint(tmp_path)
    script = f"""
import asyncio
from pathlib import Path
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.tokenize import AsyncTokenizer

async def main():
    tokenizer = await AsyncTokenizer.start(Path({str(checkpoint_path)!r}), WorkerConfig(arena_bytes=2**20))
    print(*tokenizer.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    (child,) = [psutil.Process(int(pid)) for pid in (await parent.stdout.readline()).split()]
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [child], 30)
    assert gone == [child]
