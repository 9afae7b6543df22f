"""Run a module with a simulated NPU. `python -m tests.ascend MODULE ARGS...` replaces `python -m MODULE ARGS...`."""

from __future__ import annotations

import argparse
import os
import sys

from tests.ascend.environment import environment
from tools.arguments import parser

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("module", metavar="MODULE")
    options.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the module")
    given = options.parse_args()
    os.execve(sys.executable, [sys.executable, "-m", given.module, *given.arguments], environment())
