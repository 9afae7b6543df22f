"""Startup time and memory of the service and of `LLM`: `python -m bench.startup`.

The checkpoints are the embedded one and `mid` of `tools.random_checkpoint`, the latter also with small caches. Each
figure is a median over starts. Memory is the proportional set size (PSS) of the processes of each task, once when the
service is ready, and once after requests with images that it had not seen before.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.report import median, write
from bench.scale.processor_time import tasks
from bench.serve.images import Size
from bench.serve.load import Load, Server, drive, seeds, session
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from tools.random_checkpoint import write_checkpoint
from tools.serving import RunningService, running_service

IMAGE = Size(640, 480)
REQUESTS = 16
MiB = 2**20
SMALL_CACHES = {
    "arena_bytes": 64 * MiB,
    "preprocessed_cache_bytes": 32 * MiB,
    "encoder_cache_bytes": 32 * MiB,
    "kv_cache_bytes": 64 * MiB,
}
FIRST_ANSWER = """
import sys
from mindie_mm import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate(["Hello"], SamplingParams(max_tokens=1))
"""


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="number of starts per figure")
    options = parser.parse_args(arguments)
    mindie_mm = Path(sys.executable).with_name("mindie-mm")
    helps = [_seconds(mindie_mm, "--help") for _ in range(options.starts)]
    with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as folder:
        mid = write_checkpoint(Path(folder) / "mid", "mid")
        rows = [_row(name, *one, options.starts, Path(folder)) for name, one in _cases(mid).items()]
    write("startup", {"help_s": round(median(helps), 2), "rows": rows})


def _cases(mid: Path) -> dict[str, tuple[Path, dict[str, int]]]:
    return {"embedded": (EMBEDDED, {}), "mid": (mid, {}), "mid, small caches": (mid, SMALL_CACHES)}


def _row(name: str, checkpoint: Path, settings: dict[str, int], starts: int, folder: Path) -> dict[str, Any]:
    ready, processor, rest, loaded = [], [], [], []
    for _ in range(starts):
        begun = time.perf_counter()
        with running_service(settings | {"spool": folder / "spool"}, folder / "log", checkpoint) as service:
            ready.append(time.perf_counter() - begun)
            root = psutil.Process(service.process.pid)
            times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
            processor.append(sum(one.user + one.system for one in times))
            rest.append(_memory(service))
            asyncio.run(_load(service))
            loaded.append(_memory(service))
    answers = [_seconds(sys.executable, "-c", FIRST_ANSWER, checkpoint) for _ in range(starts)]
    return {
        "checkpoint": name,
        "ready_s": round(median(ready), 2),
        "processor_s": round(median(processor), 2),
        "llm_first_answer_s": round(median(answers), 2),
        "at_rest_mib": _medians(rest),
        "after_load_mib": _medians(loaded),
    }


async def _load(service: RunningService) -> None:
    load, server = Load(IMAGE, 4, REQUESTS), Server(service.url, service.model)
    async with session() as http:
        outcome = await drive(http, server, load, load.images(seeds()))
    if faults := [answer.fault for answer in outcome.answers if answer.fault]:
        raise RuntimeError(faults[0])


def _memory(service: RunningService) -> dict[str, float]:
    """Return the memory of each task's processes in MiB, and of all together."""
    each = {
        name: sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / MiB
        for name, pids in tasks(service.process.pid).items()
    }
    return each | {"all": sum(each.values())}


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, int]:
    return {name: round(median([sample[name] for sample in samples])) for name in samples[0]}


def _seconds(*command: object) -> float:
    begun = time.perf_counter()
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(sys.argv[1:])
