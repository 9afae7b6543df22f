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
    assert re.search(r"^[1-9]\d passed", ended.stdout, re.MULTILINE), ended.stdout
