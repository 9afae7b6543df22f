"""Tests for the simulated graphs: what a capture records and refuses, and what a launch waits for."""

from __future__ import annotations

from typing import Any

from tests.ascend.processes import call


def capture(work: Any, **settings: Any) -> Any:
    """Capture `work` in a new graph, and restore the current stream and the dispatch mode if the capture fails."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

    graph = torch.npu.NPUGraph()
    with torch.npu.stream(torch.npu.current_stream()):
        try:
            with torch.npu.graph(graph, capture_error_mode="thread_local", **settings):
                work()
        finally:
            if _get_current_dispatch_mode() is graph.graph_dispatch_mode:
                _pop_mode()
    return graph


def attention(device: Any) -> tuple[Any, Any]:
    """Return a function that attends with given lengths, and the output tensor that it writes."""
    import torch

    random = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(6, 128, 256, generator=random).half().to(device) for _ in range(2))
    query = torch.randn(2, 4, 128, generator=random).half().to(device)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=device)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)
    out = torch.zeros_like(query)

    def attend(lengths: list[int]) -> Any:
        return torch.ops.npu.npu_fused_infer_attention_score(
            *(query, keys, values),
            input_layout="TND",
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=lengths,
            block_table=table,
            atten_mask=mask,
            sparse_mode=3,
            num_heads=4,
            num_key_value_heads=2,
            block_size=128,
        )[0]

    return attend, out


def launch() -> dict[str, Any]:
    import torch
    import torch_npu  # noqa: F401

    found: dict[str, Any] = {}
    source, target = torch.arange(3.0, device="npu"), torch.zeros(3, device="npu")
    factor = [2.0]
    graph = capture(lambda: target.copy_(source * factor[0] + 1))
    found["captured"] = target.tolist()
    graph.replay()
    found["launched"] = target.tolist()
    source.add_(10)
    factor[0] = 7.0
    graph.replay()
    found["launched again"] = target.tolist()

    other, side = torch.zeros(3, device="npu"), torch.npu.Stream()

    def fork() -> None:
        doubled = source * 2
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            other.copy_(doubled)
        torch.npu.current_stream().wait_stream(side)

    capture(fork).replay()
    found["two streams"] = other.tolist()
    return found


def test_a_capture_runs_nothing_and_a_launch_reads_the_captured_addresses():
    assert call(launch) == {
        "captured": [0.0] * 3,
        "launched": [1.0, 3.0, 5.0],
        "launched again": [21.0, 23.0, 25.0],
        "two streams": [20.0, 22.0, 24.0],
    }


def refuse() -> dict[str, str]:
    import torch
    import torch_npu  # noqa: F401

    ones, pinned, pageable = torch.ones(2, device="npu"), torch.ones(2).pin_memory(), torch.ones(2)
    event, side = torch.npu.Event(), torch.npu.Stream()
    event.record()

    def fork() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            ones + 1

    cases: dict[str, Any] = {
        "item": ones[0].item,
        "cpu": ones.cpu,
        "pageable": lambda: ones.copy_(pageable, non_blocking=True),
        "synchronize": lambda: torch.npu.current_stream().synchronize(),
        "query": side.query,
        "event query": event.query,
        "event from outside": lambda: torch.npu.current_stream().wait_event(event),
        "unjoined": fork,
    }
    found = {}
    for name, work in cases.items():
        try:
            capture(work)
        except RuntimeError as error:
            found[name] = str(error.__context__ or error) + str(error)
    try:
        torch.npu.NPUGraph().capture_begin()
    except RuntimeError as error:
        found["default stream"] = str(error)
    capture(lambda: ones.copy_(pinned, non_blocking=True)).replay()
    found["pinned"] = str(ones.tolist())
    return found


def test_a_capture_refuses_waits_queries_the_default_stream_and_unjoined_streams():
    found = call(refuse)
    assert found.pop("pinned") == "[1.0, 1.0]"
    assert "non-default stream" in found.pop("default stream")
    codes = {"pageable": "107041", "event from outside": "107024", "unjoined": "107025"}
    assert len(found) == 8
    for name, message in found.items():
        assert codes.get(name, "107030") in message, (name, message)


def update() -> dict[str, Any]:
    import torch
    import torch_npu  # noqa: F401

    found: dict[str, Any] = {}
    (attend, out), (attend_too, out_too) = attention("npu"), attention("npu")

    def work() -> None:
        out.copy_(attend([256, 256]))
        out_too.copy_(attend_too([9, 9]))

    graph = capture(work, auto_dispatch_capture=True)
    updates, fence = graph.graph_dispatch_mode.update_stream, torch.npu.Event()

    def start(*lengths: list[int]) -> None:
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": one} for one in lengths])
        graph.replay()
        fence.record()

    def step(*lengths: list[int]) -> list[bool]:
        start(*lengths)
        return [
            torch.equal(result, function(given))
            for result, function, given in zip((out, out_too), (attend, attend_too), (lengths * 2)[:2], strict=True)
        ]

    found["first"] = step([5, 200])
    start([1, 1])
    updates.wait_event(fence)
    found["second"] = step([130, 1], [7, 256])
    start([1, 1])
    try:
        start([1, 1])
    except RuntimeError as error:
        found["too early"] = str(error)
    return found


def test_an_update_changes_one_operator_and_waits_for_earlier_launches():
    found = call(update)
    assert "107034" in found.pop("too early")
    assert found == {"first": [True, True], "second": [True, True]}


def wait_for_update() -> str:
    import torch
    import torch_npu  # noqa: F401

    attend, out = attention("npu")
    graph = capture(lambda: out.copy_(attend([256, 256])), auto_dispatch_capture=True)
    graph.replay()
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [3, 4]}])  # a launch may also come before its update
    assert torch.equal(out, attend([3, 4]))
    graph.replay()
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_launch_without_an_update_times_out():
    assert "507046" in call(wait_for_update, timeout_ms=200)


def free() -> str:
    import torch
    import torch_npu  # noqa: F401

    sources, target = [torch.ones(2, device="npu")], torch.zeros(2, device="npu")
    graph = capture(lambda: target.copy_(sources[0] + 1))
    sources.clear()
    graph.replay()
    try:
        return str(target.tolist())
    except RuntimeError as error:
        return str(error)


def test_a_launch_fails_if_a_captured_tensor_was_freed():
    assert "507018" in call(free)


def take_empty_slice() -> str:
    import torch
    import torch_npu  # noqa: F401

    source, target = torch.ones(2, device="npu"), torch.zeros(2, device="npu")

    def work() -> None:
        own = source + 1
        target.copy_(torch.cat([own, own[2:]]))

    capture(work).replay()
    return str(target.tolist())


def test_a_graph_may_read_empty_slices_of_its_own_tensors():
    assert call(take_empty_slice) == "[2.0, 2.0]"
