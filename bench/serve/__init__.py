"""Load test of `mindie-mm serve` over HTTP.

It measures requests per second and latencies with 1 to 64 clients, the time that the service adds to the model's time,
and the request rate while busy loops use the same CPUs. With --peer, it also measures another OpenAI-compatible server.

    python -m bench.serve                              # everything; an hour on two cores
    python -m bench.serve --quick                      # minutes: the embedded checkpoint alone, a few points
    python -m bench.serve --checkpoints small --sizes 640x480 --concurrency 1,8 --repeated 0,0.9
    python -m bench.serve --checkpoints DIRECTORY --peer http://127.0.0.1:8100 MODEL --results serve_peer

`tiny` is the embedded checkpoint. `small` and `mid` have 7 and 37 million random parameters, and are written by
`tools.random_checkpoint`. Any other name is a directory. The peer must serve the same weights, or the ratios have no
meaning. The servers take turns, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.report import write
from bench.serve.figures import write_plot, write_table
from bench.serve.images import Size
from bench.serve.load import Load, Outcome, Server, drive, seeds, session
from bench.serve.neighbours import neighbours
from bench.serve.overhead import overhead
from mindie_mm.settings.cgroup import available_cpus
from tools.random_checkpoint import SIZES, write_checkpoint
from tools.serving import running_service

CACHE = Path(__file__).parents[2] / "build" / "bench-serve"
CHECKPOINTS = ("tiny", "small", "mid")
SETTLE_S = 2.0
"""Pause before each turn with a peer. A server's threads spin for a while after work, and would slow down the other
server.
"""
IMAGES = (Size(336, 336), Size(640, 480), Size(1420, 720))
CONCURRENCY = (1, 4, 8, 16, 32, 64)
REPEATED = (0.0, 0.8)
LARGE_PIXELS = 1_000_000
LARGE_CONCURRENCY = 8
"""Maximum number of clients for large images on the largest checkpoint. Above it, a point takes a quarter of an hour,
and only shows a longer queue."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements, and write bench/results/<results>.json, .md and .png."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.checkpoints, options.requests = options.checkpoints or ["tiny"], options.requests or 16
        options.concurrency = options.concurrency or [1, 8, 64]
        options.overhead = min(options.overhead, 30)
    points: list[dict[str, Any]] = []
    overheads: list[dict[str, Any]] = []
    busy: list[dict[str, Any]] = []
    for name in options.checkpoints or CHECKPOINTS:
        with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as folder:
            settings = {"spool": Path(folder) / "spool", "dtype": options.dtype}
            if options.threads:
                settings["num_threads"] = options.threads
            with running_service(settings, Path(folder) / "log", checkpoint := _directory(name)) as service:
                server = Server(service.url, service.model)
                points += asyncio.run(_measure(options, Path(name).name, server))
                if options.busy:
                    figures = asyncio.run(_neighbours(options, server))
                    busy.append({"checkpoint": Path(name).name, **figures})
                if options.overhead:
                    figures = asyncio.run(overhead(server, checkpoint, options.overhead, seeds()))
                    overheads.append({"checkpoint": Path(name).name, **figures})
    note = f"`mindie-mm serve --dtype {options.dtype}`; every answer has {options.tokens} tokens, streamed."
    write(options.results, {"dtype": options.dtype, "points": points, "overhead": overheads, "busy_neighbours": busy})
    write_table(options.results, points, overheads, busy, note)
    if points:
        write_plot(options.results, points)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description="Measure the service under load.")
    parser.add_argument(
        "--checkpoints", type=_texts, help="comma-separated checkpoints: " + ", ".join(CHECKPOINTS) + ", or directories"
    )
    parser.add_argument("--sizes", type=lambda text: [Size.of(one) for one in _texts(text)], default=IMAGES)
    parser.add_argument("--concurrency", type=lambda text: [int(one) for one in _texts(text)])
    parser.add_argument("--repeated", type=lambda text: [float(one) for one in _texts(text)], default=REPEATED)
    parser.add_argument(
        "--requests", type=int, help="minimum number of requests per point; default: twice the clients, but at least 16"
    )
    parser.add_argument("--tokens", type=int, default=16, help="number of tokens of each answer")
    parser.add_argument(
        "--overhead", type=int, default=100, help="number of requests that measure the overhead; 0: do not measure it"
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=available_cpus(),
        help="number of busy loops that run beside the server; default: one per CPU; 0: none",
    )
    parser.add_argument(
        "--busy-clients", type=int, default=1, help="number of clients of the server while the busy loops run"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="number of threads of the engine; default: the engine decides")
    parser.add_argument("--peer", nargs=2, metavar=("URL", "MODEL"), help="another server, measured in turns with ours")
    parser.add_argument("--results", default="serve", help="name of the result files in bench/results")
    parser.add_argument("--quick", action="store_true", help="measure fewer points, in a few minutes")
    return parser


