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


def encode(kind: str) -> list[int]:
    """How often the host waits while 1, 2 and 4 items are encoded, not for the first time."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from mindie_mm.models import load_model
    from mindie_mm.nn.checkpoint import Checkpoint
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from tests.ascend.test_runtime import simulator

    model = load_model(None, "npu", "bfloat16")
    data = {"image": np.full((56, 84, 3), 90, np.uint8), "audio": np.zeros(16000, np.float32)}[kind]
    waits = []
    with tempfile.TemporaryDirectory() as folder, Tokenizer.from_pretrained(Checkpoint.open(None).path) as tokenizer:
        path_file = Path(folder) / "shm_name.txt"
        for count in (1, 2, 4):
            items = model.read(tokenizer.tokenize([{kind: data}] * count, path_file).numpy())
            model.encode(items)
            simulator().sim_syncs_reset()
            model.encode(items)
            waits.append(simulator().sim_syncs())
        del items
        release(path_file)
    return waits


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_media_are_encoded_behind_one_wait_for_their_copies(kind):
    assert call(encode, kind) == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_waits_for_the_device_once(dtype):
    assert call(decode, dtype) == [1] * 5
