"""The command line as a shell runs it."""

import os
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent / "mindie-mm"


def run(*arguments, status=0, **environment):
    """What the command says: on standard output, or if it is to fail on standard error."""
    ended = subprocess.run(
        [BIN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )
    assert ended.returncode == status, (ended.stdout, ended.stderr)
    return ended.stdout if status == 0 else ended.stderr or ended.stdout
