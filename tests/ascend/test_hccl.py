"""Tests for torch.distributed over the simulated HCCL. Each rank is a process with its own device."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.processes import call_ranks, start, traced


def join() -> tuple[Any, Any, int, int]:
    """Return torch, torch.distributed with a group of all ranks, the number of this rank, and the number of ranks."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    return torch, dist, rank, ranks


def reductions() -> list[str]:
    torch, dist, rank, ranks = join()
    wrong = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8):
        for op, combine in (
            (dist.ReduceOp.SUM, torch.add),
            (dist.ReduceOp.PRODUCT, torch.mul),
            (dist.ReduceOp.MAX, torch.maximum),
            (dist.ReduceOp.MIN, torch.minimum),
        ):
            parts = [(torch.arange(-8, 9) * (r % 2 + 1) + r).to(dtype) for r in range(ranks)]
            if dtype.is_floating_point:
                parts = [part / 7 for part in parts]
            expected = parts[0]
            for part in parts[1:]:
                expected = combine(expected, part)
            mine = parts[rank].to(f"npu:{rank}")
            # An Atlas A2 does not support products of bfloat16.
            if (dtype, op) == (torch.bfloat16, dist.ReduceOp.PRODUCT):
                try:
                    dist.all_reduce(mine, op=op)
                    wrong.append("a product of bfloat16 was taken")
                except RuntimeError:
                    continue
            dist.all_reduce(mine, op=op)
            if not torch.equal(mine.cpu(), expected):
                wrong.append(f"{dtype} {op}: {mine.cpu().tolist()} is not {expected.tolist()}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduce_combines_the_ranks_in_order(ranks):
    assert call_ranks(ranks, reductions) == [[]] * ranks


def collectives() -> dict:
    torch, dist, rank, ranks = join()
    here = f"npu:{rank}"
    found = {"rank": dist.get_rank(), "size": dist.get_world_size()}

    long = torch.arange(700_000.0) * (rank + 1)  # longer than the buffer through which ranks exchange data
    on_device = long.to(here)
    dist.all_reduce(on_device)
    found["long"] = torch.equal(on_device.cpu(), torch.arange(700_000.0) * sum(range(1, ranks + 1)))

    sent = torch.full((700_000,), float(rank)).to(here)
    dist.broadcast(sent, ranks - 1)
    found["broadcast"] = bool((sent.cpu() == ranks - 1).all())

    gathered = torch.empty(3 * ranks, device=here)
    dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank)).to(here))
    found["all_gather"] = gathered.cpu().tolist()

    message = [{"from": rank}] if rank == 0 else [None]
    dist.broadcast_object_list(message, src=0)
    found["object"] = message

    scattered = torch.empty(2, device=here)
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0 * ranks).to(here))
    found["reduce_scatter"] = scattered.cpu().tolist()

    piece = torch.empty(2, device=here)
    source = [torch.full((2,), float(r)).to(here) for r in range(ranks)] if rank == 0 else None
    dist.scatter(piece, source, src=0)
    found["scatter"] = piece.cpu().tolist()

    total = torch.full((2,), float(rank + 1)).to(here)
    dist.reduce(total, dst=1)
    pair = dist.new_group([0, 1])
    if rank < 2:
        both = torch.full((1,), float(rank + 1)).to(here)
        dist.all_reduce(both, group=pair)
        found["pair"] = both.cpu().tolist()
    found["reduce"] = total.cpu().tolist() if rank == 1 else None

    if rank == 0:
        dist.send(long.to(here), 1)
    elif rank == 1:
        received = torch.empty(700_000, device=here)
        dist.recv(received, 0)
        found["received"] = torch.equal(received.cpu(), torch.arange(700_000.0))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 8])
def test_collectives_move_the_right_data_and_leave_nothing_behind(ranks):
    before = set(Path("/dev/shm").iterdir())
    for rank, found in enumerate(call_ranks(ranks, collectives)):
        assert found == {
            "rank": rank,
            "size": ranks,
            "long": True,
            "broadcast": True,
            "all_gather": [float(r) for r in range(ranks) for _ in range(3)],
            "object": [{"from": 0}],
            "reduce_scatter": [2.0 * rank * ranks, (2.0 * rank + 1) * ranks],
            "scatter": [float(rank)] * 2,
            "reduce": [sum(range(1, ranks + 1))] * 2 if rank == 1 else None,
        } | ({"received": True} if rank == 1 else {}) | ({"pair": [3.0]} if rank < 2 else {})
    assert set(Path("/dev/shm").iterdir()) == before


