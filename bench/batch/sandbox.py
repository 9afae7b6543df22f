"""Benchmark of `mindie-mm tokenize --sandbox`, compared with workers that decode media themselves.

One worker of each kind tokenizes the same rows in turn, with one JPEG of 640x480 pixels each and the embedded
checkpoint. Results are medians over the turns. Processor time includes all processes. Starting the workers is not
measured.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from pathlib import Path

import psutil

from bench.report import median, write
from mindie_mm.batch.input.gather import gather
from mindie_mm.batch.input.source import chunks
from mindie_mm.batch.settings import Run, Settings
from mindie_mm.batch.stage import Stage
from tests.media_samples import PHOTOGRAPHS, encoded, photograph
from tools.arguments import parser

SIZE = (640, 480)
NUM_ROWS = 100
TURNS = 40


def rows(folder: Path) -> Path:
    """Write images, and the rows that ask about them. Return the path of the rows."""
    lines = []
    for row in range(NUM_ROWS):
        image = photograph(PHOTOGRAPHS[row % len(PHOTOGRAPHS)], SIZE)
        (folder / f"{row}.jpg").write_bytes(encoded(image, quality=85 + row % 10))
        lines.append(json.dumps({"inputs": [{"image": f"{row}.jpg"}, {"text": "What is in this image?"}]}) + "\n")
    path = folder / "rows.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def stage(settings: Settings, folder: Path, *, sandbox: bool) -> Stage:
    """Begin a run in `folder`, and return its stage."""
    folder.mkdir()
    gather(settings.inputs, folder, settings.template, io.BytesIO())
    run = Run.of(settings, folder)
    run.begin(folder)
    return Stage(run, folder, sandbox=sandbox)


def processor_s() -> float:
    """Return the processor time of this process and its descendants in seconds."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(one.user + one.system for one in times)


def main() -> None:
    parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        settings = Settings(model="", inputs=(str(rows(here)),), shard_rows=NUM_ROWS)
        chunk = next(chunks(settings.sources(here), NUM_ROWS, None))
        stages = {name: stage(settings, here / name, sandbox=name == "sandbox") for name in ("no sandbox", "sandbox")}
        costs: dict[str, list[tuple[float, float]]] = {name: [] for name in stages}
        for turn in range(TURNS + 1):
            for name, one in stages.items():
                for left in (here / name).glob("shard-*"):
                    left.unlink()
                used_s, began_s = processor_s(), time.perf_counter()
                for _ in one.run(chunk, {}):
                    pass
                if turn:  # the first turn is a warm-up
                    costs[name].append((processor_s() - used_s, time.perf_counter() - began_s))
    figures = {
        name: {
            "processor ms per row": round(1e3 * median([used for used, _ in each]) / NUM_ROWS, 2),
            "rows per second": round(NUM_ROWS / median([wall for _, wall in each])),
        }
        for name, each in costs.items()
    }
    ratios = [with_[0] / without[0] for without, with_ in zip(*costs.values(), strict=True)]
    write("batch_sandbox", figures | {"ratio of processor time": round(median(ratios), 2)})


if __name__ == "__main__":
    main()
