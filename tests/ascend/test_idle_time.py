"""Tests for how long the device is idle between decode steps, in virtual time, for the layers of Qwen2.5-VL-7B."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ascend.processes import call, call_ranks
from tests.ascend.virtual_time import as_slow_as_7b, measured, work

LAYERS = 28
HOST_US = 1500
"""Time that the host spends on a step apart from calls to the driver: scheduling, grammars, messages."""
STEPS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with as many layers as the 7B model, whose heads have the same width."""
    # An import at the top of this module would open the device too early.
    from tools.random_checkpoint import SIZES, Size, write_checkpoint

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SIZES, "deep", Size(256, LAYERS, 2, 2, 512, 64, 1, 4))
        return write_checkpoint(tmp_path_factory.mktemp("deep") / "model", "deep")


def decode(checkpoint: str, store: str, settings: dict) -> tuple[float, float]:
    """Return the share of the time in which the device is idle in decode steps of 4 requests, and us per step."""
    import numpy as np

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.ranks import ALONE, join
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig

    ranks, number = ALONE, 0
    if store:
        number = int(os.environ["RANK"])
        ranks = join(number, 2, store, "npu")
    config = EngineConfig(tensor_parallel=ranks.count, **settings)
    engine = Engine(load_model(checkpoint, "npu", "bfloat16"), config, 2**24, ranks)
    params = SamplingParams(temperature=0, max_tokens=STEPS + 8, ignore_eos=True)
    for request in range(4):
        ids = np.arange(10, 40 + request, dtype=np.int64)
        assert engine.add(Add(str(request), ids.tobytes(), params)) is None
    for _ in range(4):
        engine.step()
    with measured(number) as times:
        for _ in range(STEPS):
            work(HOST_US)
            engine.step()
    while engine.has_work():
        engine.step()
    return times.idle, times.device_us / STEPS


def weight_bytes(checkpoint: Path) -> int:
    """Return the size of the weights that a decode step reads, in bfloat16."""
    from safetensors import safe_open

    files = checkpoint.glob("*.safetensors")
    total = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if "visual" not in name and "embed_tokens" not in name:
                    total += 2 * int(opened.get_tensor(name).numel())
    return total


def test_steps_that_overlap_leave_the_device_hardly_idle(checkpoint: Path):
    """Each operator is launched separately. Launching a step takes less time than computing it."""
    slow = as_slow_as_7b(weight_bytes(checkpoint))
    settings = {"enforce_eager": True, "async_scheduling": False, "num_speculative_tokens": 0}
    in_turn = call(decode, str(checkpoint), "", settings, **slow)
    assert 0.08 < in_turn[0] < 0.15
    overlapped = call(decode, str(checkpoint), "", {"enforce_eager": True}, **slow)
    assert overlapped[0] <= 0.01
    assert overlapped[1] < in_turn[1]


@pytest.mark.slow
def test_graphs_leave_the_devices_of_two_ranks_hardly_idle(checkpoint: Path, tmp_path: Path):
    """Each rank has half of the weights, so that launching operators one by one takes longer than computing them."""
    slow = as_slow_as_7b(weight_bytes(checkpoint))
    (store := tmp_path / "store").touch()
    found = call_ranks(2, decode, str(checkpoint), str(store), {}, **slow)
    assert all(idle <= 0.05 for idle, _ in found)
