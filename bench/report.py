"""Output of the benchmarks: JSON files and plots in bench/results."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(name: str, figures: dict[str, Any]) -> None:
    """Print the figures, and write them to bench/results/<name>.json with a description of the machine."""
    save(name, {"machine": machine(), **figures})


def save(name: str, figures: dict[str, Any]) -> None:
    """Print the figures, and write them to bench/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(figures, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def saved(name: str) -> dict[str, Any]:
    """Return the figures in bench/results/<name>.json, or an empty dict if there is no such file."""
    path = RESULTS / f"{name}.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return figures


def plot(name: str, draw: Callable[[Any], None]) -> None:
    """Write bench/results/<name>.png. `draw` draws on a matplotlib `Axes`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    draw(axes)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
