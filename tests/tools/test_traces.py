"""Tests that the number of files and functions that a request enters does not grow.

The counts over HTTP vary by a file and a few functions, with the timing of threads and the kernels of the processor. If
a change lowers a count, lower its ceiling.
"""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "files", "functions"),
    [("trace_request", 79, 436), pytest.param("trace_http", 127, 718, marks=pytest.mark.slow)],
)
def test_a_request_enters_few_files_and_functions(module, files, functions):
    command = [sys.executable, "-m", f"tools.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    counts = re.fullmatch(r"(\d+) files, (\d+) functions, \d+ calls", done.stdout.splitlines()[-1])
    assert counts is not None
    assert (int(counts[1]) <= files, int(counts[2]) <= functions) == (True, True), counts[0]
