"""Benchmark of the tokenizer process with its decoders, compared with a tokenizer that decodes in its own process.

The images are different JPEGs of 1420x720 pixels. The variants run alternately, and the results are medians. Requests
of different trust domains have different values of `cache_salt`.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bench.report import median, write
from mindie_mm.decode.scratch import Scratch, layout_of, make_file
from mindie_mm.settings.config import MediaCaps, WorkerConfig
from mindie_mm.shm import Arena, ArraySpec, release
from mindie_mm.shm.mapping import map_pieces
from mindie_mm.tokenize import AsyncTokenizer, Tokenizer, TokenizeRequest
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_items
from tests.media_samples import encoded, photograph
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

SIZE = (1420, 720)
MANY, CROWD = 64, 200
DOMAINS = (1, 8, 100)
PER_ROUND, AT_ONCE = 200, 4
ROUNDS = 15
ARENA_BYTES = 2**30


class Images:
    """A source of requests whose images all differ."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._data = encoded(photograph("coffee.png", SIZE), quality=90)
        self.path_file = str(folder / "shm_name.txt")
        (folder / "image").mkdir()

    def request(self, number: int, name: str = "shm_name.txt", salt: str = "") -> TokenizeRequest:
        """Return a request with `number` images."""
        items: list[dict[str, Any]] = []
        for _ in range(number):
            path = self._folder / "image" / f"{next(self._numbers)}.jpg"
            path.write_bytes(self._data + path.name.encode())  # trailing bytes change the content, not the image
            items.append({"image": str(path)})
        return request_of_items(items, path_file=str(self._folder / name), options=PromptOptions(cache_salt=salt))


async def timed(tokenizer: AsyncTokenizer, request: TokenizeRequest) -> float:
    """Return the time of a request in seconds."""
    start = time.perf_counter()
    await tokenizer.tokenize(request)
    return time.perf_counter() - start


async def measure(folder: Path) -> dict[str, Any]:
    """Return all figures."""
    checkpoint = write_checkpoint(folder / "checkpoint")
    path = checkpoint / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_pixels": 12_845_056}), encoding="utf-8")
    images = Images(folder)
    settings = {"arena_bytes": ARENA_BYTES, "arena_request_bytes": ARENA_BYTES, "preprocessed_cache_bytes": 0}
    one = await AsyncTokenizer.start(checkpoint, WorkerConfig(decoders=1, **settings))
    two = await AsyncTokenizer.start(checkpoint, WorkerConfig(decoders=2, **settings))
    isolating = WorkerConfig(decoders=2, media=MediaCaps(isolate_requests=True), **settings)
    each = await AsyncTokenizer.start(checkpoint, isolating)
    try:
        with Tokenizer.from_pretrained(checkpoint, arena=Arena.create(2**27)) as script:
            figures = await _hop(script, one, images)
        figures |= await _parallel(one, two, images)
        figures |= await _crowd(two, images)
        figures |= await _domains(two, each, images)
        figures |= await _latency(two, images)
    finally:
        await each.close()
        await one.close()
        await two.close()
    return figures | _copying(folder)


async def _hop(script: Tokenizer, one: AsyncTokenizer, images: Images) -> dict[str, float]:
    """Measure the time for one image, decoded in the script's process and by a decoder process."""
    alone: list[float] = []
    decoded: list[float] = []
    for turn in range(ROUNDS + 2):
        request = images.request(1)
        start = time.perf_counter()
        script.answer(request)
        in_script = time.perf_counter() - start
        by_decoder = await timed(one, images.request(1))
        if turn >= 2:
            alone.append(in_script)
            decoded.append(by_decoder)
        release(images.path_file)
    return {
        "one_image_in_the_script_ms": 1e3 * median(alone),
        "one_image_by_a_decoder_ms": 1e3 * median(decoded),
        "ratio": median([b / a for a, b in zip(alone, decoded, strict=True)]),
    }


async def _parallel(one: AsyncTokenizer, two: AsyncTokenizer, images: Images) -> dict[str, float]:
    """Measure one request with many images, with one decoder and with two."""
    ratios, seconds = [], []
    for _ in range(5):
        by_one = await timed(one, images.request(MANY))
        release(images.path_file)
        by_two = await timed(two, images.request(MANY))
        release(images.path_file)
        ratios.append(by_one / by_two)
        seconds.append(by_two)
    return {f"{MANY}_images_by_two_s": median(seconds), f"{MANY}_images_two_decoders_over_one": median(ratios)}