def unequal(linger_s: float) -> str:
    torch, dist, rank, _ = join()
    tensor = torch.ones(3 + rank).to(f"npu:{rank}")
    try:
        dist.all_reduce(tensor)
        torch.npu.synchronize()
    except RuntimeError as error:
        time.sleep(linger_s)
        return str(error)
    return "no error"


def test_ranks_whose_collectives_differ_get_an_error():
    for message in call_ranks(2, unequal, 0, HCCL_ASYNC_ERROR_HANDLING=0):
        assert "507057" in message
        assert "EI0005" in message


def test_the_watchdog_ends_a_rank_after_an_error():
    with (
        start(unequal, 60, ranks=2, HCCL_ASYNC_ERROR_HANDLING=1) as processes,
        pytest.raises(AssertionError, match="got ERROR via HcclGetCommAsyncError"),
    ):
        processes[0].result()


def left_alone(where: str) -> dict:
    torch, dist, rank, _ = join()
    tensor = torch.ones(3).to(f"npu:{rank}")
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    Path(where, str(rank)).touch()
    if rank == 1:
        time.sleep(1000)  # the test kills this process during the sleep
    while Path(where, "0").exists():
        time.sleep(0.01)
    started = time.monotonic()
    dist.all_reduce(tensor)
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return {"message": str(error), "seconds": time.monotonic() - started}
    return {}


def test_if_a_rank_dies_the_other_ranks_stop_in_time(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    with start(left_alone, str(tmp_path), ranks=2, HCCL_EXEC_TIMEOUT=2, HCCL_ASYNC_ERROR_HANDLING=0) as processes:
        deadline = time.monotonic() + 90
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes[1].kill()
        (tmp_path / "0").unlink()
        found = processes[0].result()
    assert "507048" in found["message"]
    assert "EI0002" in found["message"]
    assert 1.5 < found["seconds"] < 20
    assert set(Path("/dev/shm").iterdir()) == before


def unheard() -> str:
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    if rank == 1:
        return "silent"  # this rank has registered in the store, but never joins the communicator
    try:
        dist.all_reduce(torch.ones(1).to("npu:0"))
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_join_causes_a_timeout():
    message = call_ranks(2, unheard, HCCL_CONNECT_TIMEOUT=2)[0]
    assert "hcclCommInitRootInfoConfig" in message or "HcclCommInitRootInfo" in message
    assert "error code is 9" in message


def late_wait() -> list:
    torch, dist, rank, _ = join()
    tensor = torch.full((4,), float(rank + 1)).to(f"npu:{rank}")
    landing = torch.zeros(4).pin_memory()
    work = dist.all_reduce(tensor, async_op=True)
    early = work.is_completed()
    work.wait()  # only the current stream waits, not the host
    landing.copy_(tensor, non_blocking=True)
    before = landing.tolist()
    torch.npu.current_stream().synchronize()
    return [early, before, landing.tolist()]


def test_a_collective_is_queued_on_its_stream_like_a_copy():
    assert call_ranks(2, late_wait, patience_ms=2000) == [[False, [0.0] * 4, [3.0] * 4]] * 2


def one_waits() -> bool:
    """Return whether the sum arrives although rank 1 never synchronizes.

    Its device must run the collective by itself.
    """
    torch, dist, rank, _ = join()
    tensor = torch.full((4,), float(rank + 1)).to(f"npu:{rank}")
    dist.all_reduce(tensor)
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["rank 0 has its sum"])
        return True
    torch.npu.synchronize()
    dist.distributed_c10d._get_default_store().set("rank 0 has its sum", "1")
    return bool((tensor.cpu() == 3).all())


def test_a_device_runs_a_collective_without_a_synchronization(tmp_path):
    assert call_ranks(2, one_waits, trace=tmp_path / "trace") == [True, True]
    calls = traced(tmp_path / "trace")
    assert sum(line.startswith("HcclAllReduce count=4") for line in calls) == 2
