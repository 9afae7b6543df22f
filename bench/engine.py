"""Benchmark of the engine compared with `generate` of transformers, in float32 on the CPU.

The checkpoint has 37 million random parameters. The engine and transformers generate the same number of
tokens for the same prompts. They run alternately for several rounds, and the results are medians.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2VLForConditionalGeneration

from bench.report import median, plot, write
from mindie_mm.engine.requests.engine_messages import Timings
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.worker.async_engine import AsyncEngine
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

CONCURRENT, PROMPT, OUTPUT, LONG_PROMPT, ROUNDS = 8, 100, 64, 800, 5


def prompts(count: int, length: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(8, 264, length + 3 * i, dtype=np.int64) for i in range(count)]


class Reference:
    """`generate` of transformers, one request at a time."""

    def __init__(self, path: Path) -> None:
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def seconds(self, batch: list[np.ndarray], tokens: int) -> float:
        start = time.perf_counter()
        for ids in batch:
            self.model.generate(
                torch.from_numpy(ids)[None], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        return time.perf_counter() - start


async def ours(engine: AsyncEngine, batch: list[np.ndarray], tokens: int) -> tuple[float, list[Timings]]:
    """Run all requests concurrently. Return the wall time in seconds, and the timings of each request."""
    params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)

    async def one(i: int, ids: np.ndarray) -> Timings:
        async for progress in engine.generate(f"{time.monotonic_ns()}-{i}", ids, params):
            if progress.timings is not None:
                timings = progress.timings
        return timings

    start = time.perf_counter()
    timings = await asyncio.gather(*(one(i, ids) for i, ids in enumerate(batch)))
    return time.perf_counter() - start, timings


async def measure(path: Path) -> dict[str, Any]:
    reference = Reference(path)
    # Every round repeats the same prompts, which a prefix cache would skip.
    engine = await AsyncEngine.start(path, EngineConfig(device="cpu", prefix_caching=False))
    try:
        batch, long = prompts(CONCURRENT, PROMPT), prompts(1, LONG_PROMPT)
        rounds: dict[str, list[float]] = {}

        def add(name: str, value: float) -> None:
            rounds.setdefault(name, []).append(value)

        for i in range(ROUNDS + 1):
            if i == 1:
                rounds.clear()  # the first round is a warm-up
            ours_all, timings = await ours(engine, batch, OUTPUT)
            theirs_all = reference.seconds(batch, OUTPUT)
            ours_one, (alone,) = await ours(engine, batch[:1], OUTPUT)
            theirs_one = reference.seconds(batch[:1], OUTPUT)
            _, (prefill,) = await ours(engine, long, 1)
            theirs_prefill = reference.seconds(long, 1)
            theirs_first = reference.seconds(batch[:1], 1)
            add("throughput_ratio", theirs_all / ours_all)
            add("tokens_per_s", CONCURRENT * OUTPUT / ours_all)
            add("reference_tokens_per_s", CONCURRENT * OUTPUT / theirs_all)
            add("decode_step_ms_alone", alone.decode_s / (OUTPUT - 1) * 1e3)
            add("reference_decode_step_ms", (theirs_one - theirs_first) / (OUTPUT - 1) * 1e3)
            add("decode_step_ms_batch_8", median([t.decode_s for t in timings]) / (OUTPUT - 1) * 1e3)
            add("prefill_us_per_token", prefill.prefill_s / LONG_PROMPT * 1e6)
            add("reference_prefill_us_per_token", theirs_prefill / LONG_PROMPT * 1e6)
            add("single_request_ratio", theirs_one / ours_one)
        return {name: round(median(values), 3) for name, values in rounds.items()}
    finally:
        await engine.close()


async def measure_prefix(path: Path, folder: Path) -> dict[str, Any]:
    """Return the time to the first token for an image and a question, and the time if both are repeated."""
    engine = await AsyncEngine.start(path, EngineConfig(device="cpu"))
    path_file = folder / "shm_name.txt"
    seconds: tuple[list[float], list[float]] = ([], [])
    try:
        with Tokenizer.from_pretrained(path) as tokenizer:
            for i in range(ROUNDS + 1):
                pixels = np.random.default_rng(i).integers(0, 256, (480, 640, 3), dtype=np.uint8)
                items = [{"image": pixels}, {"text": "What is in the image? " * 10}]
                for times in seconds:  # the second time has its own block, so the cache must find the content
                    ids = tokenizer.tokenize(items, path_file).numpy()
                    times.append((await ours(engine, [ids], 1))[0])
                release(path_file)
    finally:
        await engine.close()
    first, second = (median(times[1:]) for times in seconds)
    return {
        "image_prompt": len(ids),
        "first_token_ms": round(first * 1e3, 2),
        "first_token_again_ms": round(second * 1e3, 2),
        "first_token_again_ratio": round(first / second, 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "mid", "mid")
        figures = asyncio.run(measure(path)) | asyncio.run(measure_prefix(path, Path(folder)))
    write("engine", {"concurrent": CONCURRENT, "prompt": PROMPT, "output": OUTPUT, **figures})
    names = ["decode_step_ms_alone", "decode_step_ms_batch_8", "reference_decode_step_ms"]

    def draw(axes: Any) -> None:
        axes.bar(["ours, alone", "ours, 8 at once", "transformers, alone"], [figures[name] for name in names])
        axes.set_ylabel("ms per decode step")
        axes.set_title(f"{figures['throughput_ratio']:.1f}x the throughput at {CONCURRENT} requests")

    plot("engine", draw)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
