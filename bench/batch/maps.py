"""Offline tokenization beside `datasets.map` and Ray Data with transformers' processors: `python -m bench.batch.maps`.

One worker with one thread runs beside one process or actor with one thread, on the same files, alternately. The
environment of the others contains torchvision, which this project's environment does not, and is installed into
build/bench-maps. The start of a process is not measured: the others are timed after their imports and a warm-up, and
the time of a run of two rows is subtracted from ours. Ray's own processes are not counted, only its actor.

The figures of each input are kept with their date and machine. Turns on the same day and machine are joined, so that a
run may take few of them (`--only`, `--turns`).
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.batch import memory
from bench.batch.contestants import tokenize
from bench.report import RESULTS, machine, median, save, saved
from mindie_mm.batch import Dataset
from tests.media_samples import encode_video, encoded, photograph
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

FOLDER = Path(__file__).parents[2] / "build" / "bench-maps"
PYTHON = FOLDER / "venv" / "bin" / "python"
TORCH = ("torch==2.13.0", "torchvision==0.28.0")
SAME = ("transformers", "tokenizers", "pillow", "av", "numpy", "pyarrow", "ray")
"""Packages that have the same version in both environments."""
TURNS = 5
MORE = 10
"""Our rows per row of the others, so that the start, which is subtracted, takes little of the time."""
FAST, PILLOW, RAY = "datasets.map, fast processor", "datasets.map, Pillow", "Ray Data, fast processor"
OURS = "mindie-mm tokenize"
QUESTION = "What is in this picture, and where in the picture is it?"
PARAGRAPH = "The coffee stands on a wooden table beside a spoon, and the light falls on it from the left. "


def install() -> None:
    """Create the environment of the others if it does not exist."""
    mark = FOLDER / "venv" / "complete"
    if mark.exists():
        return
    venv.create(FOLDER / "venv", with_pip=True)
    same = [f"{name}=={importlib.metadata.version(name)}" for name in SAME]
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *TORCH, *same, "datasets"]
    subprocess.run(command, check=True)
    mark.touch()


def images(width: int, height: int) -> Callable[[Path, int], Iterator[dict[str, Any]]]:
    def make(folder: Path, count: int) -> Iterator[dict[str, Any]]:
        image = np.asarray(photograph("astronaut.png", (width + 64, height + 64)))
        for number in range(count):
            left, top = number % 64, number // 64
            path = folder / f"{number}.jpg"
            path.write_bytes(encoded(Image.fromarray(image[top : top + height, left : left + width]), quality=90))
            yield {"image": str(path)}

    return make


def videos(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Write videos of 4 seconds, 480x360 at 24 frames per second. Each has 8 frames at 2 frames per second."""
    wide = np.asarray(photograph("coffee.png", (700, 500)))
    for number in range(count):
        frames = np.stack([wide[at : at + 360, at + number % 64 : at + number % 64 + 480] for at in range(96)])
        path = folder / f"{number}.mp4"
        path.write_bytes(encode_video(frames, 24))
        yield {"video": str(path)}


def texts(_: Path, count: int) -> Iterator[dict[str, Any]]:
    yield from ({"text": f"{number}. {PARAGRAPH * 20}"} for number in range(count))


INPUTS: dict[str, tuple[Callable[[Path, int], Iterator[dict[str, Any]]], int]] = {
    "images of 640x480": (images(640, 480), 120),
    "images of 1420x720": (images(1420, 720), 56),
    "videos of 480x360, 4 s": (videos, 32),
    "texts of 380 words": (texts, 500),
}
"""The rows of each input, and their number for the others. A turn takes about a minute."""


