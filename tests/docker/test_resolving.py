"""What pip would install for each image and architecture, from PyPI alone: resolved, not downloaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docker.dockerfile import ROOT, read
from tests.docker.image import machine_of_pip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def resolved(requirements: list[str], architecture: str, folder: Path) -> dict[str, str]:
    """Packages and versions for Python 3.11, wheels alone, up to the manylinux that Debian 12 and Ubuntu 22.04 take."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    tags = [f"manylinux_2_{minor}_{architecture}" for minor in range(35, 4, -1)] + [f"manylinux2014_{architecture}"]
    command = [str(folder / "venv/bin/pip"), "install", "--dry-run", "--quiet", "--only-binary", ":all:"]
    command += ["--python-version", "3.11", "--implementation", "cp", "--target", str(folder / "none")]
    command += [f"--platform={tag}" for tag in tags] + ["--report", str(folder / "report.json")]
    command += ["--constraint", str(ROOT / "constraints.txt"), *requirements]
    machine = {name: value for name, value in machine_of_pip().items() if name == "PIP_CERT"}
    env = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""} | machine
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=800)
    if re.search("Failed to establish a new connection|Temporary failure in name resolution", done.stderr):
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((folder / "report.json").read_text())["install"]
    return {one["metadata"]["name"].lower().replace("-", "_"): one["metadata"]["version"] for one in found}


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_there_are_wheels_for_everything(device: str, architecture: str, tmp_path: Path) -> None:
    args = dict(one.value.partition("=")[::2] for one in read(device) if one.name == "ARG")
    further = PROJECT["optional-dependencies"]
    requirements = [f"torch=={args['TORCH_VERSION']}", *PROJECT["dependencies"], *further["otel"]]
    if device == "npu":
        requirements += [*further["npu"], f"torch_npu=={args['TORCH_NPU_VERSION']}"]
    found = resolved(requirements, architecture, tmp_path)
    assert found["torch"] == args["TORCH_VERSION"]
    if device == "npu":
        assert found["torch_npu"] == args["TORCH_NPU_VERSION"]
    else:
        assert any(name.startswith("nvidia_") for name in found), "CUDA's libraries come with torch"
