"""Tests for how often the host waits for the device: once per decode step, and once for the copies of encoded media."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.processes import call
from tests.models import (
    test_deepseek_ocr2,
    test_deepseek_vl2,
    test_deepseek_vl_hybrid,
    test_florence2,
    test_molmo,
    test_molmo2,
)

FAMILIES = {
    "plain experts": test_deepseek_vl2.TestDeepseekVL2,
    "latent experts": test_deepseek_vl2.TestLatentAttention,
    "crops": test_molmo.TestMolmo,
    "windows": test_molmo2.TestMolmo2,
    "learned relative positions": test_deepseek_vl_hybrid.TestDeepseekVLHybrid,
    "learned queries": test_deepseek_ocr2.TestDeepseekOCR2,
}
"""Families whose media need several copies, or whose towers have layers of their own."""


def decode(dtype: str) -> list[int]:
    """Return how often each step of a mixed batch waits for the device. The first step, of prompts, is not counted."""
    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig

    requests = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 4},
    ]
    # The requests end one after another, so the last steps have a single row.
    params = [SamplingParams(max_tokens=4 + n, ignore_eos=True, **request) for n, request in enumerate(requests)]
    return waits_of_steps(Engine(load_model(None, "npu", dtype), EngineConfig(), 2**26), params)


def answer(checkpoint: str, dtype: str) -> list[int]:
    """Return how often each step of an encoder-decoder waits for the device. The last tokens are forced."""
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.engine.seq2seq import Seq2SeqEngine
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig

    model = load_model(checkpoint, "npu", dtype)
    assert model.rules.forced_eos_token_ids
    params = [SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n - 1) for n in (4, 5, 6)]
    return waits_of_steps(Seq2SeqEngine(model, EngineConfig(), 2**26), params)


def waits_of_steps(engine, params) -> list[int]:
    """Run one request for each entry of `params`. Return how often each step except the first waits for the device.

    All steps run once before, because new sizes of graphs are captured, which takes several waits.
    """
    import numpy as np

    from mindie_mm.engine.requests.engine_messages import Add
    from tests.ascend.test_runtime import simulator

    for _ in range(2):
        for number, one in enumerate(params):
            ids = np.arange(10, 20 + number, dtype=np.int64)
            assert engine.add(Add(request_id=str(number), input_ids=ids.tobytes(), params=one)) is None
        waits = []
        while engine.has_work():
            simulator().sim_syncs_reset()
            for progress in engine.step().progress:
                assert progress.error is None, progress.error
            waits.append(simulator().sim_syncs())
    return waits[1:]


def encode(checkpoint: str | None, kind: str) -> list[int]:
    """Return how often encoding 1, 2 and 4 items waits for the device. Each number of items is encoded twice.

    The first time is a warm-up, which is not counted.
    """
    import tempfile

    import numpy as np

    from mindie_mm.models import load_model
    from mindie_mm.nn.checkpoint.directory import Checkpoint
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from tests.ascend.test_runtime import simulator

    model = load_model(checkpoint, "npu", "bfloat16")
    data = {"image": np.full((56, 84, 3), 90, np.uint8), "audio": np.zeros(16000, np.float32)}[kind]
    path = Checkpoint.open(checkpoint and Path(checkpoint)).path
    waits = []
    with tempfile.TemporaryDirectory() as folder, Tokenizer.from_pretrained(path) as tokenizer:
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


@pytest.fixture
def checkpoint(request, tmp_path: Path) -> str | None:
    """Return the path of a new checkpoint of a family, or None for the embedded checkpoint."""
    if request.param is None:
        return None
    FAMILIES[request.param].write_checkpoint(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "kind"),
    [(None, "image"), (None, "audio"), *((family, "image") for family in FAMILIES)],
    indirect=["checkpoint"],
)
def test_any_number_of_media_is_encoded_with_one_wait_for_their_copies(checkpoint, kind):
    assert call(encode, checkpoint, kind) == [1] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_waits_for_the_device_once(dtype):
    """The requests have all kinds of options. Each family's own step is tested in the contract of families."""
    assert call(decode, dtype) == [1] * 8


@pytest.mark.slow
def test_a_step_of_an_encoder_decoder_waits_for_the_device_once(tmp_path):
    """The steps include the forced tokens and the token that ends an answer."""
    test_florence2.TestFlorence2.write_checkpoint(tmp_path)
    assert call(answer, str(tmp_path), "bfloat16") == [1] * 5
