"""What is run beside each other: our command, our fused path alone, a loop over transformers, Ray Data over it."""

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

from mindie_mm.inputs import Media
from mindie_mm.models import qwen2_vl
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.shm import Arena, release
from mindie_mm.tokenize.planning import content_digest
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
    """What a number of rows took."""

    wall_s: float
    cpu_s: float
    """Processor time of all processes and threads."""

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def a_row(self, rows: int) -> dict[str, float]:
        """In milliseconds."""
        return {"wall": 1e3 * self.wall_s / rows, "processor": 1e3 * self.cpu_s / rows}


class Clock:
    """The time that passes within it: this process's and, once they ended, its children's."""

    def __enter__(self) -> Self:
        self._began = _now()
        return self

    def __exit__(self, *_: object) -> None:
        self.cost = _now() - self._began


def _now() -> Cost:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Cost(time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages))


def _process_now() -> Cost:
    """Of this process alone, which is asked for in a microsecond."""
    return Cost(time.perf_counter(), time.process_time())


def tokenize(rows: Path, checkpoint: Path, out: Path, workers: int, *options: str) -> Cost:
    """`mindie-mm tokenize`, one thread a process."""
    command = [CLI, "tokenize", str(rows), "--model", str(checkpoint), "--output", str(out), "--workers", str(workers)]
    with Clock() as clock:
        subprocess.run(
            [*command, *options], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    return clock.cost


def fused(pictures: Sequence[Path], checkpoint: Path, path_file: Path) -> tuple[Cost, Cost]:
    """bench/preprocess's own, from a JPEG's bytes to a published block in shared memory; and with reading its file."""
    processor = qwen2_vl.Qwen2VLProcessor(Checkpoint.open(checkpoint))
    alone = reading = Cost(0.0, 0.0)
    with Arena.create(ARENA_BYTES) as arena:
        arena.populated.wait()
        for number, path in enumerate([*pictures[:8], *pictures]):  # the first ones warm up
            began = _process_now()
            data = path.read_bytes()
            was_read = _process_now()
            plan = processor.plan(Media("image", data), data, {"image": 1})
            with arena.allocate(plan.specs, path_file=path_file) as block:
                plan.write(block)
                block.publish(content_digest(plan.settings, data))
            if number >= 8:
                alone, reading = alone + (_process_now() - was_read), reading + (was_read - began)
            release(path_file)
            path_file.unlink()
    return alone, alone + reading


class Reference:
    """transformers' processor with its PIL backend, as its user writes it: one row in, float32 patches out."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = Qwen2VLProcessor(
            Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
            AutoTokenizer.from_pretrained(checkpoint),
            Qwen2VLVideoProcessor.from_pretrained(checkpoint),
        )
        self._template = self._processor.tokenizer.chat_template

    def __call__(self, line: str | bytes) -> tuple[str, np.ndarray, np.ndarray]:
        """Id, int64 [T], float32 [patches, 1176]."""
        row = json.loads(line)
        image, text = row["inputs"]
        parts = [{"type": "image"}, {"type": "text", "text": text["text"]}]
        prompt = self._processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        with Image.open(image["image"]) as picture:
            made: Any = self._processor(text=[prompt], images=[picture.convert("RGB")], return_tensors="np")
        return row["id"], made["input_ids"][0], made["pixel_values"].astype(np.float32, copy=False)

    def loop(self, lines: Sequence[str], out: Path) -> tuple[Cost, int]:
        """Row after row, two files each; also the bytes that these have."""
        out.mkdir()
        total = 0
        with Clock() as clock:
            for line in lines:
                name, ids, patches = self(line)
                np.save(out / f"{name}-ids.npy", ids)
                np.save(out / f"{name}-pixels.npy", patches)
                total += ids.nbytes + patches.nbytes
        return clock.cost, total
