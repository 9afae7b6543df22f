"""Benchmark of `mindie-mm tokenize` on JPEGs of mixed sizes, compared with transformers and Ray Data.

It measures time, bytes on disk and memory. The variants run alternately on each slice of the images, because the
speed of a shared machine may change by half within minutes. A time in the results is the median over the slices. A
ratio is computed within each slice, and the result is the median of these ratios.

One worker is mainly compared with the fused path alone. Half of this path's slice runs before the worker, and half
after the worker. The time of the path is reported without and with reading the files, because the worker
must read the files.

A run of two rows measures the time that a run takes to start. This time is subtracted, and is reported separately. Both
wall time and processor time are reported, because other load on the machine has little effect on processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from bench.batch import memory
from bench.batch.contestants import Cost, Reference, fused, tokenize
from bench.batch.images import CACHE, SIDES, image_folder, rows
from bench.report import RESULTS, median, plot, write
from mindie_mm.batch.output.manifest import Manifest
from tools.random_checkpoint import write_checkpoint

IMAGES, ROWS = 10_000, 100_000
SLICES = 10
FUSED, FUSED_WITH_FILES = "fused path alone", "fused path with reading files"
LOOP_ROWS = 60
"""Number of rows per slice for the loop over transformers."""
RAY_ROWS, OUR_ROWS, FEW_ROWS = 256, 2048, 32
"""Number of rows for Ray Data with transformers, for our command, and for the run whose time is subtracted as start."""
SMALL_PIXELS = 64 * 28 * 28
LARGE_EACH = 100
"""Interval of the rows with full-size images when memory is measured."""
MEMORY_LIMIT = 1.2e9
MEASURES = ("speed", "ray", "memory")


def speed(folder: Path, checkpoint: Path, images: Path, count: int) -> dict[str, Any]:
    """Return the milliseconds per row of each variant, and the size of the rows on disk."""
    reference = Reference(checkpoint)
    turns: list[dict[str, dict[str, float]]] = []
    starts: list[dict[str, Cost]] = []
    disk = blocks = patches = 0
    size = count // SLICES
    for start in range(0, size * SLICES, size):
        lines = rows(images, folder / "slice.jsonl", range(start, start + size))
        paths = [images / f"{number:06d}.jpg" for number in range(start, start + size)]
        for path in paths:  # fill the page cache, so that the order of the variants does not matter
            path.read_bytes()
        alone, with_files = fused(paths[: size // 2], checkpoint, folder / "shm_name.txt")
        turn: dict[str, dict[str, float]] = {FUSED: {}, FUSED_WITH_FILES: {}}
        begun: dict[str, Cost] = {}
        for name, workers in (("1 worker", 1), ("2 workers", 2)):
            few, whole = folder / "few", folder / "whole"
            begun[name] = tokenize(lines, checkpoint, few, workers, "--limit", "2", "--shard-rows", "1")
            cost = tokenize(lines, checkpoint, whole, workers) - begun[name]
            turn[name] = cost.a_row(size - 2)
            own_bytes = Manifest.read(whole).num_bytes
            if workers == 1:
                more_alone, more_with_files = fused(paths[size // 2 :], checkpoint, folder / "shm_name.txt")
                turn[FUSED] = (alone + more_alone).a_row(size)
                turn[FUSED_WITH_FILES] = (with_files + more_with_files).a_row(size)
                disk += sum(file.stat().st_size for file in whole.iterdir())
                patches += patch_bytes(whole)
                blocks += own_bytes
            shutil.rmtree(few)
            shutil.rmtree(whole)
        looped = lines.read_text(encoding="utf-8").splitlines()[:LOOP_ROWS]
        cost, float_bytes = reference.loop(looped, folder / "loop")
        shutil.rmtree(folder / "loop")
        # Scale the few rows of the loop to the average image size of the slice.
        larger = 8 * own_bytes / size / (float_bytes / len(looped))
        turn["loop over transformers"] = {k: v * larger for k, v in cost.a_row(len(looped)).items()}
        turns.append(turn)
        starts.append(begun)
        print(json.dumps(turn), flush=True)
    return {
        "milliseconds_a_row": {
            name: {k: round(median([turn[name][k] for turn in turns]), 2) for k in turns[0][name]} for name in turns[0]
        },
        "seconds_to_start": {
            name: {
                k: round(median([start[name].a_row(1)[k] / 1e3 for start in starts]), 2) for k in ("wall", "processor")
            }
            for name in starts[0]
        },
        "1_worker_times_faster_than_loop": ratio(turns, "loop over transformers", "1 worker"),
        "1_worker_of_fused_path": ratio(turns, FUSED, "1 worker"),
        "1_worker_of_fused_path_with_files": ratio(turns, FUSED_WITH_FILES, "1 worker"),
        "2_workers_times_1_worker": ratio(turns, "1 worker", "2 workers")["wall"],
        "bytes_on_disk": disk,
        "of_them_blocks": blocks,
        "bytes_of_float32_patches": 8 * patches,
        "times_smaller_than_float32_patches": round(8 * patches / disk, 2),
    }


def ratio(turns: Sequence[Mapping[str, Mapping[str, float]]], slow: str, fast: str) -> dict[str, float]:
    """Return the median over the slices of the ratio between two variants."""
    return {
        clock: round(median([turn[slow][clock] / turn[fast][clock] for turn in turns]), 3)
        for clock in ("wall", "processor")
    }


def patch_bytes(run: Path) -> int:
    """Return the size of the uint8 patches in the blocks, which do not contain the repeated frame."""
    tables = [pq.read_table(path, columns=["arrays"]) for path in sorted(run.glob("*.parquet"))]
    arrays = [array for table in tables for items in table["arrays"].to_pylist() for item in items for array in item]
    return sum(math.prod(array["shape"]) for array in arrays if array["dtype"] == "uint8")


def ray(folder: Path, checkpoint: Path, images: Path) -> dict[str, Any]:
    """Return wall milliseconds per row with two actors or workers, from the difference of a long and a short run."""
    files = {count: rows(images, folder / f"{count}.jsonl", range(count)) for count in (FEW_ROWS, RAY_ROWS, OUR_ROWS)}
    out = folder / "ray"
    out.mkdir()
    turns = [files[count] for count in (FEW_ROWS, FEW_ROWS, RAY_ROWS)]  # the first run is a warm-up
    command = [sys.executable, "-m", "bench.batch.on_ray", *map(str, (checkpoint, out, 2, *turns))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    _, short, long = json.loads(done.stdout.splitlines()[-1])
    theirs = (long - short) / (RAY_ROWS - FEW_ROWS)
    ours: dict[str, float] = {}
    for name, options in (("ours on Ray", ("--ray",)), ("ours without Ray", ())):
        costs = []
        for count in (FEW_ROWS, OUR_ROWS):
            costs.append(tokenize(files[count], checkpoint, folder / "ours", 2, "--shard-rows", "16", *options).wall_s)
            shutil.rmtree(folder / "ours")
        ours[name] = (costs[1] - costs[0]) / (OUR_ROWS - FEW_ROWS)
    return {
        "rows": {"Ray Data with transformers": RAY_ROWS, "ours": OUR_ROWS},
        "milliseconds_a_row": {
            name: round(1e3 * value, 2) for name, value in {"Ray Data with transformers": theirs, **ours}.items()
        },
        "times_faster": {name: round(theirs / value, 2) for name, value in ours.items()},
    }


def footprint(folder: Path, checkpoint: Path, images: Path, count: int) -> dict[str, Any]:
    """Return the peak memory of all processes of a run with two workers, and plot the memory over time."""
    lines = rows(images, folder / "small.jsonl", range(count), small_but_each=(SMALL_PIXELS, LARGE_EACH))
    seconds, samples = memory.run(lines, checkpoint, folder / "small", 2)
    manifest = Manifest.read(folder / "small")
    shutil.rmtree(folder / "small")
    largest = 3 * SIDES[1] ** 2
    limit, peak = MEMORY_LIMIT + 2 * largest, max(samples, key=lambda sample: sample.pss_bytes)
    title = f"mindie-mm tokenize, 2 workers, {count} rows, {manifest.num_bytes / 1e9:.1f} GB of blocks"
    plot("batch_memory", lambda axes: memory.draw(axes, samples, limit, title))
    return {
        "rows": count,
        "errors": manifest.num_errors,
        "seconds": round(seconds, 1),
        "peak_bytes": peak.pss_bytes,
        "peak_bytes_without_pages_of_files": max(sample.anonymous_bytes for sample in samples),
        "peak_at_s": round(peak.at_s, 1),
        "limit_bytes": round(limit),
        "processes": max(sample.processes for sample in samples),
    }


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = ["# Offline tokenization", ""]
    if "speed" in figures:
        section = figures["speed"]
        lines += ["| | ms per row, wall time | processor time |", "|---|---|---|"]
        lines += [
            f"| {name} | {ms['wall']} | {ms['processor']} |" for name, ms in section["milliseconds_a_row"].items()
        ]
        names = (
            "1_worker_times_faster_than_loop",
            "1_worker_of_fused_path",
            "1_worker_of_fused_path_with_files",
        )
        lines += ["", "| | wall time | processor time |", "|---|---|---|"]
        lines += [
            f"| {name.replace('_', ' ')} | {section[name]['wall']} | {section[name]['processor']} |" for name in names
        ]
        lines += [f"| 2 workers, times 1 worker | {section['2_workers_times_1_worker']} | |", ""]
        lines += [
            f"Arrays on disk are {section['times_smaller_than_float32_patches']} times smaller than float32 patches.",
            "",
        ]
    if "ray" in figures:
        section = figures["ray"]
        lines += ["| two actors or workers | ms per row |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in section["milliseconds_a_row"].items()] + [""]
    if "memory" in figures:
        section = figures["memory"]
        megabytes = (
            f"{section['peak_bytes'] / 1e6:.0f} MB in all processes (limit: {section['limit_bytes'] / 1e6:.0f} MB)"
        )
        lines += [f"{section['rows']} rows with 2 workers: at most {megabytes}, in {section['seconds']} s.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)  # arguments of bench/__main__.py
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--rows", type=int, default=ROWS, help="number of rows of the run whose memory is measured")
    parser.add_argument(
        "--only", choices=MEASURES, help="measure only this; the other figures in bench/results are kept"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = image_folder(options.images)
    figures: dict[str, Any] = {
        "images": options.images,
        "bytes_of_jpegs": sum(file.stat().st_size for file in images.glob("*.jpg")),
    }
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "checkpoint")
        measures = {
            "speed": lambda: speed(folder, checkpoint, images, options.images),
            "ray": lambda: ray(folder, checkpoint, images),
            "memory": lambda: footprint(folder, checkpoint, images, options.rows),
        }
        for measure in (options.only,) if options.only else MEASURES:
            figures[measure] = measures[measure]()
            print(measure, json.dumps(figures[measure]), flush=True)
    if options.only and (kept := RESULTS / "batch.json").exists():
        figures = {
            key: value for key, value in json.loads(kept.read_text(encoding="utf-8")).items() if key != "machine"
        } | figures
    write("batch", figures)
    (RESULTS / "batch.md").write_text(table(figures), encoding="utf-8")
