"""Tests for two ranks on two simulated NPUs, with collectives over HCCL, against one process on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.ascend import processes
from tests.ascend.test_engine import TOLERANCE
from tests.models.contract import noise
from tools import random_checkpoint as sizes

NUM_TOKENS = 8
TokenLogprobs = list[tuple[int, list[float]]]
"""Tokens, each with the log-probabilities of the two likeliest tokens at its position."""
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "Describe this picture."}],
    "two": [{"image": noise(60, 90)}, {"image": noise(150, 60)}, {"text": "a circle"}],
}


def serve(checkpoint: str, tower_parallel: str, folder: str) -> dict[str, Any]:
    """Generate tokens for all prompts, kill a rank, and generate the tokens again.

    Return both results, the device, and the processes that are still alive at the end.
    """
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.errors import ProcessDied
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from mindie_mm.worker.async_engine import AsyncEngine

    config = EngineConfig(
        device="npu", dtype="float32", tensor_parallel=2, tower_parallel=tower_parallel, kv_cache_bytes=2**22
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def tokens(engine: AsyncEngine, name: str, ids: Any) -> list[int]:
        return [token async for progress in engine.generate(name, ids, params) for token in progress.token_ids]

    def of(engine: AsyncEngine) -> list[psutil.Process]:
        launcher = psutil.Process(engine.pid)
        return [launcher, *launcher.children(recursive=True)]

    async def main() -> dict[str, Any]:
        engine = await AsyncEngine.start(Path(checkpoint), config)
        with Tokenizer.from_pretrained(checkpoint) as tokenizer:
            path_file = Path(folder) / "shm_name.txt"
            prompts = {name: tokenizer.tokenize(items, path_file).numpy() for name, items in PROMPTS.items()}
            found = await asyncio.gather(*(tokens(engine, name, ids) for name, ids in prompts.items()))
            seen = of(engine)
            running = engine.generate("running", prompts["text"], SamplingParams(ignore_eos=True))
            await anext(running)
            seen[2].kill()
            with contextlib.suppress(ProcessDied):
                async for _ in running:
                    pass
            again = await asyncio.gather(*(tokens(engine, name, ids) for name, ids in prompts.items()))
            seen += of(engine)
            release(path_file)
        device = engine.info.device
        await engine.close()
        _, alive = psutil.wait_procs(seen, timeout=300)
        left = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        return {"found": found, "again": again, "device": device, "left": left}

    return asyncio.run(main())


def generate_with_logprobs(checkpoint: str, folder: str) -> list[TokenLogprobs]:
    """Generate with two ranks in bfloat16. Return the tokens of all prompts, with log-probabilities."""
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from mindie_mm.worker.async_engine import AsyncEngine

    # The simulator computes the largest step in the host's memory, which must suffice for the steps of both ranks.
    config = EngineConfig(device="npu", dtype="bfloat16", tensor_parallel=2, kv_cache_bytes=2**24, max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)

    async def logprobs_of(engine: AsyncEngine, name: str, ids: Any) -> TokenLogprobs:
        found = [one async for progress in engine.generate(name, ids, params) for one in progress.logprobs or ()]
        return [(one.token_id, [value for _, value in one.top]) for one in found]

    async def main() -> list[TokenLogprobs]:
        engine = await AsyncEngine.start(Path(checkpoint), config)
        with Tokenizer.from_pretrained(checkpoint) as tokenizer:
            path_file = Path(folder) / "shm_name.txt"
            prompts = {name: tokenizer.tokenize(items, path_file).numpy() for name, items in PROMPTS.items()}
            found = await asyncio.gather(*(logprobs_of(engine, name, ids) for name, ids in prompts.items()))
            release(path_file)
        await engine.close()
        return found

    return asyncio.run(main())


def refuse(checkpoint: str) -> str:
    """Return the error of starting more ranks than there are devices."""
    from mindie_mm.errors import DeviceError
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.worker.async_engine import AsyncEngine

    try:
        asyncio.run(AsyncEngine.start(Path(checkpoint), EngineConfig(device="npu", tensor_parallel=2)))
    except DeviceError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_more_ranks_than_devices_are_refused(random_checkpoint):
    message = processes.call(refuse, str(random_checkpoint), devices=1)
    assert message == (
        "tensor_parallel is 2, but the number of visible npu devices is 1; lower tensor_parallel, or make more devices "
        "visible"
    )


@pytest.mark.parametrize("tower_parallel", ["items", pytest.param("replicate", marks=pytest.mark.slow)])
def test_two_ranks_generate_the_tokens_of_one_process(random_checkpoint, tower_parallel, tmp_path, monkeypatch):
    from mindie_mm.engine.core import Engine
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer
    from tests.models.contract import run

    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        prompts = [tokenizer.tokenize(items, tmp_path / "shm_name.txt") for items in PROMPTS.values()]
        engine = Engine(load_model(random_checkpoint, "cpu", torch.float32), EngineConfig())
        outputs, errors = run(engine, prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
        release(tmp_path / "shm_name.txt")
    assert not errors
    (folder := tmp_path / "npu").mkdir()
    monkeypatch.setattr(processes, "_LIMIT_S", 280.0)  # the call starts six processes
    result = processes.call(serve, str(random_checkpoint), tower_parallel, str(folder), devices=2)
    assert result["device"] == "npu:0"
    assert result["found"] == [*outputs.values()]
    assert result["again"] == result["found"], "the tokens are the same after a rank has died"
    assert result["left"] == []


def generate_in_one_process(checkpoint: Path, path_file: Path) -> list[TokenLogprobs]:
    """Generate in one process on the host. Return the tokens of all prompts, with log-probabilities."""
    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.models import load_model
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer

    found: dict[str, TokenLogprobs] = {name: [] for name in PROMPTS}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    with Tokenizer.from_pretrained(checkpoint) as tokenizer:
        engine = Engine(load_model(checkpoint, "cpu", torch.bfloat16), EngineConfig())
        for name, items in PROMPTS.items():
            engine.add(Add(name, tokenizer.tokenize(items, path_file).numpy().tobytes(), params))
        while engine.has_work():
            for progress in engine.step().progress:
                assert progress.error is None, progress.error
                found[progress.request_id] += [
                    (one.token_id, [value for _, value in one.top]) for one in progress.logprobs or ()
                ]
        release(path_file)
    return [*found.values()]


@pytest.mark.parametrize(("width", "layout"), [(128, "TND"), pytest.param(16, "BSH", marks=pytest.mark.slow)])
def test_two_ranks_use_the_fused_attention(width, layout, tmp_path, monkeypatch):
    """Each rank has half of the heads. The answers in bfloat16 differ only by rounding."""
    monkeypatch.setitem(sizes.SIZES, "shared", sizes.Size(4 * width, 2, 4, 2, 128, 64, 2, 4))
    checkpoint = sizes.write_checkpoint(tmp_path / "model", "shared")
    (folder := tmp_path / "npu").mkdir()
    monkeypatch.setattr(processes, "_LIMIT_S", 280.0)
    trace = tmp_path / "trace"
    found = processes.call(generate_with_logprobs, str(checkpoint), str(folder), devices=2, trace=str(trace))
    for own, expected in zip(found, generate_in_one_process(checkpoint, tmp_path / "shm_name.txt"), strict=True):
        assert len(own) == len(expected) == NUM_TOKENS
        for (own_token, own_top), (token, top) in zip(own, expected, strict=True):
            # Both tokens had nearly the same probability, and the answers differ from this token on.
            if own_token != token:
                assert top[0] - top[1] < TOLERANCE
                break
            assert own_top[0] == pytest.approx(top[0], abs=TOLERANCE)
    calls: dict[str, list[str]] = {}
    joined: set[str] = set()
    for line in trace.read_text().splitlines():
        _, process, _, call = line.split(" ", 3)
        if (
            call.startswith(("npu_fused_infer_attention_score ", "npu_fused_infer_attention_score.out "))
            and "block_size=0" not in call
        ):  # towers have no pages
            assert {"num_heads=2", "num_key_value_heads=1", f"input_layout={layout}"} <= {*call.split()}, call
            calls.setdefault(process, []).append(call)
        elif call.startswith("npu_swiglu "):
            joined.add(process)
    assert joined == {*calls}, "both ranks run layers with joined products"
    assert len(calls) == 2, "both ranks call the operator, each with half of the heads"
    assert min(map(len, calls.values())) > 2 * NUM_TOKENS, (
        "each rank calls the operator for two layers per step, and in the trial"
    )
