"""Tests for decode steps that run as graphs: the same tokens as without graphs, few launches, and every fallback."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.ascend.processes import call, call_ranks


def served(engine: Any, requests: int, rng: random.Random, steps: list[Any] | None = None) -> dict[str, list[int]]:
    """Return the tokens of requests that join one after another. One of them is aborted.

    If `steps` is given, append the counts of each step, with the number of updated operators.
    """
    import numpy as np

    from mindie_mm.engine.requests.engine_messages import Abort, Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from tests.ascend.counted import counted
    from tests.ascend.test_runtime import simulator

    waiting = []
    for number in range(requests):
        ids = np.arange(10, 110 + rng.randrange(40), dtype=np.int64)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        waiting.append(Add(request_id=str(number), input_ids=ids.tobytes(), params=params))
    tokens: dict[str, list[int]] = {}
    count = 0
    while waiting or engine.has_work():
        if waiting and count % 3 == 0:
            assert engine.add(waiting.pop(0)) is None
        if count == 20:
            engine.abort(Abort(request_id="1"))
        count += 1
        before = simulator().sim_calls(b"aclmdlRICaptureTaskUpdateBegin")
        with counted() as counts:
            for progress in engine.step().progress:
                assert progress.error is None, progress.error
                tokens.setdefault(progress.request_id, []).extend(progress.token_ids)
        if steps is not None:
            steps.append((counts, simulator().sim_calls(b"aclmdlRICaptureTaskUpdateBegin") - before))
    tokens.pop("1")
    return tokens


def serve(dtype: str) -> dict[str, Any]:
    """Generate with and without graphs, and with captures or updates that fail."""
    import logging

    import torch

    from mindie_mm.engine.core import Engine
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig
    from tests.ascend.test_runtime import simulator

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mindie_mm.engine.decode_graphs").addHandler(handler)
    model = load_model(None, "npu", dtype)
    spec = model.spec

    def engine(**settings: Any) -> Engine:
        # Four KV blocks of 128 tokens are not enough for six requests, so some requests are preempted.
        config = EngineConfig(max_model_len=256, prefix_caching=False, **settings)
        return Engine(model, config, 4 * 128 * spec.kv_token_bytes)

    eager, graphs, steps = engine(enforce_eager=True), engine(), []
    expected = served(eager, 6, random.Random(0))
    served(graphs, 6, random.Random(0))  # captures all sizes
    found = {
        "layers": len(spec.layers),
        "graphs": served(graphs, 6, random.Random(0), steps) == expected,
        "graph steps": [
            (counts.launches, updated, counts.uploads, counts.syncs)
            for counts, updated in steps
            if counts.names["launches"].keys() <= {"aten::copy_", "aten::max"} and counts.launches
        ],
        "messages": [*messages],
    }
    messages.clear()
    simulator().sim_fail(b"aclmdlRICaptureBegin=107032")
    failing = engine()
    found["failed capture"] = served(failing, 6, random.Random(0)) == expected, [*messages]
    simulator().sim_fail(b"")
    messages.clear()
    update = torch.npu.NPUGraph.update
    torch.npu.NPUGraph.update = lambda graph, cpu_update_input: update(graph, [{"misspelled": 1}])
    found["ignored update"] = served(engine(), 6, random.Random(0)) == expected, [*messages]
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_give_the_same_tokens_with_few_launches(dtype):
    """In float32 there is no fused attention, so nothing is updated and no update can be ignored."""
    found = call(serve, dtype)
    assert found["graphs"]
    assert not found["messages"]
    assert len(found["graph steps"]) > 20
    updated = found["layers"] if dtype == "bfloat16" else 0
    for launches, updates, uploads, syncs in found["graph steps"]:
        assert launches <= 3, "the ids of the step before, the graph, and the greedy tokens"
        assert (updates, uploads, syncs) == (updated, 1, 1)
    are_equal, messages = found["failed capture"]
    assert are_equal
    (message,) = messages
    assert message.startswith("decode steps cannot be recorded as graphs, so each operator is launched separately: ")
    assert "107032" in message
    are_equal, messages = found["ignored update"]
    assert are_equal
    assert len(messages) == (dtype == "bfloat16")
    assert all("their logits differ by " in message for message in messages)


def serve_as_rank(checkpoint: str, store: str, failing: str) -> tuple[list[bool], list[str]]:
    """Generate with two ranks. On rank 1, the function `failing` of CANN fails, if it is not empty.

    Return whether the tokens with graphs are those without graphs, and the messages about graphs.
    """
    import logging
    import os

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.ranks import join
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig
    from tests.ascend.test_runtime import simulator

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mindie_mm.engine.decode_graphs").addHandler(handler)
    number = int(os.environ["RANK"])
    ranks = join(number, 2, store, "npu")
    ranks.open_device("npu")
    model = load_model(checkpoint, "npu", "bfloat16")
    config = EngineConfig(max_model_len=256, prefix_caching=False, tensor_parallel=2)
    size = 16 * 128 * model.spec.kv_token_bytes
    eager = Engine(model, EngineConfig(max_model_len=256, enforce_eager=True, tensor_parallel=2), size, ranks)
    expected = served(eager, 3, random.Random(0))
    graphs = Engine(model, config, size, ranks)
    same = [served(graphs, 3, random.Random(0)) == expected]
    assert graphs._runner._graphs is not None
    assert graphs._runner._graphs._graphs
    if number == 1:
        simulator().sim_fail(f"{failing}=107033".encode())
    same.append(served(Engine(model, config, size, ranks), 3, random.Random(0)) == expected)
    return same, messages


def test_if_the_capture_of_one_rank_fails_all_ranks_launch_operators(random_checkpoint, tmp_path):
    results = call_ranks(
        2, serve_as_rank, str(random_checkpoint), str(tmp_path / "store"), "aclmdlRICaptureTaskGrpBegin"
    )
    for number, (same, messages) in enumerate(results):
        assert same == [True, True]
        (message,) = messages
        assert ("107033" if number == 1 else "it fails on another rank") in message
