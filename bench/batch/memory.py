"""Memory of all processes of a run over time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.batch.contestants import CLI

INTERVAL_S = 0.5
MB = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory in use at one time.

    PSS counts 1/n of a page that n processes share, so the sum over all processes counts each page once.
    """

    at_s: float
    pss_bytes: int
    anonymous_bytes: int
    """The part of `pss_bytes` that is not backed by files."""
    processes: int


def run(rows: Path, checkpoint: Path, out: Path, workers: int) -> tuple[float, list[Sample]]:
    """Run `mindie-mm tokenize`. Return its duration in seconds, and samples every INTERVAL_S seconds."""
    command = [CLI, "tokenize", str(rows), "--model", str(checkpoint), "--output", str(out), "--workers", str(workers)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        samples = list(watched(psutil.Process(process.pid), began))
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited with status {process.returncode}")
    return time.perf_counter() - began, samples


def watched(root: psutil.Process, began: float) -> Iterator[Sample]:
    """Yield samples of a process and its children until the process has ended."""
    while root.status() != psutil.STATUS_ZOMBIE:
        pss = anonymous = count = 0
        for process in [root, *root.children(recursive=True)]:
            try:
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # the process has just ended
                continue
            sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in rollup.splitlines()[1:]}
            if sizes:
                pss, anonymous, count = pss + sizes["Pss:"], anonymous + sizes["Pss_Anon:"], count + 1
        if count:
            yield Sample(time.perf_counter() - began, pss, anonymous, count)
        time.sleep(INTERVAL_S)


def draw(axes: Any, samples: list[Sample], limit_bytes: float, title: str) -> None:
    """Plot the memory in megabytes over seconds, with the limit."""
    seconds = [sample.at_s for sample in samples]
    axes.plot(seconds, [sample.pss_bytes / MB for sample in samples], label="all processes (PSS)")
    axes.plot(seconds, [sample.anonymous_bytes / MB for sample in samples], label="without pages of files")
    axes.axhline(limit_bytes / MB, color="tab:red", linestyle="--", label="limit")
    axes.set_ylim(0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MB")
    axes.set_title(title)
    axes.legend()
