"""The command line as a shell runs it."""

import os
import subprocess
import sys
from pathlib import Path

from tests import warm

BIN = Path(sys.executable).parent / "mindie-mm"
TIMEOUT_S = 300


def run(*arguments, status=0, **environment):
    """What the command says: on standard output, or if it is to fail on standard error."""
    env = os.environ | {"COLUMNS": "200"} | environment
    command = [BIN, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    return said(ended, status)


def run_warm(*arguments, status=0, **environment):
    """As `run`, in copies of a process that has imported everything."""
    env = os.environ | {"COLUMNS": "200"} | environment
    return said(warm.run([BIN, *arguments], timeout=TIMEOUT_S, env=env), status)


def said(ended, status):
    """What is expected of it with this exit status."""
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return ended.stdout if status == 0 else ended.stderr or ended.stdout
