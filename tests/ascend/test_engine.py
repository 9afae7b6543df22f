"""Tests for the engine with fused operators in bfloat16, against plain torch operators on the same device."""

from __future__ import annotations

import pytest

from mindie_mm.engine.requests.engine_messages import Progress
from tests.ascend.processes import call
from tests.ascend.test_kernels import WRITES

TOLERANCE = 0.25
"""Largest allowed difference of a log-probability, because bfloat16 rounds the sums in each layer differently."""


def answers(size: str | None, settings: dict) -> dict:
    """Return the log-probabilities of all tokens, the answers' tokens, and the layouts of fused attention."""
    import tempfile
    from pathlib import Path

    import numpy as np
    import torch

    from mindie_mm.device.npu import npu_kernels
    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from mindie_mm.nn.checkpoint.directory import Checkpoint
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from tools.random_checkpoint import write_checkpoint

    fused: list[str] = []
    own = npu_kernels._fused
    npu_kernels._fused = lambda *args, **kwargs: fused.append(kwargs["input_layout"]) or own(*args, **kwargs)
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 255, shape, dtype=np.uint8) for shape in ((112, 140, 3), (84, 56, 3)))
    text = "The quick brown fox jumps over the lazy dog. " * 5
    prompts = [
        [{"text": text * 2 + "One"}],
        [{"text": text * 2 + "Two"}],  # this prompt shares a prefix with the first prompt
        [{"image": first}, {"text": "describe"}],
        [{"text": "x"}],
        [{"image": second}, {"image": first}, {"text": text}],
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "model", size) if size else Checkpoint.open(None).path
        model = load_model(path, "npu", "bfloat16")
        engine = Engine(model, EngineConfig(**settings), 2**24)
        path_file = Path(folder) / "shm_name.txt"
        with Tokenizer.from_pretrained(path) as tokenizer:
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0)
            for number, prompt in enumerate(prompts):
                ids = tokenizer.tokenize(prompt, path_file).numpy()
                assert engine.add(Add(request_id=str(number), input_ids=ids.tobytes(), params=params)) is None
            found: dict[str, list] = {str(number): [[], []] for number in range(len(prompts))}
            torch.accelerator.synchronize()
            while engine.has_work():
                for progress in engine.step().progress:
                    assert progress.error is None, progress.error
                    prompt_logprobs, tokens = found[progress.request_id]
                    prompt_logprobs += [entry.logprob for entry in progress.prompt_logprobs or []]
                    tokens += [(entry.token_id, [value for _, value in entry.top]) for entry in progress.logprobs or []]
            release(path_file)
    return {"found": found, "fused": sorted(set(fused))}


SETTINGS: dict[str, tuple[dict, dict]] = {
    "whole": ({}, {}),
    "chunks": ({"max_num_batched_tokens": 100}, {}),
    "few blocks": ({"max_num_batched_tokens": 100, "max_num_seqs": 2}, {}),
    # Freed memory is unmapped and new memory is poisoned, which the caching allocator hides.
    "no caching of memory": ({}, {"PYTORCH_NO_NPU_MEMORY_CACHING": 1}),
}
"""Settings of the engine, and of the process."""


@pytest.mark.parametrize(("size", "layouts"), [pytest.param(None, ["BSH"], marks=pytest.mark.slow), ("wide", ["TND"])])
def test_answers_equal_those_of_plain_torch(size, layouts):
    plain = call(answers, size, {"kv_block_size": 16})
    assert plain["fused"] == []
    for name, (settings, of_process) in SETTINGS.items():
        fused = call(answers, size, settings, **of_process)
        # The trials of the operators also use only this layout.
        assert fused["fused"] == layouts, name
        for number, (prompt, tokens) in plain["found"].items():
            own_prompt, own_tokens = fused["found"][number]
            assert own_prompt == pytest.approx(prompt, abs=TOLERANCE), (name, number)
            assert len(own_tokens) == len(tokens) == 8
            for (token, top), (own_token, own_top) in zip(tokens, own_tokens, strict=True):
                # Both tokens had nearly the same probability, and the answers differ from this token on.
                if token != own_token:
                    assert top[0] - top[1] < TOLERANCE, (name, number)
                    break
                assert own_top[0] == pytest.approx(top[0], abs=TOLERANCE), (name, number)


LAYERS = ("npu_rms_norm", "npu_add_rms_norm", "npu_apply_rotary_pos_emb", "npu_rotary_mul", "npu_swiglu")
"""Operators of decoder layers, without those of attention and of the KV cache."""


@pytest.fixture(scope="module")
def plain() -> dict:
    """Answers of plain torch, whose operators support KV blocks of any size."""
    return call(
        answers, "wide", {"kv_block_size": 16}, missing=",".join((*LAYERS, *WRITES, "aten::split_with_sizes_copy"))
    )


