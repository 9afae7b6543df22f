"""Tests for workers that a fork server forks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop

from mindie_mm import logs
from mindie_mm.processes import fork_client
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child
from tests.forked_worker import State

MODULE = "tests.forked_worker"


def fork_servers() -> list[psutil.Process]:
    """Return the processes of the fork server and of its copy."""
    return [one for one in psutil.Process().children() if "mindie_mm.processes.fork_server" in one.cmdline()]


async def state(child: Child) -> State:
    """Return the next state that a worker sends."""
    async with asyncio.timeout(120):
        return msgspec.msgpack.decode(await child.channel.recv(), type=State)


async def until_ended(child: Child) -> int | None:
    """Wait until a worker ends, and return its status."""
    with pytest.raises(EOFError):
        async with asyncio.timeout(120):
            await child.channel.recv()
    await child.close()
    return child.status


@pytest.fixture(autouse=True)
def no_process_is_left() -> None:
    """Check that a test leaves no process, and no zombie."""
    before = psutil.Process().children(recursive=True)
    yield
    assert [one for one in psutil.Process().children(recursive=True) if one not in before] == []


@pytest.fixture
async def forks() -> AsyncIterator[ForkClient]:
    async with ForkClient(MODULE, "") as forks:
        yield forks


async def test_a_forked_worker_is_a_child_of_this_process_with_its_state(
    forks: ForkClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the environment, working directory, streams and command line that a spawned worker would have."""
    monkeypatch.setenv("A_VARIABLE", "caf\udce9")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(os.path.isabs, sys.path)))
    forked, spawned = await forks.start(MODULE, "caf\udce9", ""), await Child.start(MODULE, "caf\udce9", "")
    try:
        one, other = await state(forked), await state(spawned)
        assert (one.pid, one.parent, one.prepared_in) == (forked.pid, os.getpid(), forks.pid)
        assert other.prepared_in is None
        assert one.arguments == other.arguments == [b"caf\xe9", b""]
        own = {name: value for name, value in other.environment.items() if name in os.environb}  # without putenv's
        assert one.environment == own | {b"SET_BY_AN_IMPORT": b"yes"}
        assert one.environment[b"A_VARIABLE"] == b"caf\xe9"
        assert one.folder == other.folder == str(tmp_path)
        assert one.num_threads == other.num_threads
        assert one.collects_garbage
        assert other.collects_garbage
        streams = [[found.descriptors[number] for number in range(3)] for found in (one, other)]
        assert streams[0] == streams[1]
        kinds = [sorted(path.partition(":")[0] for path in found.descriptors.values()) for found in (one, other)]
        assert kinds[0] == kinds[1], "it has no other files of the fork server"
        commands = [psutil.Process(child.pid).cmdline() for child in (forked, spawned)]
        assert commands[0][:2] == commands[1][:2] == ["mindie-mm: forked worker", "mindie_mm.processes.child"]
        assert MODULE in commands[0]
    finally:
        await forked.close()
        await spawned.close()
    assert forked.status == 0


