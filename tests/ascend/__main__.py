"""Run a module with a simulated NPU. `python -m tests.ascend MODULE ARGS...` replaces `python -m MODULE ARGS...`."""

from __future__ import annotations

import os
import sys

from tests.ascend.environment import environment

if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], environment())
