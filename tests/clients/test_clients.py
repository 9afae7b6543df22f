"""Tests with real clients of OpenAI's API. `make test-clients` installs the clients into separate environments.

A script contains the scenarios of one client. The script runs once, and each of its scenarios is a test.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.serving import RunningService

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / "build/clients"
SCRIPT_TIMEOUT_S = 500
SCENARIO = re.compile(r'^(?:(?:async )?def ([a-z]\w*)\(\)|await scenario\("(\w+)")', re.MULTILINE)
"""The beginning of a scenario, in Python and in JavaScript."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SCRIPT_TIMEOUT_S + 60)]


def cases() -> list[object]:
    """Return the scenarios of all scripts. Scenarios of clients that are not installed are skipped."""
    made: list[object] = []
    for script in sorted(path for path in HERE.glob("*/*") if path.suffix in {".py", ".mjs"}):
        environment = INSTALLED / script.parent.name
        skip = pytest.mark.skipif(
            not (environment / "installed").exists(),
            reason=f"{environment} is not installed: `make test-clients` installs it",
        )
        for groups in SCENARIO.findall(script.read_text(encoding="utf-8")):
            scenario = "".join(groups)
            made.append(pytest.param(script, scenario, id=f"{script.name}-{scenario}", marks=skip))
    return made


def command(script: Path) -> list[str]:
    """Return the command of a script in its client's environment."""
    environment = INSTALLED / script.parent.name
    if script.suffix == ".py":
        # Without -P, Python would import a script in place of the client's module of the same name.
        return [str(environment / "bin/python"), "-P", str(script)]
    for module in script.parent.glob("*.mjs"):
        shutil.copy(module, environment)  # Node searches for packages in the module's folder
    return ["node", str(environment / script.name)]


@functools.cache
def outcomes(script: Path, url: str, media: Path) -> tuple[dict[str, str | None], str]:
    """Run a script.

    Return the error of each scenario that has ended, and how the script ended. If a scenario passed, its error is
    None.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    given = [*command(script), url, str(media)]
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept | {"PYTHONPATH": str(HERE)}
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=SCRIPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
    lines = [json.loads(line) for line in stdout.splitlines()]
    return {line["scenario"]: line["error"] for line in lines}, f"exit status {process.returncode}: {stderr[-4000:]}"


@pytest.mark.parametrize(("script", "scenario"), cases())
def test_a_client(service: RunningService, media: Path, script: Path, scenario: str) -> None:
    errors, end = outcomes(script, service.url, media)
    error = errors.get(scenario, f"the scenario has not ended; the script has, with {end}")
    if error is not None:
        pytest.fail(error, pytrace=False)