@pytest.mark.parametrize(
    ("order", "status"), [(b"exit", 7), (b"raise", 1), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
async def test_the_exit_status_of_a_forked_worker_is_known(
    forks: ForkClient, order: bytes | signal.Signals, status: int
) -> None:
    child = await forks.start(MODULE)
    found = await state(child)
    if isinstance(order, bytes):
        child.channel.send(order)
    else:
        os.kill(found.pid, order)
    assert await until_ended(child) == status


async def test_forked_workers_ignore_signals_of_the_terminal_and_end_with_their_channel(forks: ForkClient) -> None:
    child = await forks.start(MODULE)
    found = await state(child)
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(found.pid, number)
        os.kill(forks.pid, number)
    other = await forks.start(MODULE)
    assert (await state(other)).drawn != found.drawn, "they must not draw the same random numbers"
    await child.close()
    await other.close()
    assert (child.status, other.status) == (0, 0)


async def test_a_forked_worker_uses_the_current_standard_output(
    forks: ForkClient, capfd: pytest.CaptureFixture[str]
) -> None:
    child = await forks.start(MODULE)
    await state(child)
    child.channel.send(b"print")
    assert await child.channel.recv() == b"printed"
    await child.close()
    assert capfd.readouterr().out == "printed\n"


async def test_workers_outlive_the_fork_server_and_later_ones_wait_for_its_successor(forks: ForkClient) -> None:
    old = await forks.start(MODULE)
    await state(old)
    first = psutil.Process(forks.pid)
    first.send_signal(signal.SIGSTOP)  # the request is sent before the fork server dies
    asking = asyncio.create_task(forks.start(MODULE))
    await asyncio.sleep(0)
    first.kill()
    later = await asking
    assert (await state(later)).prepared_in == forks.pid != first.pid
    old.channel.send(b"print")
    assert await old.channel.recv() == b"printed"
    for child in (old, later):
        await child.close()
        assert child.status == 0


async def test_a_worker_is_used_although_the_fork_server_dies_right_after_the_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker itself reports its process id, so it is not lost."""
    monkeypatch.setenv("MINDIE_MM_FAULTS", str(tmp_path))
    async with ForkClient(MODULE, "") as forks:
        assert await forks.allows("cpu"), "it is ready"
        await asyncio.wait({forks._copy})
        server = psutil.Process(forks.pid)
        while server.status() != psutil.STATUS_SLEEPING:  # noqa: ASYNC110 - it announces no wait for requests
            await asyncio.sleep(0.001)
        (tmp_path / "fork_server.forked").touch()
        child = await forks.start(MODULE)
        assert (await state(child)).prepared_in == server.pid
        await asyncio.to_thread(psutil.wait_procs, [server], 60)
        assert not (tmp_path / "fork_server.forked").exists()
        await child.close()
        assert child.status == 0


async def test_a_fork_server_that_hangs_is_replaced(forks: ForkClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "silence_s", 0.1)
    await (await forks.start(MODULE)).close()
    hung = psutil.Process(forks.pid)
    hung.send_signal(signal.SIGSTOP)
    child = await forks.start(MODULE)
    assert (await state(child)).prepared_in == forks.pid != hung.pid
    await child.close()


async def test_workers_are_spawned_if_the_fork_server_does_not_restart(
    forks: ForkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await forks.start(MODULE)).close()
    monkeypatch.setattr(forks, "_arguments", (MODULE, "fails"))
    await asyncio.wait({forks._copy})
    for one in fork_servers():
        one.kill()
    child = await forks.start(MODULE)
    assert (await state(child)).prepared_in is None
    await child.close()


async def test_copies_of_the_fork_server_take_over_without_importing_again(forks: ForkClient) -> None:
    await (await forks.start(MODULE)).close()
    for _ in range(3):
        copy = await forks._copy
        os.kill(forks.pid, signal.SIGKILL)
        child = await forks.start(MODULE)
        found = await state(child)
        assert found.prepared_in == forks.pid == copy.pid
        assert found.environment[b"SET_BY_AN_IMPORT"] == b"yes"
        await child.close()
    assert (forks.restarts.started, forks.restarts.failed) == (3, 0)


async def test_a_canceled_start_leaves_no_worker(forks: ForkClient) -> None:
    await (await forks.start(MODULE)).close()
    starting = asyncio.create_task(forks.start(MODULE))
    await asyncio.sleep(0)  # the request has been sent
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


@pytest.mark.parametrize("how", ["fails", "threads"])
async def test_workers_are_spawned_if_the_fork_server_cannot_start(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with ForkClient(MODULE, how) as forks:
        child = await forks.start(MODULE)
        assert (await state(child)).prepared_in is None
        await child.close()
        assert not await forks.allows("cpu")
    (record,) = [record for record in caplog.records if record.name == fork_client.__name__]
    assert "so processes are started without it" in record.getMessage()
    assert how != "threads" or "the fork server has 2 threads, but must have one" in record.getMessage()


async def test_only_some_devices_allow_a_fork(forks: ForkClient) -> None:
    assert await forks.allows("cpu", None)
    assert not await forks.allows("cpu", "other")


async def test_a_fork_server_that_no_loop_waits_for_is_killed() -> None:
    ForkClient(MODULE, "").abandon()


async def test_a_spare_copy_becomes_the_first_worker_of_a_forked_worker(forks: ForkClient) -> None:
    """The copy is a child of the worker. Later workers of the worker are spawned."""
    child = await forks.start(MODULE, spare=True)
    outer = await state(child)
    for prepared_in in (forks.pid, None):
        child.channel.send(b"start")
        inner = await state(child)
        assert (inner.parent, inner.prepared_in, inner.arguments) == (outer.pid, prepared_in, [b"inner"])
        assert inner.environment == outer.environment | {b"INNER": b"yes"}
    await child.close()
    assert child.status == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_spare_copy_ends_with_its_worker(forks: ForkClient, number: signal.Signals) -> None:
    child = await forks.start(MODULE, spare=True)
    found = await state(child)
    (spare,) = psutil.Process(found.pid).children()
    os.kill(found.pid, number)
    assert await until_ended(child) == -number
    with suppress(psutil.NoSuchProcess):
        psutil.wait_procs([spare], 60)
    assert not spare.is_running()


def test_a_fork_works_on_the_loop_of_the_service() -> None:
    """The service uses uvloop."""

    async def run() -> None:
        async with ForkClient(MODULE, "") as forks:
            child = await forks.start(MODULE)
            assert (await state(child)).prepared_in == forks.pid
            await child.close()
            assert child.status == 0

    uvloop.run(run())


async def test_the_settings_of_the_log_are_those_at_the_time_of_the_fork(
    forks: ForkClient, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await forks.start(MODULE)).close()
    monkeypatch.setattr(logs, "_current", logs.LogSettings(format="json"))
    child = await forks.start(MODULE)
    await state(child)
    child.channel.send(b"raise")
    assert await until_ended(child) == 1
    line = msgspec.json.decode(capfd.readouterr().err.splitlines()[-1])
    assert (line["process"], line["pid"], line["level"]) == ("forked_worker", child.pid, "critical")
