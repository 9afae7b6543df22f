"""Tests for virtual time: idle time is found, waits and events order the clocks, and the times are always the same."""

from __future__ import annotations

import pytest

from tests.ascend.processes import call, call_ranks
from tests.ascend.virtual_time import CLOCK, measured, work

COSTS = {
    **CLOCK,
    "launch_ns": 1000,
    "copy_ns": 0,
    "sync_ns": 0,
    "event_ns": 0,
    "kernel_ns": 0,
    "memory_bytes_per_us": 1000,
    "bus_bytes_per_us": 1000,
}
"""A launch takes 1 us of the host. The device moves 1000 bytes per us."""


def steps(waits: bool) -> tuple[float, float, float]:
    """Run ten steps of four operators of 9 us. The host works for 20 us between them, after a wait or not."""
    import torch
    import torch_npu  # noqa: F401

    values = torch.zeros(750).to("npu")  # each sum reads and writes 3000 bytes three times
    torch.npu.synchronize()
    with measured() as times:
        for _ in range(10):
            for _ in range(4):
                torch.add(values, values)
            if waits:
                torch.npu.synchronize()
            work(20)
    return times.device_us, times.idle_us, times.host_us


def test_the_device_is_idle_while_the_host_works_after_a_wait():
    # The device always has work after the first launch if the host does not wait for it.
    assert call(steps, False, **COSTS) == pytest.approx((360, 0, 240), abs=5)
    assert call(steps, True, **COSTS) == pytest.approx((360 + 9 * 20 + 10, 9 * 20 + 10, 10 * (1 + 36 + 20)), abs=5)
    assert call(steps, True, **COSTS) == call(steps, True, **COSTS)


def streams() -> list[float]:
    """Return the times of two kernels on two streams without and with an order, and the waits for events."""
    import torch
    import torch_npu  # noqa: F401

    values = [torch.zeros(10000).to("npu") for _ in range(2)]
    side = torch.npu.Stream()
    values[0].neg_()
    torch.npu.synchronize()  # both clocks agree from here on
    found = []
    with measured() as times:
        values[0].neg_()  # 40 us to read and 40 to write
        with torch.npu.stream(side):
            values[1].neg_()
    found.append(times.device_us)
    torch.npu.synchronize()
    with measured() as times:
        values[0].neg_()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            values[1].neg_()
            event = side.record_event()
        values[0].neg_()
    found += [times.device_us, times.idle_us]
    with measured() as times:
        assert not event.query(), "the host has not waited yet"
        event.synchronize()
        assert event.query()
    found.append(times.host_us)
    return found


def test_events_order_the_clocks_of_streams_and_the_host():
    both, ordered, idle, waited = call(streams, **COSTS)
    assert both == pytest.approx(80, abs=5)
    assert ordered == pytest.approx(2 * 80, abs=5)
    assert idle == pytest.approx(0, abs=5)
    assert 150 < waited < 165


def reduced(rank_work: float) -> list[float]:
    import os

    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    torch.npu.set_device(int(os.environ["RANK"]))
    dist.init_process_group("hccl")
    values = torch.ones(1000, device="npu")
    dist.all_reduce(values)
    torch.npu.synchronize()
    found = []
    for late in (0, 1):
        with measured(int(os.environ["RANK"])) as times:
            if int(os.environ["RANK"]) == late:
                work(rank_work)
            dist.all_reduce(values)
            torch.npu.synchronize()
        found.append(times.idle_us)
    dist.destroy_process_group()
    return found


def test_a_rank_that_waits_for_another_is_idle():
    first, second = call_ranks(2, reduced, 500.0, **COSTS)
    assert all(500 <= idle < 520 for idle in (*first, *second)), (first, second)
