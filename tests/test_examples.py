"""Tests that run the commands with which the documentation begins a family."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_copy_of_the_example_under_another_name_passes_its_test(tmp_path: Path) -> None:
    guide = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```sh\n(cp -r examples/minigpt4.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    shutil.copytree(ROOT / "examples/minigpt4", tmp_path / "examples/minigpt4")
    for name in ("mindie_mm", "service", "tests", "tools", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    (shown,) = re.findall(r"^```text\n(\d+ passed, .*) in ", guide, re.MULTILINE)
    assert f"{shown} in " in ended.stdout, ended.stdout


@pytest.mark.slow
def test_the_guide_shows_the_ids_of_the_reference_and_the_family_of_the_checkpoint(tmp_path: Path) -> None:
    guide = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    ((script, printed),) = re.findall(
        r"^```sh\n(\S+ -m tools.random_checkpoint small\n.*?)^```\n\n```text\n(.*?)^```",
        guide,
        re.MULTILINE | re.DOTALL,
    )
    (doctor,) = re.findall(r"^(mindie-mm doctor small) ", guide, re.MULTILINE)
    for name in ("mindie_mm", "tests", "tools", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    ended = subprocess.run(["sh", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.lstrip() == printed
    command = [Path(sys.executable).with_name("mindie-mm"), *doctor.split()[1:]]
    found = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False).stdout
    (line,) = re.findall(r"^```text\n(ok  checkpoint .*)\n```$", guide, re.MULTILINE)
    (own,) = [one for one in found.splitlines() if "served by" in one]
    assert own.split() == line.replace("/home/you/mindie_mm", str(tmp_path)).split()
