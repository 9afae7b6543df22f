"""Tests for restarting failed processes."""

import asyncio
import time

import pytest

from mindie_mm.errors import DeviceError, UnsupportedCheckpoint
from mindie_mm.processes.restarts import RESTART_WAIT_S, Restarts, Starter


async def test_a_failed_start_is_repeated(caplog):
    tries = []

    async def start() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise OSError("not yet")
        return "up"

    starter = Starter("the thing")
    assert await starter.again(start) == "up"
    assert "the thing did not start (attempt 1)" in caplog.text
    assert "the thing will be restarted in 0.5 s" in caplog.text
    assert Restarts.of([starter, starter]) == Restarts(started=2, failed=2)


async def test_pauses_grow_until_a_process_has_proved_itself():
    async def start() -> str:
        return "up, and dead at once"

    starter = Starter("the thing", first_pause_s=0.01, last_pause_s=0.05)
    pauses = []
    began = time.monotonic()
    for _ in range(6):
        pauses.append(starter.pause_s)
        await starter.again(start)
    assert pauses == [0, 0.01, 0.02, 0.04, 0.05, 0.05], "the first start must not be delayed"
    assert time.monotonic() - began >= sum(pauses)
    starter.proved()
    assert starter.pause_s == 0
    await starter.again(start)
    assert starter.pause_s == 0.01
    assert starter.restarts == 7


@pytest.mark.parametrize(
    ("error", "least", "most"), [(DeviceError("absent"), 9, 10), (UnsupportedCheckpoint("gone"), 0, 0)]
)
async def test_waiting_is_limited_from_the_first_failure_and_skipped_if_hopeless(error, least, most):
    failed, mended = asyncio.Event(), asyncio.Event()

    async def start() -> str:
        if mended.is_set():
            return "up"
        failed.set()
        raise error

    starter = Starter("the thing", first_pause_s=0.01, last_pause_s=0.01)
    assert starter.patience_s() == RESTART_WAIT_S, "a request waits the full time if no attempt has failed"
    again = asyncio.create_task(starter.again(start))
    await failed.wait()
    assert least <= starter.patience_s(10) <= most
    starter._failing_since_s = time.monotonic() - 11
    failed.clear()
    await failed.wait()
    assert starter.patience_s(10) == 0, "the process has failed for longer than a request waits"
    mended.set()
    assert await again == "up"
    assert starter.patience_s() == RESTART_WAIT_S
