"""Offline tokenization beside `datasets.map` with transformers' processors, per core: `python -m bench.batch.maps`.

One worker with one thread runs beside one process with one thread, on the same files, alternately. The environment of
`datasets.map` contains torchvision, which this project's environment does not, and is installed into build/bench-maps.
The start of a process is not measured: `datasets.map` is timed after its imports and a warm-up, and the time of a run
of two rows is subtracted from ours.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.batch import memory
from bench.batch.contestants import tokenize
from bench.report import RESULTS, median, write
from mindie_mm.batch import Dataset
from tests.media_samples import encode_video, encoded, photograph
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

FOLDER = Path(__file__).parents[2] / "build" / "bench-maps"
PYTHON = FOLDER / "venv" / "bin" / "python"
TORCH = ("torch==2.13.0", "torchvision==0.28.0")
SAME = ("transformers", "tokenizers", "pillow", "av", "numpy", "pyarrow")
"""Packages of which both environments have the same version."""
TURNS = 5
MORE = 10
"""Our rows per row of `datasets.map`, so that the start, which is subtracted, takes little of the time."""
FAST, PILLOW = "datasets.map, fast processor", "datasets.map, Pillow"
OURS = "mindie-mm tokenize"
QUESTION = "What is in this picture, and where in the picture is it?"
PARAGRAPH = "The coffee stands on a wooden table beside a spoon, and the light falls on it from the left. "


def install() -> None:
    """Create the environment of `datasets.map` if it does not exist."""
    if not PYTHON.exists():
        venv.create(FOLDER / "venv", with_pip=True)
    same = [f"{name}=={importlib.metadata.version(name)}" for name in SAME]
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *TORCH, *same, "datasets"]
    subprocess.run(command, check=True)


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
    "images of 640x480": (images(640, 480), 200),
    "images of 1420x720": (images(1420, 720), 80),
    "videos of 480x360, 4 s": (videos, 40),
    "texts of 380 words": (texts, 2000),
}
"""The rows of each input, and their number for `datasets.map`."""


def mapped(rows: Path, checkpoint: Path, backend: str, out: Path) -> dict[str, Any]:
    """Run `datasets.map` on the rows, and return its figures."""
    script = Path(__file__).with_name("datasets_map.py")
    command = [*map(str, (PYTHON, script, checkpoint, rows)), backend, str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    out.unlink()
    return found


def ours(rows: Path, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Run `mindie-mm tokenize` with one worker on the rows, and return its figures for one in `MORE` of them."""
    few, whole = folder / "few", folder / "whole"
    start = tokenize(rows, checkpoint, few, 1, "--limit", "2")
    cost = tokenize(rows, checkpoint, whole, 1) - start
    dataset = Dataset(whole)
    found = {
        "tokens": sum(len(ids) for number in range(4) if (ids := dataset[number].ids) is not None),
        "wall_s": cost.wall_s / MORE,
        "cpu_s": cost.cpu_s / MORE,
        "bytes": sum(file.stat().st_size for file in whole.iterdir()) / MORE,
    }
    shutil.rmtree(few)
    shutil.rmtree(whole)
    return found


def measure(folder: Path, checkpoint: Path, name: str) -> dict[str, Any]:
    """Return the figures of each variant for one input."""
    make, count = INPUTS[name]
    (folder / "media").mkdir()
    lines = []
    for number, item in enumerate(make(folder / "media", MORE * count)):
        question = [] if "text" in item else [{"text": QUESTION}]
        lines.append(json.dumps({"id": str(number), "inputs": [item, *question]}) + "\n")
    rows, more = folder / "rows.jsonl", folder / "more.jsonl"
    rows.write_text("".join(lines[:count]), encoding="utf-8")
    more.write_text("".join(lines), encoding="utf-8")
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        OURS: lambda: ours(more, checkpoint, folder),
        FAST: lambda: mapped(rows, checkpoint, "torchvision", folder / "map.arrow"),
    }
    if name.startswith("images"):
        variants[PILLOW] = lambda: mapped(rows, checkpoint, "pil", folder / "map.arrow")
    turns = [{variant: run() for variant, run in variants.items()} for _ in range(TURNS)]
    if len({turn[variant]["tokens"] for turn in turns for variant in variants}) != 1:
        raise RuntimeError(f"{name}: the variants have different token ids")
    _, samples = memory.run(more, checkpoint, folder / "memory", 1)
    shutil.rmtree(folder / "memory")
    shutil.rmtree(folder / "media")
    peaks = {
        variant: median([turn[variant]["peak_bytes"] for turn in turns]) for variant in variants if variant != OURS
    }
    peaks[OURS] = max(sample.pss_bytes for sample in samples)
    return {
        "rows": count,
        "rows_a_second_of_processor_time": {
            variant: round(count / median([turn[variant]["cpu_s"] for turn in turns]), 2) for variant in variants
        },
        "rows_a_second": {
            variant: round(count / median([turn[variant]["wall_s"] for turn in turns]), 2) for variant in variants
        },
        "times_faster": {
            variant: {
                clock: round(median([turn[variant][clock] / turn[OURS][clock] for turn in turns]), 2)
                for clock in ("wall_s", "cpu_s")
            }
            for variant in variants
            if variant != OURS
        },
        "bytes_a_row": {variant: round(turns[0][variant]["bytes"] / count) for variant in variants},
        "peak_bytes": peaks,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# Offline tokenization beside datasets.map",
        "",
        "Rows per second of one core, by processor time, and in brackets how many times ours is faster.",
        "",
        f"| input | {OURS} | {FAST} | {PILLOW} | bytes a row, ours | theirs |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in figures.items():
        rates, ratios = found["rows_a_second_of_processor_time"], found["times_faster"]
        theirs = [
            f"{rates[variant]} ({ratios[variant]['cpu_s']})" if variant in ratios else "-" for variant in (FAST, PILLOW)
        ]
        sizes = found["bytes_a_row"]
        lines.append(f"| {name} | {rates[OURS]} | {' | '.join(theirs)} | {sizes[OURS]} | {sizes[FAST]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=INPUTS, help="measure only this input")
    given = options.parse_args()
    install()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder / "checkpoint")
        for inputs in (given.only,) if given.only else INPUTS:
            figures[inputs] = measure(folder, checkpoint, inputs)
            print(inputs, json.dumps(figures[inputs]), flush=True)
    if not given.only:
        write("batch_maps", figures)
        (RESULTS / "batch_maps.md").write_text(table(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
