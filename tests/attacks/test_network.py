"""Attacks with redirects and names that lead to private addresses, in a network namespace with public addresses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.hostile_net import CASES
from tests.namespaces import UNSHARE, require

ROOT = Path(__file__).parents[2]
OTHER_NETWORK = (*UNSHARE, "--net")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Run `tests.attacks.hostile_net` in a network namespace, and return the outcome of each case."""
    if shutil.which("ip") is None:
        pytest.skip("the ip command is missing")
    require(OTHER_NETWORK)
    command = [*OTHER_NETWORK, sys.executable, "-m", "tests.attacks.hostile_net"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers: dict[str, str] = json.loads(ran.stdout)
    return answers


@pytest.mark.parametrize("case", CASES)
def test_redirects_and_names_that_lead_to_private_addresses_are_refused(outcomes: dict[str, str], case: str) -> None:
    assert "SECRET" not in outcomes[case]
    if case.startswith("public"):
        assert outcomes[case] == "media"
    elif case != "rebinding":  # the name first has its public address
        assert outcomes[case].startswith("refused: ")


def test_a_rebinding_name_never_leads_to_a_private_address(outcomes: dict[str, str]) -> None:
    assert outcomes["rebinding"] == "media"
    assert sorted(set(outcomes["rebinding again"])) == ["media", "refused"]
