"""Memory of the largest step beside other programs: `python -m bench.start_memory OUT`.

The engine computes this figure when it starts. Seven busy loops and a program that takes and frees 2 GiB each second
must not change it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

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
START = """
import sys
from mindie_mm.device.cpu import CPU
from mindie_mm.engine.process.memory_profile import WorstCase
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig

checkpoint = Checkpoint.open(sys.argv[1] or None)
family, model = family_of(checkpoint), load_model(checkpoint.path, device="cpu")
config = EngineConfig(device="cpu")
print(WorstCase(model, family.processor(checkpoint), CPU(), config).step(family.kinds).num_bytes)
"""


def started(path: str) -> int:
    """Load a checkpoint in a new process, and return the memory of its largest step in bytes."""
    done = subprocess.run([sys.executable, "-c", START, path], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        big = str(write_checkpoint(Path(folder) / "big", "big"))
        results = {}
        for name, path, starts in (("embedded", "", STARTS), ("447 million parameters", big, STARTS)):
            quiet = started(path)
            with ExitStack() as programs:
                for text in [LOOP] * 7 + [TAKER]:
                    program = programs.enter_context(subprocess.Popen([sys.executable, "-c", text]))
                    programs.callback(program.kill)
                busy = [started(path) for _ in range(starts)]
            results[name] = {"quiet_bytes": quiet, "busy_bytes": busy, "largest_ratio": max(busy) / quiet}
            print(name, results[name], flush=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
