"""Tests for .github/workflows/ci.yml: GitHub's schema of workflows, and the versions in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github/workflows/ci.yml"
JOBS: dict[str, Any] = yaml.safe_load(FILE.read_text())["jobs"]


def validate(file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.github-workflows"]
    return subprocess.run([*command, str(file)], capture_output=True, text=True, check=False, timeout=300)


def test_the_workflow_is_valid_by_the_schema() -> None:
    result = validate(FILE)
    assert result.returncode == 0, result.stdout


def test_the_schema_refuses_a_misspelt_key(tmp_path: Path) -> None:
    bad = tmp_path / "ci.yml"
    bad.write_text(FILE.read_text().replace("runs-on:", "run-on:"))
    assert validate(bad).returncode == 1


def test_every_supported_python_runs_the_checks_on_both_processors() -> None:
    matrix = JOBS["checks"]["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = SpecifierSet(project["requires-python"])
    assert matrix["python"] == [version for version in (f"3.{minor}" for minor in range(15)) if version in supported]
    assert {"run": ".ci/run"} in JOBS["checks"]["steps"]


def test_the_whole_suite_runs_at_night_with_the_lowest_and_the_newest_versions() -> None:
    rows = JOBS["nightly"]["strategy"]["matrix"]["include"]
    assert {row["versions"]: row.get("resolution") for row in rows} == {
        "pinned": None,
        "lowest": "lowest-direct",
        "newest": "highest",
    }
    assert {"run": "make test-all"} in JOBS["nightly"]["steps"]
