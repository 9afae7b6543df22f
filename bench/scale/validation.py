"""Comparison of the model's requests per second with measured ones.

The clients, the service and its engines share the processors of one machine, and each engine has one thread.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from bench.scale.host import Layout, Run, closed_loop
from bench.scale.processor_time import ProcessorTime
from bench.scale.stage_times import RESULTS, StageTimes

TOLERANCE = 0.2
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
        """True if the prediction is within the tolerance."""
        return abs(self.ratio - 1) <= TOLERANCE

    def figures(self) -> dict[str, Any]:
        return {
            **asdict(self.point),
            "predicted_requests_per_s": round(self.predicted.requests_per_s, 3),
            "predicted_over_measured": round(self.ratio, 3),
        }


def predict(point: Point, times: StageTimes) -> Comparison:
    """Simulate the load of `point`, with new images only."""
    layout = Layout(
        times.engine,
        times.tokens,
        point.engines,
        point.decoders,
        point.processors,
        times.contention,
    )
    return Comparison(point, closed_loop(layout, times.images[point.size], point.num_tokens, point.clients, REQUESTS))


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
        times = psutil.cpu_times()
        whole = sum(times) - times.guest - times.guest_nice  # Linux counts guests in user and nice, too
        return whole, whole - times.idle - times.iowait, sum(ProcessorTime(self._pid).seconds().values())


def compare(path: Path) -> list[Comparison]:
    """Return the model's prediction beside each point of a file.

    The file has a list `points`, whose entries have the fields of `Point`. It may also have `stages`: stage times by
    number of engines, measured in turn with the rates, which replace those in bench/results/scale_stages.json.
    """
    figures = json.loads(path.read_text(encoding="utf-8"))
    common = json.loads((RESULTS / "scale_stages.json").read_text(encoding="utf-8"))
    found = []
    for entry in figures["points"]:
        point = Point(**{name: entry[name] for name in Point.__dataclass_fields__ if name in entry})
        measured = common | figures.get("stages", {}).get(str(point.engines), {})
        found.append(predict(point, StageTimes.of(measured, point.checkpoint)))
    return found
