"""Tests with torch_npu's default task queue (TASK_QUEUE_ENABLE=1).

After a failure in the queue, calls report success but do nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from mindie_mm.engine.requests.engine_messages import Progress
from tests.ascend.processes import call

QUEUED: dict[str, Any] = {"TASK_QUEUE_ENABLE": 1}
COPY = b"aclrtMemcpyAsync"


def fail_next_copy() -> None:
    import torch

    from tests.ascend.test_runtime import simulator

    torch.accelerator.synchronize()
    sim = simulator()
    sim.sim_fail(b"%s=507899@%d" % (COPY, sim.sim_calls(COPY) + 1))


def fail_in_queue(*_: object) -> None:
    """Fail like an operator that fails after its call has returned.

    torch_npu aborts the process if a destructor learns of the failure. Therefore, both tensors are created before the
    call that may raise an error.
    """
    import torch

    here, there = torch.ones(4).pin_memory(), torch.empty(4, device="npu")
    fail_next_copy()
    there.copy_(here, non_blocking=True)
    torch.accelerator.synchronize()
    del here, there  # both tensors must exist until the failure has been raised


def after_a_failure() -> tuple[list[int], str]:
    """Return the result of uploading and downloading [5] after a failed copy, and the device's error."""
    from mindie_mm.device import download, open_device, require_alive, upload
    from mindie_mm.errors import DeviceError

    device = open_device("npu").torch_device
    require_alive(device)
    with pytest.raises(RuntimeError, match="507899"):
        fail_in_queue()
    (answer,) = download(upload([5], device))
    with pytest.raises(DeviceError) as error:
        require_alive(device)
    return answer.tolist(), str(error.value)


def test_a_device_that_answers_without_computing_is_detected():
    answer, error = call(after_a_failure, **QUEUED)
    assert answer != [5], "torch_npu reports the failure itself: require_alive is not needed any more"
    assert error.startswith("npu:0 computes wrong results: ")


def trials() -> list[bool]:
    """Return whether each of two layouts works. The trial of the first layout fails."""
    import torch

    from mindie_mm.device import open_device, require_alive
    from mindie_mm.device.npu.npu_kernels import works

    device = open_device("npu").torch_device
    require_alive(device)
    fail_next_copy()
    found = [works("npu_fused_infer_attention_score", device, torch.bfloat16, 4, 2, 64, 128)]
    require_alive(device)
    return [*found, works("npu_fused_infer_attention_score (TND)", device, torch.bfloat16, 4, 2, 128, 128)]


def test_a_failed_trial_does_not_affect_the_device():
    assert call(trials, **QUEUED) == [False, True]


def served(place: str) -> list[str]:
    """Return the outcomes of two pairs of requests. In the step of the second pair, the queue fails at `place`."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from mindie_mm.nn import staging
    from mindie_mm.nn.checkpoint.directory import Checkpoint
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer

    def word(progress: Progress) -> str:
        return progress.error.message if progress.error else progress.finish_reason or "goes on"

    engine = Engine(load_model(None, "npu", "bfloat16"), EngineConfig(), 2**26)
    params, rng = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), np.random.default_rng(0)
    outcomes: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Tokenizer.from_pretrained(Checkpoint.open(None).path) as tokenizer:
        path_file = Path(folder) / "shm_name.txt"

        def ask() -> None:
            # Both requests are in one step; after a joint failure, the tower runs once for each request.
            for number in range(2):
                image = rng.integers(0, 255, (84, 84, 3), dtype=np.uint8)
                ids = tokenizer.tokenize([{"image": image}, {"text": "what is it?"}], path_file).numpy()
                assert engine.add(Add(str(number), ids.tobytes(), params)) is None
            while engine.has_work():
                outcomes.extend(map(word, engine.step().progress))

        ask()
        owner, name = {
            "tower": (engine._towers._model, "tower"),
            "fetching": (staging.Staging, "fetch"),
            "decoder": (engine._runner, "forward"),
        }[place]
        own = getattr(owner, name)

        def fail_once(*arguments: Any) -> Any:
            setattr(owner, name, own)
            fail_in_queue()
            return own(*arguments)

        setattr(owner, name, fail_once)
        with pytest.raises(Exception, match=r"npu:0 computes wrong results") as ended:
            ask()
        outcomes.append(type(ended.value).__name__)
        release(path_file)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tower", "fetching", "decoder"])
def test_an_engine_whose_device_no_longer_computes_ends_without_invented_tokens(place: str):
    assert call(served, place, **QUEUED) == ["goes on", "goes on", "length", "length", "DeviceError"]
