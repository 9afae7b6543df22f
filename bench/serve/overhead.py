"""Measurement of the parts of a request's time outside the model, for one client that sends one image at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import median
from bench.serve.images import Size, data_url, jpeg
from bench.serve.load import Server, ask, session
from mindie_mm.inputs import Media
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint

SIZE = Size(640, 480)
MAX_TOKENS = 16


def decoding_s(checkpoint: Path | None, images: list[bytes]) -> float:
    """Return the median seconds that a family takes to preprocess one of `images` on one thread, as in a tokenizer.

    The time covers parsing the header, decoding, resizing and cutting patches. It does not cover the allocation of the
    arrays, which exist already, as in an arena.
    """
    opened = Checkpoint.open(checkpoint)
    processor = family_of(opened).processor(opened)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    took = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for data in images:
        started = time.perf_counter()
        plan, write = processor.plan(Media("image", data), data, {"image": 1})
        if not arrays:
            arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
            started = time.perf_counter()
        write(arrays)
        took.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return median(took)


async def overhead(server: Server, checkpoint: Path | None, requests: int, numbers: Iterator[int]) -> dict[str, Any]:
    """Send `requests` requests one at a time, each with its own image, and return medians in milliseconds.

    The model's time is `prefill_s`, which includes the tower, and `decode_s` of the engine. `outside_model_ms` is the
    rest of the time that the client waits. `without_decoding_ms` is `outside_model_ms` without the time to decode the
    image. `in_the_server_ms` is the part of `without_decoding_ms` that the server's timings show. It excludes the
    client's work and the connection.

    Raises:
        RuntimeError: A request failed, or its answer has no timings.

    """
    answers = []
    async with session() as http:
        for index in range(requests + 3):
            answer = await ask(http, server, data_url(next(numbers), SIZE), MAX_TOKENS, timings=True)
            if answer.fault is not None or answer.timings is None:
                raise RuntimeError(f"request {index}: {answer.fault or 'no timings'}")
            if index >= 3:  # the first three are a warm-up
                answers.append((answer.ended - answer.begun, answer.timings))
    decode_s = decoding_s(checkpoint, [jpeg(next(numbers), SIZE) for _ in range(40)])

    def of(*names: str) -> float:
        return median([sum(timings[name] for name in names) for _, timings in answers])

    def ms(seconds: float) -> float:
        return round(seconds * 1000, 2)

    stages = ("fetch_s", "preprocess_s", "queue_s", "prefill_s", "decode_s")
    outside = [e2e - timings["prefill_s"] - timings["decode_s"] for e2e, timings in answers]
    rest = [timings["total_s"] - sum(timings[name] for name in stages) for _, timings in answers]
    return {
        "image": str(SIZE),
        "requests": requests,
        "tokens": MAX_TOKENS,
        "e2e_ms": ms(median([e2e for e2e, _ in answers])),
        "model_ms": {"tower": ms(of("tower_s")), "prefill": ms(of("prefill_s")), "decode": ms(of("decode_s"))},
        "outside_model_ms": ms(median(outside)),
        "without_decoding_ms": ms(median(outside) - decode_s),
        "in_the_server_ms": ms(median([t["total_s"] - t["prefill_s"] - t["decode_s"] for _, t in answers]) - decode_s),
        "parts_ms": {
            "client, connection and HTTP": ms(median([e2e - timings["total_s"] for e2e, timings in answers])),
            "image to a file (fetch_s)": ms(of("fetch_s")),
            "decoding and resizing the image": ms(decode_s),
            "hand-over, text to ids, arena (rest of preprocess_s)": ms(of("preprocess_s") - decode_s),
            "queue_s": ms(of("queue_s")),
            "reading the body, engine's messages, detokenizing, events": ms(median(rest)),
        },
    }
