"""Programs that query the driver and may therefore hang."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status and output of a program."""

    status: int
    """Exit status. A negative value is the number of the signal that ended the program."""
    stdout: str
    stderr: str


def output_of(name: str, *arguments: str, path: str | None = None, timeout_s: float = 5.0) -> str:
    """Return what a program prints, or an empty text if there is no such program or it does not end in time.

    `path` replaces the variable PATH.
    """
    program = shutil.which(name, path=path)
    try:
        ended = run([program, *arguments], timeout_s) if program else None
    except OSError:  # the program is for another architecture, or its loader is missing
        return ""
    return ended.stdout if ended else ""


def run(command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Ended | None:
    """Run a program. Return its output, or None if it does not end in time. Raise OSError if it cannot run.

    The default of `environment` is that of this process.
    """
    process = subprocess.Popen(  # noqa: S603 - the callers' own commands
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environment,
    )
    with process.stdout, process.stderr:  # type: ignore[union-attr]  # they are pipes
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a process that waits in the driver cannot be killed
                process.wait(1)
            return None
    return Ended(process.returncode, stdout, stderr)
