"""Redirects and names that lead inside, on a network where the first address really is a public one."""

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
def found() -> dict[str, str]:
    """What each case came to."""
    if shutil.which("ip") is None:
        pytest.skip("the ip command is missing")
    require(OTHER_NETWORK)
    command = [*OTHER_NETWORK, sys.executable, "-m", "tests.attacks.hostile_net"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers: dict[str, str] = json.loads(ran.stdout)
    return answers


@pytest.mark.parametrize("case", CASES)
def test_what_a_redirect_or_a_name_leads_to(found: dict[str, str], case: str) -> None:
    assert "SECRET" not in found[case]
    if case.startswith("public"):
        assert found[case] == "media"
    elif case != "rebinding":  # its first answer is public
        assert found[case].startswith("refused: ")


def test_a_name_that_turns_is_never_followed_inside(found: dict[str, str]) -> None:
    assert found["rebinding"] == "media"
    assert sorted(set(found["rebinding again"])) == ["media", "refused"]