async def _neighbours(options: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Measure the share of its request rate that each server keeps while busy loops run."""
    servers = [server, Server(*options.peer)] if options.peer else [server]
    async with session() as http:
        rates = await neighbours(
            http,
            servers,
            loops=options.busy,
            concurrent=options.busy_clients,
            requests=options.requests or 16,
            max_tokens=options.tokens,
            seeds=seeds(),
        )
    print(rates, flush=True)
    return {
        "loops": options.busy,
        "concurrent": options.busy_clients,
        **dict(zip(("ours", "peer"), rates, strict=False)),
    }


def _texts(text: str) -> list[str]:
    return text.split(",")


def _directory(name: str) -> Path | None:
    """Return the directory of the checkpoint `name`, or None for the embedded one. Write missing checkpoints."""
    if name == "tiny":
        return None
    if name not in SIZES:
        return Path(name)
    path = CACHE / name
    if not (path / "preprocessor_config.json").exists():  # one of the last files to be written
        write_checkpoint(path, name)
    return path


async def _measure(options: argparse.Namespace, name: str, server: Server) -> list[dict[str, Any]]:
    """Return all points of one checkpoint."""
    peer = Server(*options.peer) if options.peer else None
    points = []
    numbers = seeds()
    async with session() as http:
        for size in options.sizes:
            for concurrent in options.concurrency or CONCURRENCY:
                if name == "mid" and size.width * size.height > LARGE_PIXELS and concurrent > LARGE_CONCURRENCY:
                    continue
                for repeated in options.repeated:
                    requests = max(options.requests or max(16, 2 * concurrent), concurrent)
                    load = Load(size, concurrent, requests, repeated, options.tokens)
                    point = {"checkpoint": name, "image": str(size), "repeated": repeated, "concurrent": concurrent}
                    point |= await _point(http, server, peer, load, numbers)
                    print(point, flush=True)
                    points.append(point)
    return points


async def _point(
    http: aiohttp.ClientSession, server: Server, peer: Server | None, load: Load, numbers: Iterator[int]
) -> dict[str, Any]:
    """Measure one load, in two turns if there is a peer. The servers get different images."""
    warm = Load(load.size, 1, 1, max_tokens=load.max_tokens)
    servers = [server] if peer is None else [server, peer]
    outcomes = [Outcome() for _ in servers]
    for one in servers:
        await drive(http, one, warm, warm.images(numbers))
    for _ in range(1 if peer is None else 2):
        for index, one in enumerate(servers):
            if peer is not None:
                await asyncio.sleep(SETTLE_S)
            outcomes[index] += await drive(http, one, load, await asyncio.to_thread(load.images, numbers))
    ours = outcomes[0].figures()
    if peer is None:
        return {"ours": ours}
    theirs = outcomes[1].figures()
    names = ("requests_per_s", "ttft_ms_p50", "inter_token_ms_p50", "e2e_ms_p50")
    ratios = {name: round(ours[name] / theirs[name], 3) for name in names if ours[name] and theirs[name]}
    return {"ours": ours, "peer": theirs, "ratios": ratios}