@pytest.mark.parametrize(
    "wrong",
    [
        [
            "npu_fused_infer_attention_score:mean",
            "_npu_flash_attention_unpad:undefined row",
            "npu_scatter_pa_kv_cache:nz",
        ],
        [f"{name}:undefined row" for name in LAYERS],
    ],
    ids=["attention and cache", "layers"],
)
def test_an_operator_with_wrong_results_does_not_change_tokens(plain, wrong):
    found = call(answers, "wide", {"kv_block_size": 16}, wrong=",".join(wrong))
    for number, (prompt, tokens) in plain["found"].items():
        own_prompt, own_tokens = found["found"][number]
        assert own_prompt == pytest.approx(prompt, abs=TOLERANCE)
        assert [token for token, _ in own_tokens] == [token for token, _ in tokens]


GONE = b"aclrtSynchronizeStream=507033,aclrtSynchronizeStreamWithTimeout=507033,aclrtMemcpyAsync=507033"
"""Failure rules for the simulator, as if the device were lost."""


def words(progress: Progress) -> str | None:
    return progress.error.message if progress.error else progress.finish_reason


def failing() -> list[str | None]:
    """Return the outcomes of two requests, of which the first fails in a step on a working device.

    Then lose the device, and check that the engine raises an error.
    """
    import numpy as np
    import pytest

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig
    from tests.ascend.test_runtime import simulator

    engine = Engine(load_model(None, "npu", "bfloat16"), EngineConfig(), 2**26)
    ids = np.arange(10, 20, dtype=np.int64).tobytes()
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)

    def outcomes() -> list[str | None]:
        engine.add(Add("one", ids, params))
        found = []
        while engine.has_work():
            found += [words(progress) for progress in engine.step().progress]
        return found

    forward = engine._runner.forward

    def fails(*_):
        engine._runner.forward = forward
        raise RuntimeError("as an operator does")

    engine._runner.forward = fails
    results = [*outcomes(), *outcomes()]
    simulator().sim_fail(GONE)
    with pytest.raises(RuntimeError, match="507033"):
        outcomes()
    return results


def test_a_lost_device_ends_the_engine():
    """The engine raises an error, so that its process restarts. On a working device, only the step's requests fail."""
    failed = "the step failed: RuntimeError"
    assert call(failing) == [failed, None, None, None, "length"]


def failing_with_media(kind: str) -> list[str | None]:
    """Return the outcomes of two requests with an image, the first of which fails in the tower. Then lose the device.

    Args:
        kind: What runs on the device: the whole model, only the tower, or an encoder-decoder.
    """
    import tempfile
    from pathlib import Path

    import numpy as np
    import pytest

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.engine.seq2seq import Seq2SeqEngine
    from mindie_mm.models import load_model
    from mindie_mm.nn.checkpoint.directory import Checkpoint
    from mindie_mm.nn.placement import TOGETHER, Placement
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from tests.ascend.test_runtime import simulator
    from tests.models.test_florence2 import TestFlorence2

    with tempfile.TemporaryDirectory() as folder:
        path, path_file = Path(folder) / "model", Path(folder) / "shm_name.txt"
        if kind == "encoder-decoder":
            path.mkdir()
            TestFlorence2.write_checkpoint(path)
            engine = Seq2SeqEngine(load_model(path, "npu", "float32"), EngineConfig(), 2**26)
        else:
            path = Checkpoint.open(None).path
            where = ("cpu", "float32", Placement("npu")) if kind == "tower alone" else ("npu", "bfloat16", TOGETHER)
            device, dtype, vision = where
            engine = Engine(load_model(path, device, dtype, vision=vision), EngineConfig(), 2**26)
        rng, params = np.random.default_rng(0), SamplingParams(max_tokens=1, temperature=0)
        tower = engine._towers._model.tower

        def outcomes() -> list[str | None]:
            image = rng.integers(0, 255, (84, 56, 3), dtype=np.uint8)
            ids = tokenizer.tokenize([{"image": image}, {"text": "what"}], path_file).numpy()
            assert engine.add(Add("one", ids.tobytes(), params)) is None
            return [words(progress) for progress in engine.step().progress]

        def fails(_):
            engine._towers._model.tower = tower
            raise RuntimeError("as an operator does")

        with Tokenizer.from_pretrained(path) as tokenizer:
            engine._towers._model.tower = fails
            results = [*outcomes(), *outcomes()]
            simulator().sim_fail(GONE)
            with pytest.raises(RuntimeError, match="507033"):
                outcomes()
            release(path_file)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "tower alone", "encoder-decoder"])
def test_a_lost_device_ends_the_engine_if_the_tower_fails_first(kind):
    """A failure of the tower usually fails one request. If the device is lost, every later request would fail, too."""
    failed = "the tower failed: RuntimeError"
    assert call(failing_with_media, kind) == [failed, "length"]
