"""Reading a finished run from the page cache, beside copying its files: `python -m bench.batch.reading`.

Both variants copy the same bytes to one buffer in turn. `Dataset` also reads the tables, and finds the arrays of each
row. Other variants show how much is due to the order of the rows and to the inputs of the model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.batch.contestants import tokenize
from bench.batch.maps import files_of
from bench.report import RESULTS, median, write
from mindie_mm.batch import Dataset, Sample
from mindie_mm.shm.mapping import map_file
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

TURNS = 9
NAMES = ("images of 640x480", "images of 1420x720", "videos of 480x360, 4 s")
ROWS = 256
"""Number of rows of a run, two full shards."""
PIECE_BYTES = 1 << 20


def copied(arrays: Iterable[NDArray[Any]], buffer: NDArray[np.uint8]) -> int:
    """Copy each array to the buffer in pieces, which stay in the processor's cache. Return the number of bytes."""
    total = 0
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        for at in range(0, flat.size, PIECE_BYTES):
            piece = flat[at : at + PIECE_BYTES]
            buffer[: piece.size] = piece
        total += flat.size
    return total


def files(folder: Path, buffer: NDArray[np.uint8]) -> int:
    """Copy the files of arrays. Return the number of bytes."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            data = np.frombuffer(map_file(file.fileno(), os.fstat(file.fileno()).st_size), np.uint8)
        total += copied([data], buffer)
    return total


def samples(chosen: Iterable[Sample], buffer: NDArray[np.uint8]) -> int:
    """Copy the arrays of samples. Return the number of bytes."""
    return sum(copied((array for item in sample.arrays for array in item.values()), buffer) for sample in chosen)


def measure(folder: Path, checkpoint: Path, name: str) -> dict[str, Any]:
    """Return the rates of each variant for the rows of one input."""
    folder.mkdir()
    run = folder / "run"
    tokenize(files_of(name)[1], checkpoint, run, 1, "--limit", str(ROWS))
    buffer = np.empty(PIECE_BYTES, np.uint8)
    variants: dict[str, Callable[[], int]] = {
        "copying the files": lambda: files(run, buffer),
        "Dataset, in order": lambda: samples(Dataset(run), buffer),
        "Dataset, shuffled": lambda: samples(map((dataset := Dataset(run)).__getitem__, dataset.order()), buffer),
    }
    turns: list[dict[str, float]] = []
    for _ in range(TURNS + 1):  # the first turn is a warm-up
        turn = {}
        for variant, read in variants.items():
            began = time.process_time()
            total = read()
            turn[variant] = total / (time.process_time() - began)
        turns.append(turn)
    first = next(iter(variants))
    return {
        "rows": ROWS,
        "bytes": total,
        "gigabytes_a_second": {
            variant: round(median([turn[variant] for turn in turns[1:]]) / 1e9, 2) for variant in variants
        },
        "of_copying_the_files": {
            variant: round(median([turn[variant] / turn[first] for turn in turns[1:]]), 3)
            for variant in variants
            if variant != first
        },
    }


def main() -> None:
    parser(__doc__).parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name) / "checkpoint")
        for number, inputs in enumerate(NAMES):
            folder = Path(name) / str(number)
            figures[inputs] = measure(folder, checkpoint, inputs)
            shutil.rmtree(folder)
    write("batch_reading", figures)
    lines = [
        "# Reading a run from the page cache",
        "",
        "Gigabytes per second of one core, and in brackets the part of the rate of copying the files.",
        "",
        "| input | copying the files | Dataset, in order | Dataset, shuffled |",
        "|---|---|---|---|",
    ]
    for inputs, found in figures.items():
        rates, parts = found["gigabytes_a_second"], found["of_copying_the_files"]
        cells = [f"{rate} ({parts[variant]})" if variant in parts else str(rate) for variant, rate in rates.items()]
        lines.append(f"| {inputs} | {' | '.join(cells)} |")
    (RESULTS / "batch_reading.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
