"""Tests for an editable installation, as `make install` makes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_editable; print(build_editable(sys.argv[1]))"
SCRIPT = """
import mindie_mm, service.app
from mindie_mm import LLM
print(mindie_mm.__file__)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of the project in a folder named mindie_mm."""
    clone = tmp_path_factory.mktemp("clones") / "mindie_mm"
    for name in ("mindie_mm", "service", "tools"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


@pytest.fixture(scope="module")
def python(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the clone and our dependencies installed in it."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    built = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, folder], cwd=clone, stdout=subprocess.PIPE, text=True, check=True
    )
    with zipfile.ZipFile(folder / built.stdout.split()[-1]) as wheel:
        wheel.extractall(packages)
    # A path in a .pth file is added to sys.path, but .pth files at this path, such as our own, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.parametrize(
    "place", ["beside the clone", *(pytest.param(one, marks=pytest.mark.slow) for one in ("in the clone", "elsewhere"))]
)
def test_a_script_imports_the_package(
    python: Path, clone: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    folder = {"beside the clone": clone.parent, "in the clone": clone, "elsewhere": tmp_path}[place]
    script = folder / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([python, script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{clone / 'mindie_mm' / '__init__.py'}\n"