def mapped(rows: Path, checkpoint: Path, runner: str, backend: str, out: Path) -> dict[str, Any]:
    """Run transformers' processor on the rows, and return its figures."""
    script = Path(__file__).with_name("transformers_map.py")
    command = [*map(str, (PYTHON, script, checkpoint, rows)), runner, backend, str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with status {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return found


def ours(rows: Path, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Run `mindie-mm tokenize` with one worker on the rows, and return its figures for one in `MORE` of them."""
    few, whole, watched = folder / "few", folder / "whole", folder / "watched"
    start = tokenize(rows, checkpoint, few, 1, "--limit", "2")
    cost = tokenize(rows, checkpoint, whole, 1) - start
    _, samples = memory.run(rows, checkpoint, watched, 1)
    dataset = Dataset(whole)
    found = {
        "tokens": sum(len(ids) for number in range(4) if (ids := dataset[number].ids) is not None),
        "wall_s": cost.wall_s / MORE,
        "cpu_s": cost.cpu_s / MORE,
        "bytes": sum(file.stat().st_size for file in whole.iterdir()) / MORE,
        "peak_bytes": max(sample.pss_bytes for sample in samples),
    }
    for run in (few, whole, watched):
        shutil.rmtree(run)
    return found


def files_of(name: str) -> tuple[Path, Path]:
    """Return the rows of an input for the others, and its rows for us. Its media are kept for later runs."""
    make, count = INPUTS[name]
    folder = FOLDER / f"{name.replace(' ', '-').replace(',', '')}-{count}"
    rows, more = folder / "rows.jsonl", folder / "more.jsonl"
    if not more.exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "media").mkdir(parents=True)
        lines = []
        for number, item in enumerate(make(folder / "media", MORE * count)):
            question = [] if "text" in item else [{"text": QUESTION}]
            lines.append(json.dumps({"id": str(number), "inputs": [item, *question]}) + "\n")
        rows.write_text("".join(lines[:count]), encoding="utf-8")
        more.write_text("".join(lines), encoding="utf-8")
    return rows, more


def measure(folder: Path, checkpoint: Path, name: str, num_turns: int, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of each variant for one input. Add the turns of `kept`, its figures of an earlier call."""
    count = INPUTS[name][1]
    rows, more = files_of(name)
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        OURS: lambda: ours(more, checkpoint, folder),
        FAST: lambda: mapped(rows, checkpoint, "datasets", "torchvision", folder / "map.arrow"),
        RAY: lambda: mapped(rows, checkpoint, "ray", "torchvision", folder / "ray"),
    }
    if name.startswith("images"):
        variants[PILLOW] = lambda: mapped(rows, checkpoint, "datasets", "pil", folder / "map.arrow")
    same = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "rows": count}
    turns = kept.get("turns", []) if all(kept.get(key) == value for key, value in same.items()) else []
    turns = [*turns, *({variant: run() for variant, run in variants.items()} for _ in range(num_turns))]
    if len({turn[variant]["tokens"] for turn in turns for variant in variants}) != 1:
        raise RuntimeError(f"{name}: the variants have different token ids")
    rates = {
        clock: {variant: round(count / median([turn[variant][clock] for turn in turns]), 2) for variant in variants}
        for clock in ("wall_s", "cpu_s")
    }
    return same | {
        "rows_a_second_of_processor_time": rates["cpu_s"],
        "rows_a_second": rates["wall_s"],
        "times_faster": {
            variant: {
                clock: round(median([turn[variant][clock] / turn[OURS][clock] for turn in turns]), 2)
                for clock in ("wall_s", "cpu_s")
            }
            for variant in variants
            if variant != OURS
        },
        "bytes_a_row": {variant: round(turns[0][variant]["bytes"] / count) for variant in variants},
        "peak_bytes": {variant: median([turn[variant]["peak_bytes"] for turn in turns]) for variant in variants},
        "num_turns": len(turns),
        "turns": turns,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# Offline tokenization beside datasets.map and Ray Data",
        "",
        "Rows per second of one core, by processor time, and in brackets how many times ours is faster.",
        "",
        f"| input | {OURS} | {FAST} | {PILLOW} | {RAY} | date, processor |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in figures.items():
        rates, ratios = found["rows_a_second_of_processor_time"], found["times_faster"]
        theirs = [
            f"{rates[variant]} ({ratios[variant]['cpu_s']})" if variant in ratios else "-"
            for variant in (FAST, PILLOW, RAY)
        ]
        source = f"{found['date']}, {found['machine']['processor']}"
        lines.append(f"| {name} | {rates[OURS]} | {' | '.join(theirs)} | {source} |")
    lines += ["", "Kilobytes per row, and peak memory in MB:", "", f"| input | {OURS} | {FAST} | {RAY} |"]
    lines.append("|---|---|---|---|")
    for name, found in figures.items():
        sizes = [
            f"{found['bytes_a_row'][variant] / 1e3:.1f}, {found['peak_bytes'][variant] / 1e6:.0f}"
            for variant in (OURS, FAST, RAY)
        ]
        lines.append(f"| {name} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=INPUTS, help="measure only this input, and keep the figures of the others")
    options.add_argument("--turns", type=int, default=TURNS, help=f"number of turns, {TURNS} by default")
    options.add_argument("--prepare", action="store_true", help="write the media of the inputs, and measure nothing")
    given = options.parse_args()
    install()
    names = (given.only,) if given.only else tuple(INPUTS)
    if given.prepare:
        for name in names:
            files_of(name)
        return
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        folder = Path(temporary)
        checkpoint = write_checkpoint(folder / "checkpoint")
        for name in names:
            kept = saved("batch_maps")
            kept[name] = measure(folder, checkpoint, name, given.turns, kept.get(name, {}))
            figures = {inputs: kept[inputs] for inputs in INPUTS if inputs in kept}
            save("batch_maps", figures)
            (RESULTS / "batch_maps.md").write_text(table(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
