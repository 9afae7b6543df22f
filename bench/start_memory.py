"""Memory of the largest step beside other programs.

An engine computes this figure when it starts. Seven busy loops and a program that takes and frees 2 GiB each second
must not change it. Each start is a process that is forked after the imports, as in a service.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.report import write
from mindie_mm.device.cpu import CPU
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

STARTS = 10
LOOP = "while True: pass"
TAKER = """
import time
while True:
    taken = bytearray(2 << 30)
    taken[::4096] = b"x" * len(taken[::4096])
    del taken
    time.sleep(1)
"""


def step_bytes(path: Path | None) -> int:
    """Load a checkpoint, and return the memory of its largest step in bytes."""
    checkpoint = Checkpoint.open(path)
    family = family_of(checkpoint)
    model = load_model(checkpoint.path, device="cpu")
    worst = WorstCase(model, family.processor(checkpoint), CPU(), EngineConfig(device="cpu"))
    return worst.step(family.kinds).num_bytes


def started(path: Path | None) -> int:
    """Return the result of `step_bytes` in a new process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(step_bytes, (path,))


def main() -> None:
    """Measure both checkpoints."""
    parser(__doc__).parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        big = write_checkpoint(Path(folder) / "big", "big")
        for name, path in (("embedded", None), ("447 million parameters", big)):
            quiet = started(path)
            with ExitStack() as programs:
                for text in [LOOP] * 7 + [TAKER]:
                    program = programs.enter_context(subprocess.Popen([sys.executable, "-c", text]))
                    programs.callback(program.kill)
                busy = [started(path) for _ in range(STARTS)]
            figures[name] = {"quiet_bytes": quiet, "busy_bytes": busy, "largest_ratio": max(busy) / quiet}
            print(name, figures[name], flush=True)
    write("start_memory", figures)


if __name__ == "__main__":
    main()