async def _crowd(two: AsyncTokenizer, images: Images) -> dict[str, float]:
    """Measure a request with one image while a request with CROWD images is in progress."""
    idle, busy = [], []
    for _ in range(5):
        idle.append(await timed(two, images.request(1, "other.txt")))
        release(Path(images.path_file).with_name("other.txt"))
    crowd = asyncio.create_task(two.tokenize(images.request(CROWD)))
    await asyncio.sleep(0.2)
    while not crowd.done():
        busy.append(await timed(two, images.request(1, "other.txt")))
        release(Path(images.path_file).with_name("other.txt"))
    await crowd
    release(images.path_file)
    return {
        "one_image_idle_ms": 1e3 * median(idle),
        f"one_image_beside_{CROWD}_ms": 1e3 * median(busy),
        "added_over_one_image": median(busy) / median(idle) - 1,
    }


async def _domains(two: AsyncTokenizer, each: AsyncTokenizer, images: Images) -> dict[str, float]:
    """Measure requests per second and processor time, with requests that alternate between trust domains."""
    variants = {f"{number}_domains": (two, number) for number in DOMAINS} | {"each_request": (each, 1)}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(5):
        for name, (tokenizer, num_domains) in variants.items():
            requests = iter(
                [images.request(1, f"domain{index}.txt", f"salt {index % num_domains}") for index in range(PER_ROUND)]
            )

            async def send(tokenizer: AsyncTokenizer = tokenizer, requests: Any = requests) -> None:
                for request in requests:
                    await tokenizer.tokenize(request)
                    release(request.path_file)

            for index in range(min(num_domains, 8)):  # so many decoders are kept
                await tokenizer.tokenize(images.request(1, salt=f"salt {index}"))
                release(images.path_file)
            used, start = _processor_s(tokenizer), time.perf_counter()
            await asyncio.gather(*(send() for _ in range(AT_ONCE)))
            rates[name].append(PER_ROUND / (time.perf_counter() - start))
            times[name].append((_processor_s(tokenizer) - used) / PER_ROUND)
    one = f"{DOMAINS[0]}_domains"
    figures = {f"requests_per_s_{name}": median(found) for name, found in rates.items()}
    figures |= {f"processor_ms_{name}": 1e3 * median(found) for name, found in times.items()}
    more = [b - a for a, b in zip(times[one], times["each_request"], strict=True)]
    return figures | {"replacement_processor_ms": 1e3 * median(more)}


async def _latency(two: AsyncTokenizer, images: Images) -> dict[str, float]:
    """Measure single requests in the same trust domain and in new ones. A spare decoder is ready each time."""
    same: list[float] = []
    new: list[float] = []
    for turn in range(4 * ROUNDS):
        for salt, found in (("", same), (f"new {turn}", new)):
            await asyncio.sleep(0.05)
            found.append(await timed(two, images.request(1, salt=salt)))
            release(images.path_file)
            found.append(await timed(two, images.request(1, salt=salt)))
            release(images.path_file)
    return {"same_domain_ms": 1e3 * median(same[1::2]), "new_domain_ms": 1e3 * median(new[::2])}


def _processor_s(tokenizer: AsyncTokenizer) -> float:
    """Return the processor time of a tokenizer process and its decoders, including those that have ended."""
    root = psutil.Process(tokenizer.pids[0])
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of ended children
    return total


def _copying(folder: Path) -> dict[str, float]:
    """Measure two ways of filling an image's block: a copy from scratch memory, and a mapping made for the image."""
    copied, mapped = [], []
    with Arena.create(2**26) as arena:
        arena.populated.wait()
        spec = ArraySpec((SIZE[0] * SIZE[1] * 6 // 1176, 1176), "uint8")
        pixels = np.zeros(spec.shape, np.uint8)
        file = make_file(spec.nbytes)
        scratch = Scratch(file)
        os.close(file)
        descriptor = os.open(arena.path, os.O_RDWR)
        for _ in range(50):
            with arena.allocate({"pixel_values": spec}, path_file=folder / "copying.txt") as block:
                start = time.perf_counter()
                written = scratch.arrays(layout_of(block))
                written["pixel_values"][...] = pixels
                scratch.move(written, block)
                copied.append(time.perf_counter() - start)
            with arena.allocate({"pixel_values": spec}, path_file=folder / "copying.txt") as block:
                start = time.perf_counter()
                buffer = map_pieces(descriptor, block.pieces, writable=True)
                np.ndarray(spec.shape, np.uint8, buffer, block.plan.arrays["pixel_values"].offset)[...] = pixels
                del buffer
                mapped.append(time.perf_counter() - start)
        os.close(descriptor)
    return {
        "block_mib": spec.nbytes / 2**20,
        "into_scratch_and_copied_ms": 1e3 * median(copied),
        "into_a_mapping_of_its_own_ms": 1e3 * median(mapped),
    }


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    write("decoders", {name: round(value, 4) for name, value in figures.items()})


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
