"""`python -m tests.fuzz`: fuzz every target, each in a separate process."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys


def main() -> int:
    """Run the command. Return the number of targets with findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="all of them by default")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each target; of slow ones a tenth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without atheris, even if it is installed")
    parser.add_argument("--here", action="store_true", help="one target, in this process")
    options = parser.parse_args()
    guided = not options.plain and importlib.util.find_spec("atheris") is not None
    if options.here:
        return _run_here(options.targets[0], options.inputs, options.seed, guided)
    from tests.fuzz.runner import SLOW, TARGETS

    command = [sys.executable, "-m", "tests.fuzz", "--here", f"--seed={options.seed}", *["--plain"] * (not guided)]
    counts = {name: max(1, options.inputs // SLOW.get(name, 1)) for name in options.targets or TARGETS}
    failed = [name for name, count in counts.items() if not _run_apart([*command, f"--inputs={count}", name])]
    print(f"found something in: {', '.join(failed)}" if failed else "nothing found")
    return len(failed)


def _run_apart(command: list[str]) -> bool:
    """Run a target in a separate process. Return whether it has no finding, and otherwise print the fuzzer's output."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr[-4000:], flush=True)
    return done.returncode == 0


def _run_here(name: str, inputs: int, seed: int, guided: bool) -> int:
    if guided:
        import atheris

        with atheris.instrument_imports(include=["mindie_mm.shm"]):
            from tests.fuzz.runner import run_guided
        run_guided(name, inputs, seed)  # this call ends the process
    from tests.fuzz.runner import run, say

    say(name, run(name, inputs, seed), "seeded mutation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
