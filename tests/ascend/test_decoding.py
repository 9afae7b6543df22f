"""A decode step waits for the device once."""

from __future__ import annotations

import pytest

from tests.ascend.processes import call


def decode(dtype: str) -> list[int]:
    """How often each step of a mixed batch waited for the device, the first step aside."""
    import numpy as np

    from mindie_mm.config import EngineConfig
    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.messages import Add
    from mindie_mm.engine.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from tests.ascend.test_runtime import simulator

    engine = Engine(load_model(None, "npu", dtype), EngineConfig(), 2**26)
    requests = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 4},
    ]
    for number, request in enumerate(requests):
        ids = np.arange(10, 20 + number, dtype=np.int64)
        message = Add(
            request_id=str(number),
            input_ids=ids.tobytes(),
            params=SamplingParams(max_tokens=6, ignore_eos=True, **request),
        )
        assert engine.add(message) is None
    engine.step()
    waits = []
    while engine.has_work():
        simulator().sim_syncs_reset()
        for progress in engine.step().progress:
            assert progress.error is None, progress.error
        waits.append(simulator().sim_syncs())
    return waits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_waits_for_the_device_once(dtype):
    assert call(decode, dtype) == [1] * 5
