"""Functions that run mindie-mm commands as a shell would."""

import os
import subprocess
import sys
from pathlib import Path

from tests import warm

BIN = Path(sys.executable).parent / "mindie-mm"
TIMEOUT_S = 300


def run(*arguments, status=0, **environment):
    """Run a mindie-mm command, which must exit with `status`.

    Return its standard output if `status` is 0, else its standard error.
    """
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [BIN, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    return output_of(ended, status)


def run_warm(*arguments, status=0, **environment):
    """Run a command as `run` does, but in a copy of a process that has already imported all modules."""
    env = os.environ | {"COLUMNS": "200"} | environment
    return output_of(warm.run([BIN, *arguments], timeout=TIMEOUT_S, env=env), status)


def output_of(ended, status):
    """Assert that the command exited with `status`.

    Return its standard output if `status` is 0. Otherwise, return its standard error, or its standard output if it
    wrote no errors.
    """
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return ended.stdout if status == 0 else ended.stderr or ended.stdout
