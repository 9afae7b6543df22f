"""Tests that the service's main process does not import heavy libraries.

Without torch and the decoding libraries, the process starts seconds earlier. A crash of such a library can then end
only a child process.
"""

import subprocess
import sys

HEAVY = {"torch", "transformers", "av", "PIL", "soxr", "simplejpeg", "pyarrow"}


def test_the_service_loads_nothing_heavy() -> None:
    script = f"import sys, service.app, service.server; print(*sorted({HEAVY} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert not found.stdout.split()
