"""Comparison of the model's requests per second with measured ones.

The clients, the service and its engines share the processors of one machine, and each engine has one thread.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from bench.scale.host import Layout, Run, closed_loop
from bench.scale.stage_times import StageTimes

TOLERANCE = 0.2
CLIENTS = (1, 2, 4, 8)
SIZE = "640x480"
TOKENS = 16
TURNS = 5
REQUESTS = 200
"""Number of simulated requests."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured rate, and what was measured."""

    checkpoint: str
    size: str
    clients: int
    num_tokens: int
    requests_per_s: float
    engines: int = 1
    decoders: int = 1
    processors: int = 2
    others: float = 0.0
    """Share of the processors that other programs used during the measurement."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured rate beside the model's."""

    point: Point
    predicted: Run

    @property
    def ratio(self) -> float:
        """Predicted rate, divided by the measured one."""
        return self.predicted.requests_per_s / self.point.requests_per_s

    @property
    def holds(self) -> bool:
        """Whether the prediction is within the tolerance."""
        return abs(self.ratio - 1) <= TOLERANCE

    def figures(self) -> dict[str, Any]:
        return {
            **asdict(self.point),
            "predicted_requests_per_s": round(self.predicted.requests_per_s, 3),
            "predicted_over_measured": round(self.ratio, 3),
        }


def predict(point: Point, times: StageTimes) -> Comparison:
    """Simulate the load of `point`, with new pictures only."""
    layout = Layout(
        times.engine,
        times.tokens,
        point.engines,
        point.decoders,
        point.processors,
        times.contention,
    )
    return Comparison(point, closed_loop(layout, times.pictures[point.size], point.num_tokens, point.clients, REQUESTS))


def measure(checkpoints: Sequence[str]) -> Iterator[Point]:
    """Measure one engine with a few numbers of clients. Of several turns, the least disturbed one counts."""
    from bench.scale.stages import checkpoint_directory
    from bench.serve.load import Load, Server, drive, seeds, session
    from bench.serve.pictures import Size
    from mindie_mm.settings.cgroup import available_cpus
    from tools.serving import running_service

    async def turn(server: Server, clients: int) -> float:
        load = Load(Size.of(SIZE), clients, max(16, 4 * clients), max_tokens=TOKENS)
        async with session() as http:
            figures = (await drive(http, server, load, load.pictures(numbers))).figures()
        if figures["errors"]:
            raise RuntimeError(f"{figures['errors']} requests failed, the first with: {figures['first_error']}")
        return float(figures["requests_per_s"])

    numbers = seeds()
    for name in checkpoints:
        with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as folder:
            settings = {"spool": Path(folder) / "spool", "dtype": "float32", "num_threads": 1, "decoders": 1}
            with running_service(settings, Path(folder) / "log", checkpoint_directory(name)) as service:
                server = Server(service.url, service.model)
                asyncio.run(turn(server, 1))
                for clients in CLIENTS:
                    rates = []
                    for _ in range(TURNS):
                        with Others(service.process.pid) as others:
                            rate = asyncio.run(turn(server, clients))
                        rates.append((others.share, rate))
                    share, rate = min(rates)
                    yield Point(name, SIZE, clients, TOKENS, rate, processors=available_cpus(), others=round(share, 3))


class Others:
    """The share of the machine's processors that programs other than a service and this process use meanwhile."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.share = 0.0

    def __enter__(self) -> Self:
        self._begun = self._seconds()
        return self

    def __exit__(self, *_: object) -> None:
        whole, busy, ours = (now - then for now, then in zip(self._seconds(), self._begun, strict=True))
        self.share = max(0.0, busy - ours) / whole

    def _seconds(self) -> tuple[float, float, float]:
        from bench.scale.processor_time import ProcessorTime

        times = psutil.cpu_times()
        whole = sum(times) - times.guest - times.guest_nice  # Linux counts guests in user and nice, too
        return whole, whole - times.idle - times.iowait, sum(ProcessorTime(self._pid).seconds().values())


def points_of(path: Path) -> list[Point]:
    """Return the points of a file with a list `points`, whose entries have the fields of `Point`."""
    entries = json.loads(path.read_text(encoding="utf-8"))["points"]
    return [Point(**{name: entry[name] for name in Point.__dataclass_fields__ if name in entry}) for entry in entries]
