"""Comparison of speed and memory with OpenVINO GenAI, llama.cpp's server and vLLM on the CPU.

    make bench-peers                                   # installs all into build/bench-peers; about 20 minutes
    python -m bench.peers                              # `small` and `mid` of `tools.random_checkpoint`
    python -m bench.peers --checkpoints DIRECTORY --engines mindie_mm,llama_q8_0 --rounds 3

All engines load the same weights, get the same images in the same order, use the same number of threads and stay in
memory until the end. They run in turn, and every second round reverses their order, so that other load on the machine
affects all engines. OpenVINO GenAI has no HTTP server in its Python packages, so it runs in a process that reads jobs
from a pipe.

The time to the first token is the duration of a request for one token. Tokens per second are measured from the first to
the last token of a request for 128 tokens. All figures include the time for reading and resizing the JPEG, except for
tokens per second. Beside busy loops, each of which takes a whole core, a client's requests per second are compared with
those without loops in the same round. Each figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.engines import ENGINES, Engine
from bench.peers.install import FOLDER
from bench.report import RESULTS, write
from bench.serve.images import Size
from bench.serve.load import Load, seeds
from bench.serve.neighbours import busy_loops
from tools.random_checkpoint import SIZES, write_checkpoint

IMAGE = Size(640, 480)
LONG = 128
SHORT = 16
CLIENTS = (1, 4, 8)
LOOPS = (1, 2)
COLUMNS = {
    "first_token_ms": "first token, ms",
    "tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s, 1 client",
    "requests_per_s_4": "requests/s, 4 clients",
    "requests_per_s_8": "requests/s, 8 clients",
    "kept_1": "share beside 1 busy loop",
    "kept_2": "share beside 2 busy loops",
    "pss_mib": "memory after the load (PSS), MiB",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements, and write bench/results/peers.json and .md."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Compare with OpenVINO, llama.cpp and vLLM."
    )
    parser.add_argument("--checkpoints", type=lambda text: text.split(","), default=["small", "mid"])
    parser.add_argument(
        "--engines", type=lambda text: text.split(","), default=list(ENGINES), help="default: " + ",".join(ENGINES)
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8, help="number of requests per figure")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="number of threads per engine"
    )
    parser.add_argument("--results", default="peers", help="name of the result files in bench/results")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name in options.checkpoints:
        for engine, figures in asyncio.run(_measure(options, _directory(name))).items():
            rows.append({"checkpoint": Path(name).name, "engine": engine, **figures})
    write(options.results, {"threads": options.threads, "rounds": options.rounds, "rows": rows})
    lines = [["checkpoint", "engine", *COLUMNS.values()], ["---"] * (2 + len(COLUMNS))]
    lines += [[row["checkpoint"], row["engine"], *(str(row[key]) for key in COLUMNS)] for row in rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (RESULTS / f"{options.results}.md").write_text(table, encoding="utf-8")


def _directory(name: str) -> Path:
    if name not in SIZES:
        return Path(name)
    path = FOLDER / "checkpoints" / name
    return path if (path / "preprocessor_config.json").exists() else write_checkpoint(path, name)


async def _measure(options: argparse.Namespace, checkpoint: Path) -> dict[str, dict[str, float]]:
    """Return the figures of each engine."""
    numbers = seeds()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.engines}
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(ENGINES[name](checkpoint, options.threads))
            for name in options.engines
        }
        for engine in engines.values():
            await engine.drive(Load(IMAGE, 1, 2, max_tokens=SHORT), numbers)  # warm up
        for number in range(options.rounds):
            turns = list(engines.items())
            for name, engine in turns if number % 2 == 0 else reversed(turns):
                rounds[name].append(await _figures(engine, options.requests, numbers))
    return {name: {key: round(median(row[key] for row in rows), 3) for key in COLUMNS} for name, rows in rounds.items()}


async def _figures(engine: Engine, requests: int, numbers: Any) -> dict[str, float]:
    short = await engine.drive(Load(IMAGE, 1, requests, max_tokens=1), numbers)
    long = await engine.drive(Load(IMAGE, 1, max(2, requests // 4), max_tokens=LONG), numbers)
    rates = {clients: await _rate(engine, clients, requests * min(clients, 2), numbers) for clients in CLIENTS}
    kept = {}
    for loops in LOOPS:
        with busy_loops(loops):
            kept[loops] = await _rate(engine, 1, requests, numbers) / rates[1]
    return {
        "first_token_ms": median(answer.ended - answer.begun for answer in short.answers) * 1000,
        "tokens_per_s": median(answer.tokens_per_s() for answer in long.answers),
        "requests_per_s": rates[1],
        "requests_per_s_4": rates[4],
        "requests_per_s_8": rates[8],
        "kept_1": kept[1],
        "kept_2": kept[2],
        "pss_mib": engine.pss() / 2**20,
    }


async def _rate(engine: Engine, clients: int, requests: int, numbers: Any) -> float:
    """Return the number of short answers per second."""
    return requests / (await engine.drive(Load(IMAGE, clients, requests, max_tokens=SHORT), numbers)).seconds
