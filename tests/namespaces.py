"""Namespaces that tests run commands in.

Root may make any; another user those inside a user namespace of theirs, where the kernel permits that.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

UNSHARE = ("unshare",) if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user")
FULL_SHM = (*UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$@"', "sh")


def require(prefix: tuple[str, ...]) -> None:
    """Skip the test where `prefix` may not run a command, as in most containers."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"{' '.join(prefix)} is not permitted: {tried.stderr.strip()}")
