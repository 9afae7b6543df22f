"""Tests that the number of files and functions that a request enters does not grow.

The counts over HTTP vary by a file and a few functions, with the timing of threads and the kernels of the processor. If
a change lowers a count, lower its ceiling.
"""

import re
import subprocess
import sys

import pytest

from tools import trace_request


def require_at_most(files: int, functions: int, printed: str) -> None:
    counts = re.fullmatch(r"(\d+) files, (\d+) functions, \d+ calls", printed.splitlines()[-1])
    assert counts is not None
    assert (int(counts[1]) <= files, int(counts[2]) <= functions) == (True, True), counts[0]


def test_a_request_enters_few_files_and_functions(capsys):
    """The trace runs in this process, because a new process would import torch for seconds."""
    trace_request.main()
    require_at_most(79, 436, capsys.readouterr().out)


@pytest.mark.slow
def test_a_request_over_http_enters_few_files_and_functions():
    command = [sys.executable, "-m", "tools.trace_http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    require_at_most(127, 718, done.stdout)
