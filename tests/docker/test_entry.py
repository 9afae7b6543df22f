"""Tests for the images' entry point, health check and probes. They run on this machine with the embedded checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.docker.dockerfile import FOLDER, healthcheck, last_stage, of, pairs, read
from tests.docker.image import free_port, ready
from tests.docker.settings import nbytes
from tests.docker.test_compose import FOUND, plain

pytestmark = pytest.mark.slow

LAST = last_stage(read("cpu"))
DEFAULT_SHM_BYTES = 64 * 2**20
"""Size of /dev/shm that Docker uses by default."""


def environment(port: int) -> dict[str, str]:
    """Return the image's environment variables, but with this environment's programs and a loopback address."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = pairs(of(LAST, "ENV")[0].value, {"PATH": programs})
    here = {"MINDIE_MM_HOST": "127.0.0.1", "MINDIE_MM_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return env | {"PATH": programs, "MINDIE_MM_MEASURE_S": "0"} | here


def is_healthy(env: dict[str, str]) -> bool:
    return subprocess.run(healthcheck(LAST), env=env, capture_output=True, check=False, timeout=300).returncode == 0


def probes() -> set[str]:
    """Return the paths that Kubernetes and Prometheus request."""
    template = (FOLDER / "helm/templates/deployment.yaml").read_text()
    return set(re.findall(r"^ *(?:prometheus\.io/)?path: (/(?:health|metrics)[a-z/]*)$", template, re.MULTILINE))


def test_the_entry_point_serves_becomes_healthy_and_stops(tmp_path: Path) -> None:
    env = environment(free_port()) | {"MINDIE_MM_API_KEY": "a-key", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    assert not is_healthy(env)
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            of(LAST, "ENTRYPOINT")[0].argv, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        with httpx2.Client(base_url=ready(process, log), timeout=300) as http:
            assert is_healthy(env)
            assert {path: http.get(path).status_code for path in probes()} == dict.fromkeys(probes(), 200)
            assert http.get("/shm").status_code == 401, "all else asks for the key"
            shm = http.get("/shm", headers={"authorization": "Bearer a-key"}).json()
        reserved = sum(Path("/dev/shm", arena["name"]).stat().st_size for arena in shm["arenas"])
        assert DEFAULT_SHM_BYTES < reserved < nbytes(plain(FOUND["services"]["cpu"]["shm_size"]))
    finally:
        process.terminate()
        status = process.wait(300)
        assert process.stdout is not None
        process.stdout.close()
    assert status == 0, log.read_text()[-2000:]
    assert not is_healthy(env)
