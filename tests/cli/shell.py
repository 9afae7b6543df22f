"""Helpers that run the command line as a shell does."""

import os
import subprocess
import sys
from pathlib import Path

from tests import warm

BIN = Path(sys.executable).parent / "mindie-mm"
TIMEOUT_S = 300


def run(*arguments, status=0, **environment):
    """Run a command and return its standard output, or its standard error if it should fail."""
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [BIN, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    return output_of(ended, status)


def run_warm(*arguments, status=0, **environment):
    """Run a command like `run`, but in a copy of a process that has imported everything."""
    env = os.environ | {"COLUMNS": "200"} | environment
    return output_of(warm.run([BIN, *arguments], timeout=TIMEOUT_S, env=env), status)


def output_of(ended, status):
    """Require the exit status and return the matching output."""
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return ended.stdout if status == 0 else ended.stderr or ended.stdout
