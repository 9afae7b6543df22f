"""Linux namespaces for commands that tests run.

Root may create any namespace. Other users need a user namespace, which the kernel may forbid.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

UNSHARE = ("unshare",) if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user")
FULL_SHM = (*UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$@"', "sh")


def require(prefix: tuple[str, ...]) -> None:
    """Skip the test if `prefix` cannot run a command. Most containers forbid it."""
    if shutil.which("unshare") is None:
        pytest.skip("the program unshare is not installed")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"{' '.join(prefix)} is not permitted: {tried.stderr.strip()}")
