"""The interface's description is true: schemathesis asks after it and believes it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.serving import RunningService

ROUTES = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/infer",
    "/generate",
    "/generate_stream",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/metrics",
    "/shm",
}


def test_every_route_is_described(http: Any) -> None:
    described = http.get("/openapi.json").json()
    assert set(described["paths"]) >= ROUTES
    for operations in described["paths"].values():
        for operation in operations.values():
            assert operation["description"]
            assert "422" not in operation["responses"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_schemathesis(service: RunningService, http: Any, tmp_path: Path) -> None:
    """Wrong requests are refused, no request is a 5xx, statuses, types and bodies are those described.

    Not asked: that every request of the described form is answered. Limits that join several fields are in no schema.
    """
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            "run",
            f"{service.url}/openapi.json",
            *("--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1"),
            *("--exclude-checks", "positive_data_acceptance", "--request-timeout", "60", "--no-color"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=170,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-1000:]
    assert http.get("/health").status_code == 200
    assert service.wait_until_free()["blocks"] == 0
