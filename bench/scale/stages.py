"""Measurement of the stage times that feed the model of a service (`bench.scale.model`).

Every time is processor time of one process, except `wait`, and the median of several rounds. Other load on the machine
changes processor time, too, because programs share caches and the speed of the processors. The engine runs on one
thread, and one decoder decodes.

    python -m bench.scale.stages            # ten minutes on two cores
    python -m bench.scale.stages --rounds 2 # a quick look
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import pybase64

from bench.report import RESULTS, write
from bench.scale.processor_time import ProcessorTime, seconds_of
from bench.serve.images import Size, jpeg
from bench.serve.load import Load, Server, drive, session
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.settings.cgroup import available_cpus
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import AsyncTokenizer
from mindie_mm.tokenize.requests import request_of_items
from mindie_mm.worker.async_engine import AsyncEngine
from tools.random_checkpoint import write_checkpoint
from tools.serving import running_service

SERVED = (Size(336, 336), Size(640, 480), Size(1420, 720))
"""Sizes of common images. The tokens after the first are measured with the first of them."""
DECODED = (*SERVED, Size(1920, 1080), Size(4000, 3000))
"""Sizes that are also decoded at full size. The embedded checkpoint shrinks them."""
ENGINE: dict[str, object] = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": 2**26}
REQUESTS = 6
TOKENS = 33
CROWD = 8
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS = 64


class Images:
    """A source of images with different contents, which take equally long to decode."""

    def __init__(self) -> None:
        self._numbers = count(time.time_ns())
        self._files: dict[Size, bytes] = {}

    def file(self, size: Size) -> bytes:
        """Return a JPEG. Bytes behind its end change the content, but not the image."""
        if size not in self._files:
            self._files[size] = jpeg(0, size)
        return self._files[size] + next(self._numbers).to_bytes(8)

    def url(self, size: Size) -> str:
        """Return an image as a data: URL."""
        return f"data:image/jpeg;base64,{pybase64.b64encode(self.file(size)).decode()}"


def medians(rounds: Sequence[Any]) -> Any:
    """Return the median of each figure, for rounds that are numbers, or dictionaries of numbers at any depth."""
    if isinstance(rounds[0], dict):
        return {name: medians([one[name] for one in rounds]) for name in rounds[0]}
    return median(rounds)


async def typical(
    rounds: int, measure: Callable[..., Awaitable[dict[str, float]]], *arguments: object
) -> dict[str, float]:
    """Return the median of each figure in `rounds` rounds, after one that warms up."""
    await measure(*arguments)
    figures: dict[str, float] = medians([await measure(*arguments) for _ in range(rounds)])
    return figures


async def answered(
    http: aiohttp.ClientSession, server: Server, used: ProcessorTime, load: Load, urls: Sequence[str]
) -> dict[str, float]:
    """Send the requests of a load, and return the seconds per request of each process.

    `wait` is the mean time from a client's request to its next one.
    """
    before = used.seconds()
    outcome = await drive(http, server, load, urls)
    seconds = used.since(before)
    faults = [answer.fault for answer in outcome.answers if answer.fault is not None]
    if faults:
        raise RuntimeError(f"{len(faults)} of {load.requests} requests failed, the first with: {faults[0]}")
    seconds["wait"] = outcome.seconds * load.concurrent
    return {name: value / load.requests for name, value in seconds.items()}


async def measure_service(server: Server, used: ProcessorTime, sizes: Sequence[Size], rounds: int) -> dict[str, Any]:
    """Measure requests for one token by size of the image, repeated images, and the tokens after the first."""
    images = Images()
    figures: dict[str, Any] = {"images": {}, "repeated": {}}
    async with session() as http:

        async def one_token(size: Size, again: str | None) -> dict[str, float]:
            load = Load(size, 1, REQUESTS, max_tokens=1)
            urls = [again or images.url(size) for _ in range(REQUESTS)]
            return await answered(http, server, used, load, urls)

        async def prompt(size: Size) -> dict[str, float]:
            part = {"type": "image_url", "image_url": {"url": images.url(size)}}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "timings": True}
            async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            return {"tower": answer["timings"]["tower_s"], "prompt_tokens": answer["usage"]["prompt_tokens"]}

        async def tokens(number: int, concurrent: int) -> dict[str, float]:
            load = Load(SERVED[0], concurrent, max(REQUESTS, concurrent), max_tokens=number)
            urls = [images.url(load.size) for _ in range(load.requests)]
            return await answered(http, server, used, load, urls)

        for size in sizes:
            for kind, again in (("images", None), ("repeated", images.url(size))):
                seconds = await typical(rounds, one_token, size, again)
                figures[kind][str(size)] = seconds
            figures["images"][str(size)] |= await typical(rounds, prompt, size)
        for concurrent in (1, CROWD):
            one = await typical(rounds, tokens, 1, concurrent)
            many = await typical(rounds, tokens, TOKENS, concurrent)
            figures[f"token_{concurrent}"] = {name: (many[name] - one[name]) / (TOKENS - 1) for name in one}
    return figures


async def measure_engine(rounds: int) -> dict[str, Any]:
    """Measure decode steps by batch size, with the settings that the engine of a measured service has."""
    config = EngineConfig(device="cpu", prefix_caching=False, **ENGINE)  # type: ignore[arg-type]
    engine = await AsyncEngine.start(None, config)
    generator = np.random.default_rng(0)
    names = map(str, count())

    async def run(batch: int, tokens: int) -> dict[str, float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)

        async def one(ids: Any) -> None:
            async for _ in engine.generate(next(names), ids, params):
                pass

        prompts = [generator.integers(8, 264, PROMPT_TOKENS, dtype=np.int64) for _ in range(batch)]
        before = seconds_of(engine.pid)
        await asyncio.gather(*map(one, prompts))
        return {"engine": seconds_of(engine.pid) - before}

    async def used(batch: int, tokens: int) -> float:
        return (await typical(rounds, run, batch, tokens))["engine"]

    try:
        steps = {str(batch): (await used(batch, TOKENS) - await used(batch, 1)) / (TOKENS - 1) for batch in BATCHES}
        return {"decode_step": steps}
    finally:
        await engine.close()


async def measure_tokenizer(checkpoint: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the tokenizer process and its decoders by size of the image, at full size."""
    images = Images()
    path_file = folder / "shm_name.txt"
    settings = {"arena_bytes": 2**29, "arena_request_bytes": 2**29, "preprocessed_cache_bytes": 0}

    async def request(tokenizer: AsyncTokenizer, used: ProcessorTime, size: Size, number: int) -> dict[str, float]:
        items = []
        for index in range(number):
            path = folder / f"{index}.jpg"
            path.write_bytes(images.file(size))
            items.append({"image": str(path)})
        before = used.seconds()
        prompt = await tokenizer.tokenize(request_of_items(items, path_file=str(path_file)))
        seconds = used.since(before)
        release(path_file)
        return {name: value / number for name, value in seconds.items() if name in {"tokenizer", "decoder"}} | {
            "prompt_tokens": len(prompt)
        }

    figures: dict[str, Any] = {"sizes": {}}
    for decoders in sorted({1, available_cpus()}):
        tokenizer = await AsyncTokenizer.start(checkpoint, WorkerConfig(decoders=decoders, **settings))
        used = ProcessorTime(os.getpid())
        try:
            if decoders == 1:
                for size in DECODED:
                    figures["sizes"][str(size)] = await typical(rounds, request, tokenizer, used, size, 1)
            crowd = await typical(rounds, request, tokenizer, used, SERVED[2], 4 * available_cpus())
            figures[f"decoder_of_{decoders}"] = crowd["decoder"]
        finally:
            await tokenizer.close()
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the stages, and write bench/results/scale_stages.json after each part. Keep the parts not measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale.stages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds, whose median counts")
    parser.add_argument("--parts", default="tiny,full_size", help="`tiny` is the embedded checkpoint")
    options = parser.parse_args(arguments)
    path = RESULTS / "scale_stages.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    figures.pop("machine", None)
    for part in options.parts.split(","):
        with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as folder:
            if part == "full_size":
                checkpoint = write_checkpoint(Path(folder) / "checkpoint")
                measured = asyncio.run(measure_tokenizer(checkpoint, Path(folder), options.rounds))
            else:
                measured = measure_tiny(Path(folder), options.rounds)
        figures[part] = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "rounds": options.rounds}
        figures[part] |= rounded(measured)
        write("scale_stages", figures)


def measure_tiny(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure a service with the embedded checkpoint, and its engine alone."""
    with running_service(ENGINE | {"spool": folder / "spool", "decoders": 1}, folder / "log") as service:
        server, used = Server(service.url, service.model), ProcessorTime(service.process.pid)
        stages = asyncio.run(measure_service(server, used, DECODED, rounds))
    return stages | asyncio.run(measure_engine(rounds))


def rounded(figures: Any) -> Any:
    """Return the figures with times in whole microseconds."""
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return round(figures, 6) if isinstance(figures, float) else figures


if __name__ == "__main__":
    main()
