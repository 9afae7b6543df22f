"""Measurement of the share of its request rate that a server keeps while other programs use the same CPUs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp

from bench.serve.images import Size
from bench.serve.load import Load, Outcome, Server, drive

TURNS = 3
SETTLE_S = 1.0
SIZE = Size(640, 480)
_LOOP = "while True: pass"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` processes. Each process keeps one CPU busy."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _LOOP]))
            stack.callback(process.kill)
        yield


async def neighbours(
    http: aiohttp.ClientSession,
    servers: Sequence[Server],
    *,
    loops: int,
    concurrent: int,
    requests: int,
    max_tokens: int,
    seeds: Iterator[int],
) -> list[dict[str, Any]]:
    """Measure each server's requests per second, alternately alone and while `loops` busy loops run."""
    load = Load(SIZE, concurrent, requests, max_tokens=max_tokens)
    alone, busy = [Outcome() for _ in servers], [Outcome() for _ in servers]
    for server in servers:
        await drive(http, server, load, load.images(seeds))  # warm-up
    for _ in range(TURNS):
        for outcomes, count in ((alone, 0), (busy, loops)):
            for index, server in enumerate(servers):
                images = await asyncio.to_thread(load.images, seeds)
                with busy_loops(count):
                    await asyncio.sleep(SETTLE_S)
                    outcomes[index] += await drive(http, server, load, images)
    return [_figures(*both) for both in zip(alone, busy, strict=True)]


def _figures(alone: Outcome, busy: Outcome) -> dict[str, Any]:
    idle_rate, busy_rate = (one.figures()["requests_per_s"] for one in (alone, busy))
    return {
        "alone": alone.figures(),
        "busy": busy.figures(),
        "kept": round(busy_rate / idle_rate, 3) if idle_rate else None,
    }
