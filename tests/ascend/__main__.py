"""`python -m tests.ascend MODULE ARGS...`: `python -m MODULE ARGS...` where the simulated NPU is seen."""

from __future__ import annotations

import os
import sys

from tests.ascend.environment import environment

if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], environment())
