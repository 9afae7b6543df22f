"""Variants of the batch benchmark: `mindie-mm tokenize`, the fused path alone, and transformers in a loop."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from mindie_mm.decode.digest import content_digest
from mindie_mm.inputs import Media
from mindie_mm.models import qwen2_vl
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.shm import Arena, release
from tests.transformers_reference import (
    AutoTokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

CLI = str(Path(sys.executable).with_name("mindie-mm"))
ARENA_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Cost:
    """The time to process a number of rows."""

    wall_s: float
    cpu_s: float
    """CPU time of all processes and threads, in seconds."""

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def a_row(self, rows: int) -> dict[str, float]:
        """Return wall and CPU milliseconds per row."""
        return {"wall": 1e3 * self.wall_s / rows, "processor": 1e3 * self.cpu_s / rows}


class Clock:
    """A context manager that measures time. CPU time includes child processes that have ended."""

    def __enter__(self) -> Self:
        self._began = _now()
        return self

    def __exit__(self, *_: object) -> None:
        self.cost = _now() - self._began


def _now() -> Cost:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Cost(time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages))


def _process_now() -> Cost:
    """Return the times of this process without child processes. This takes about a microsecond, less than `_now`."""
    return Cost(time.perf_counter(), time.process_time())


def tokenize(rows: Path, checkpoint: Path, out: Path, workers: int, *options: str) -> Cost:
    """Run `mindie-mm tokenize` with one thread per process, and return its cost."""
    command = [CLI, "tokenize", str(rows), "--model", str(checkpoint), "--output", str(out), "--workers", str(workers)]
    with Clock() as clock:
        done = subprocess.run(
            [*command, *options],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with status {done.returncode}:\n{done.stderr[-2000:]}")
    return clock.cost


def fused(images: Sequence[Path], checkpoint: Path, path_file: Path) -> tuple[Cost, Cost]:
    """Run the fused path of bench/preprocess.py, from the bytes of a JPEG to a published block in shared memory.

    Return the cost without reading the files, and the cost with reading the files.
    """
    processor = qwen2_vl.Qwen2VLProcessor(Checkpoint.open(checkpoint))
    alone = reading = Cost(0.0, 0.0)
    with Arena.create(ARENA_BYTES) as arena:
        arena.populated.wait()
        for number, path in enumerate([*images[:8], *images]):  # the first eight are a warm-up
            began = _process_now()
            data = path.read_bytes()
            was_read = _process_now()
            plan, write = processor.plan(Media("image", data), data, {"image": 1})
            with arena.allocate(plan.specs, path_file=path_file) as block:
                write(block)
                block.publish(content_digest(plan.settings, data))
            if number >= 8:
                alone, reading = alone + (_process_now() - was_read), reading + (was_read - began)
            release(path_file)
            path_file.unlink()
    return alone, alone + reading


class Reference:
    """The transformers processor with its PIL backend, called for one row at a time, as users call it."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = Qwen2VLProcessor(
            Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
            AutoTokenizer.from_pretrained(checkpoint),
            Qwen2VLVideoProcessor.from_pretrained(checkpoint),
        )
        self._template = self._processor.tokenizer.chat_template

    def __call__(self, line: str | bytes) -> tuple[str, np.ndarray, np.ndarray]:
        """Return the row's id, its token ids (int64, [tokens]) and its patches (float32, [patches, 1176])."""
        row = json.loads(line)
        image, text = row["inputs"]
        parts = [{"type": "image"}, {"type": "text", "text": text["text"]}]
        prompt = self._processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        with Image.open(image["image"]) as opened:
            inputs: Any = self._processor(text=[prompt], images=[opened.convert("RGB")], return_tensors="np")
        return row["id"], inputs["input_ids"][0], inputs["pixel_values"].astype(np.float32, copy=False)

    def loop(self, lines: Sequence[str], out: Path) -> tuple[Cost, int]:
        """Process the rows in a loop and write two files per row. Return the cost and the bytes of all arrays."""
        out.mkdir()
        total = 0
        with Clock() as clock:
            for line in lines:
                name, ids, patches = self(line)
                np.save(out / f"{name}-ids.npy", ids)
                np.save(out / f"{name}-pixels.npy", patches)
                total += ids.nbytes + patches.nbytes
        return clock.cost, total
