"""Several engines in one service: requests per second, and the hit rate of the encoder cache by the way of routing.

    python -m bench.scale.replicas             # about ten minutes on a quiet machine
    python -m bench.scale.replicas --short     # fewer requests

Each engine has one thread. The results are in bench/results/replicas.json and replicas.md. `points` and `stages`, the
stage times of the same minutes, are the input of `bench.scale.model --validate`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import RESULTS, write
from bench.scale.processor_time import ProcessorTime
from bench.scale.stages import ENGINE, measure_engine, measure_service, medians, rounded
from bench.scale.validation import Others, Point
from bench.serve.images import Size, jpeg
from bench.serve.load import QUESTION, Load, Server, drive, seeds, session
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.routing import Candidate
from mindie_mm.settings.cgroup import available_cpus
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.tokenize.requests import request_of_items
from mindie_mm.worker.engine_replicas import EngineReplicas
from mindie_mm.worker.worker import Worker
from tools.serving import running_service

SIZE = Size(640, 480)
TOKENS = 16
CLIENTS = (1, 4, 8)
REPEATED = 0.9
"""Probability that a request has an image of an earlier request. Each earlier image is equally likely."""
SURPLUS_TOKENS = (0, 16, 64, 256, 1024)


def points(engines: int, turns: int, requests: int) -> tuple[list[Point], dict[str, Any]]:
    """Measure a service with new images, and its stage times.

    Both change together when other programs slow the machine down, so they are measured in turn. The medians count.
    """
    numbers = seeds()

    async def turn(server: Server, clients: int) -> float:
        load = Load(SIZE, clients, max(requests, 4 * clients), max_tokens=TOKENS)
        async with session() as http:
            figures = (await drive(http, server, load, load.images(numbers))).figures()
        if figures["errors"]:
            raise RuntimeError(f"{figures['errors']} requests failed, the first with: {figures['first_error']}")
        return float(figures["requests_per_s"])

    measured: dict[int, list[tuple[float, float]]] = {clients: [] for clients in CLIENTS}
    stages = []
    with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as folder:
        settings = ENGINE | {"spool": Path(folder) / "spool", "decoders": 1, "replicas": engines}
        with running_service(settings, Path(folder) / "log") as service:
            server, used = Server(service.url, service.model), ProcessorTime(service.process.pid)
            asyncio.run(turn(server, 2))
            for _ in range(turns):
                for clients, found in measured.items():
                    with Others(service.process.pid) as others:
                        rate = asyncio.run(turn(server, clients))
                    found.append((rate, others.share))
                times = asyncio.run(measure_service(server, used, [SIZE], 1))
                stages.append(times | asyncio.run(measure_engine(1)))
    found_points = []
    for clients, found in measured.items():
        rate, share = map(median, zip(*found, strict=True))
        point = Point("tiny", str(SIZE), clients, TOKENS, rate, engines, 1, available_cpus(), round(share, 3))
        print(point, flush=True)
        found_points.append(point)
    return found_points, {"tiny": rounded(medians(stages))}


class RoundRobin:
    """A rule that chooses the engines in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, candidates: Sequence[Candidate], surplus_tokens: int, first_key: bytes) -> list[int]:
        """Return the index of the next engine."""
        self._turn += 1
        return [self._turn % len(candidates)]


@dataclass(frozen=True, slots=True)
class Routed:
    """The hit rate of the encoder caches under one kind of routing."""

    routing: str
    engines: int
    clients: int
    surplus_tokens: int
    requests: int
    different: int
    """Number of different images. A hit rate cannot exceed the share of the other requests."""
    hit_rate: float
    per_engine: list[int]
    """Number of requests of each engine."""
    seconds: float


async def routed(routing: str, engines: int, surplus_tokens: int, requests: int, clients: int = 4) -> Routed:
    """Answer requests. Most of them repeat an earlier image."""
    engine = EngineConfig(device="cpu", **ENGINE)  # type: ignore[arg-type]
    config = WorkerConfig(decoders=1, replicas=engines, replica_surplus_tokens=surplus_tokens, engine=engine)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    draws = random.Random(7)
    numbers: list[int] = []
    images: dict[int, bytes] = {}
    for _ in range(requests):
        repeated = images and draws.random() < REPEATED
        numbers.append(draws.randrange(len(images)) if repeated else len(images))
        images.setdefault(numbers[-1], jpeg(numbers[-1], SIZE))
    loop = asyncio.get_running_loop()
    async with await Worker.start(config) as worker:
        if routing == "round robin":
            assert isinstance(worker.engine, EngineReplicas)
            worker.engine.order = RoundRobin()
        waiting = iter(enumerate(numbers))

        async def client() -> None:
            for index, number in waiting:
                items: list[dict[str, Any]] = [{"image": images[number]}, {"text": QUESTION}]
                await worker.whole_answer(request_of_items(items), params, str(index))

        begun = loop.time()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = loop.time() - begun
        stats = [one.stats for one in worker.engine.engines]
    queries = [one.encoder_cache_queries for one in stats]
    hits = sum(one.encoder_cache_hits for one in stats)
    found = Routed(
        *(routing, engines, clients, surplus_tokens, requests, len(images)),
        hit_rate=round(hits / sum(queries), 4),
        per_engine=queries,
        seconds=round(seconds, 2),
    )
    print(found, flush=True)
    return found


def table(measured: Sequence[Point], rates: Sequence[Routed]) -> str:
    """Return both tables in Markdown."""
    counts = sorted({point.engines for point in measured})
    rate = {(point.engines, point.clients): point.requests_per_s for point in measured}
    lines = ["| clients | " + " | ".join(f"{count} engine{'s' * (count > 1)}" for count in counts) + " |"]
    lines += ["|---" * (1 + len(counts)) + "|"]
    lines += [f"| {n} | " + " | ".join(f"{rate[count, n]:.2f} requests/s" for count in counts) + " |" for n in CLIENTS]
    lines += ["", "| routing | engines | surplus | hit rate | requests of each engine |", "|---|---|---|---|---|"]
    for one in rates:
        surplus = one.surplus_tokens if one.routing == "content" else ""
        shares = ", ".join(map(str, one.per_engine))
        lines.append(f"| {one.routing} | {one.engines} | {surplus} | {one.hit_rate:.3f} | {shares} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results, and return 1 if content routing has less than 95% of one engine's hit rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args(arguments).short
    requests = 100 if short else 400
    default = WorkerConfig().replica_surplus_tokens

    async def all_routed() -> list[Routed]:
        found = [
            await routed("single engine", 1, default, requests),
            await routed("content", 2, default, requests),
            await routed("round robin", 2, default, requests),
        ]
        others = [] if short else [surplus for surplus in SURPLUS_TOKENS if surplus != default]
        return [*found, *[await routed("content", 2, surplus, requests) for surplus in others]]

    rates = asyncio.run(all_routed())
    turns, each = (1, 12) if short else (5, 32)
    measured, stages = [], {}
    for engines in (1, 2):
        found, stages[str(engines)] = points(engines, turns, each)
        measured += found
    figures = {"points": [asdict(one) for one in measured], "hit_rates": [asdict(one) for one in rates]}
    write("replicas", figures | {"stages": stages})
    (RESULTS / "replicas.md").write_text(table(measured, rates), encoding="utf-8")
    single, content = rates[0].hit_rate, rates[1].hit_rate
    return int(content < 0.95 * single)


if __name__ == "__main__":
    sys.exit(main())
