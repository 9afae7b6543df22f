"""Tests that PyPI has a wheel for each requirement of the images, for each architecture.

uv resolves the requirements, because it supports the markers of other platforms and reads only metadata. In contrast,
`pip install --dry-run` downloads every wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.docker.dockerfile import ROOT, of, read
from tests.docker.image import machine_of_pip

pytestmark = pytest.mark.slow

PYPI = "https://pypi.org/simple"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ARCHITECTURES = ("x86_64", "aarch64")


def resolved(requirements: list[str], constraints: Path, architecture: str) -> dict[str, str]:
    """Return the resolved versions for Python 3.11 and glibc 2.35.

    Ubuntu 22.04 has this glibc, and Debian 12 has a later one.
    """
    try:
        with urllib.request.urlopen(f"{PYPI}/torch/", timeout=20):
            pass
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"no PyPI: {error}")
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--no-config", "--quiet", "--no-annotate"]
    command += ["--no-header", "--default-index", PYPI, "--only-binary", ":all:", "--python-version", "3.11"]
    command += ["--python-platform", f"{architecture}-manylinux_2_35", "--constraint", str(constraints), "-"]
    certificates = machine_of_pip().get("PIP_CERT")
    env = os.environ | ({"SSL_CERT_FILE": certificates} if certificates else {})
    done = subprocess.run(
        command, input="\n".join(requirements), env=env, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pins = (line.partition(" ;")[0].partition("==") for line in done.stdout.splitlines())
    return {name.lower().replace("-", "_"): version for name, _, version in pins}


def constraints_of(device: str, torch: str, folder: Path) -> Path:
    """Copy constraints.txt into `folder`, change it as the Dockerfile does, and return its path."""
    (line,) = [one.value for one in of(read(device), "RUN") if "constraints.txt" in one.value]
    command = line.partition("&&")[0]
    assert command.startswith("sed --in-place ")
    file = folder / "constraints.txt"
    file.write_text((ROOT / "constraints.txt").read_text())
    subprocess.run(["/bin/sh", "-c", command], cwd=folder, env=os.environ | {"TORCH_VERSION": torch}, check=True)
    return file


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_every_requirement_has_a_wheel(device: str, architecture: str, tmp_path: Path) -> None:
    """The test covers the CUDA and NPU images. The CPU image differs only in its build of torch, which PyPI lacks."""
    args = dict(one.value.partition("=")[::2] for one in read(device) if one.name == "ARG")
    torch, extras = args["TORCH_VERSION"], PROJECT["optional-dependencies"]
    requirements = [f"torch=={torch}", *PROJECT["dependencies"], *extras["batch"], *extras["otel"]]
    if device == "npu":
        requirements += [*extras["npu"], f"torch_npu=={args['TORCH_NPU_VERSION']}"]
    versions = resolved(requirements, constraints_of(device, torch, tmp_path), architecture)
    assert versions["torch"] == torch
    assert versions.get("torch_npu") == args.get("TORCH_NPU_VERSION")
    assert any(name.startswith("nvidia_") for name in versions), "PyPI's torch is CUDA's build, on both architectures"
