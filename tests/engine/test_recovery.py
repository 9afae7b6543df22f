"""Tests that answers continue after SIGKILL of their engine with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import OperationalError, WeightsChanged
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_items
from mindie_mm.worker.deltas import Answer
from mindie_mm.worker.worker import Worker
from tests.models.contract import noise

pytestmark = pytest.mark.usefixtures("copied_workers")

SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 80}}, "required": ["text"]}
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True, logprobs=2)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 20},
    "structure": {"structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA)), "ignore_eos": False},
    "prompt logprobs": {"prompt_logprobs": 1},
    "guesses": {"temperature": 0.5, "allowed_token_ids": (100, 101, 102), "logit_bias": {101: 8.0}},
}


def request(path: Path) -> TokenizeRequest:
    return request_of_items([{"image": str(path)}, {"text": "What is in the image?"}])


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.fromarray(noise(60, 90)).save(path := tmp_path / "image.png")
    return path


ONE_RANK, TWO_RANKS = pytest.param(1, id="one rank"), pytest.param(2, id="two ranks", marks=pytest.mark.slow)
with_ranks = pytest.mark.parametrize("worker", [ONE_RANK, TWO_RANKS], indirect=True, scope="module")


@pytest.fixture(scope="module")
async def worker(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    shutil.copytree(EMBEDDED, folder := tmp_path_factory.mktemp("recovery") / "tiny")
    engine = EngineConfig(device="cpu", dtype="float32", tensor_parallel=request.param)
    async with await Worker.start(WorkerConfig(model=folder, engine=engine), in_process=True) as worker:
        yield worker


async def disturbed(worker: Worker, asked: TokenizeRequest, params: SamplingParams, kills: tuple[int, ...]) -> Answer:
    """Return a streamed answer, and kill the engine when the answer has each of the numbers of tokens in `kills`."""
    answer, left = Answer(), [*kills]
    async with aclosing(worker.answer(asked, params, "disturbed")) as deltas:
        async for delta in deltas:
            answer.add(delta)
            if left and len(answer.token_ids) >= left[0]:
                del left[0]
                os.kill(worker.engine.engines[0].pid, signal.SIGKILL)
    assert not left
    return answer


def numbers(answer: Answer) -> list[float]:
    return [number for one in answer.logprobs for number in (one.logprob, *(value for _, value in sorted(one.top)))]


@pytest.mark.parametrize(
    ("worker", "case"),
    [pytest.param(1, case, id=f"one rank-{case}") for case in CASES]
    + [pytest.param(2, case, id=f"two ranks-{case}", marks=pytest.mark.slow) for case in CASES],
    indirect=["worker"],
    scope="module",
)
async def test_a_stream_continues_as_an_undisturbed_stream(worker: Worker, image: Path, case: str) -> None:
    params = msgspec.structs.replace(DRAWN, **CASES[case])
    whole = await worker.whole_answer(request(image), params, "whole")
    found = await disturbed(worker, request(image), params, (10,))
    assert (found.text, found.token_ids) == (whole.text, whole.token_ids)
    assert found.finish_reason == whole.finish_reason
    assert numbers(found) == pytest.approx(numbers(whole), abs=1e-4)
    assert found.prompt_logprobs == whole.prompt_logprobs
    assert worker.media_remade
    assert worker.engine.engines[0].stats.accepted_tokens > 0 or case != "guesses"


@with_ranks
async def test_a_stream_without_a_seed_repeats_and_skips_no_token(worker: Worker, image: Path) -> None:
    """Every token after the kill is as likely as the log-probabilities of the whole output state."""
    params = msgspec.structs.replace(DRAWN, seed=None)
    found = await disturbed(worker, request(image), params, (10,))
    assert len(found.token_ids) == 60
    ids = found.token_ids
    forced = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=(ids[30],))
    async with worker.prompt(request(image), forced) as source:
        checked = await worker.generate_whole(source, forced, "checked", written=ids[:30])
    ((_, logprob),) = checked.logprobs[0].top
    assert found.logprobs[30].logprob == pytest.approx(logprob, abs=1e-4)


@with_ranks
async def test_a_second_death_ends_the_stream(worker: Worker, image: Path) -> None:
    with pytest.raises(OperationalError, match="engine process"):
        await disturbed(worker, request(image), DRAWN, (5, 20))
    await worker.engine.wait_until_up()


@with_ranks
async def test_a_stream_about_a_changed_image_fails(worker: Worker, image: Path) -> None:
    async with aclosing(worker.answer(request(image), DRAWN, "changed")) as deltas:
        await anext(deltas)
        Image.fromarray(noise(60, 90, 5)).save(image)
        os.kill(worker.engine.engines[0].pid, signal.SIGKILL)
        with pytest.raises(OperationalError, match="have changed since its output began"):
            async for _ in deltas:
                pass


@with_ranks
async def test_after_a_change_of_the_weights_a_stream_fails_and_a_whole_answer_starts_again(
    worker: Worker, image: Path
) -> None:
    assert worker.config.model is not None
    weights = Path(worker.config.model) / "model.safetensors"
    right = await worker.whole_answer(request(image), DRAWN, "right")

    async def reload() -> None:
        shutil.copy(weights, other := weights.with_suffix(".new"))
        other.replace(weights)
        await worker.engine.reload(0)

    async with aclosing(worker.answer(request(image), DRAWN, "stream")) as deltas:
        await anext(deltas)
        whole = asyncio.create_task(worker.whole_answer(request(image), DRAWN, "whole"))
        engine = worker.engine.engines[0]
        while "whole" not in engine._requests:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        reloading = asyncio.create_task(reload())
        with pytest.raises(WeightsChanged, match="weights were replaced"):
            async for _ in deltas:
                pass
        assert (await whole).token_ids == right.token_ids
        await reloading


@with_ranks
async def test_after_a_reload_of_the_same_weights_a_stream_continues(worker: Worker, image: Path) -> None:
    right = await worker.whole_answer(request(image), DRAWN, "right")
    found = Answer()
    async with aclosing(worker.answer(request(image), DRAWN, "stream")) as deltas:
        found.add(await anext(deltas))
        reloading = asyncio.create_task(worker.engine.reload(0))
        async for delta in deltas:
            found.add(delta)
        await reloading
    assert found.token_ids == right.token_ids
