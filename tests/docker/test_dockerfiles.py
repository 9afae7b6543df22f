"""Tests that every docker/Dockerfile.* follows the rules of this project and of hadolint."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from tests.docker.dockerfile import (
    DEVICES,
    FOLDER,
    ROOT,
    args,
    healthcheck,
    ignore_patterns,
    is_sent,
    last_stage,
    of,
    pairs,
    parse,
    read,
)
from tests.docker.settings import VARIABLES

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HADOLINT = Path(sys.executable).with_name("hadolint")


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(HADOLINT), "--no-color", "--failure-threshold", "style", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("device", DEVICES)
def test_hadolint_finds_nothing(device: str) -> None:
    checked = hadolint(FOLDER / f"Dockerfile.{device}")
    assert (checked.returncode, checked.stdout) == (0, "")


def test_hadolint_reports_an_unpinned_base(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text((FOLDER / "Dockerfile.cpu").read_text().replace("debian:12.15-slim AS", "debian:latest AS"))
    checked = hadolint(bad)
    assert checked.returncode == 1
    assert "DL3007" in checked.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_bases_are_pinned_by_version(device: str) -> None:
    stages: set[str] = set()
    for one in of(read(device), "FROM"):
        source, _, name = one.value.partition(" AS ")
        if source not in stages:
            tag = source.partition(":")[2].replace("${CANN_TAG}", args(device).get("CANN_TAG", ""))
            assert re.match(r"\d+\.\d+", tag), source
        stages.add(name)
    assert len(stages) == 3, "base, build and what is shipped"


@pytest.mark.parametrize("device", DEVICES)
def test_dependencies_are_installed_before_the_source_is_copied(device: str) -> None:
    lines = [f"{one.name} {one.value}" for one in read(device)]
    (dependencies,) = [index for index, line in enumerate(lines) if "--constraint constraints.txt" in line]
    (source,) = [index for index, line in enumerate(lines) if line.startswith("COPY mindie_mm ")]
    assert dependencies < source
    assert "--no-deps" in lines[source + 2]


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_stage_only_copies_the_build_and_runs_as_a_user(device: str) -> None:
    last = last_stage(read(device))
    assert [one.value for one in of(last, "FROM")] == ["base AS runtime"]
    assert [one.flags for one in of(last, "COPY")] == [{"from": "build"}], "no source in it"
    assert not any("pip" in one.value or "apt-get" in one.value for one in of(last, "RUN"))
    (user,) = of(last, "USER")
    uid, gid = user.value.split(":")
    assert int(uid) > 10_000, "no user of the host"
    (added,) = of(last, "RUN")
    assert f"--uid {uid} --gid {gid} " in added.value
    names = [one.name for one in last]
    assert names.index("USER") < names.index("ENTRYPOINT"), "nothing changes it after"


@pytest.mark.parametrize("device", DEVICES)
def test_the_entry_point_starts_the_service_without_a_shell(device: str) -> None:
    last = last_stage(read(device))
    assert of(last, "ENTRYPOINT")[0].argv == ["mindie-mm", "serve"]
    assert of(last, "CMD")[0].argv == []
    assert healthcheck(last)[0] == "python"
    (check,) = of(last, "HEALTHCHECK")
    assert check.flags.keys() == {"interval", "timeout", "start-period", "retries"}
    assert not of(last, "STOPSIGNAL"), "SIGTERM is Docker's default"
    env = pairs(of(last, "ENV")[0].value, {"PATH": "/usr/bin"})
    assert {name for name in env if name.startswith("MINDIE_MM_")} <= VARIABLES
    assert env["MINDIE_MM_DEVICE"] == device
    assert (env["MINDIE_MM_HOST"], env["MINDIE_MM_ALLOW_OPEN"]) == ("0.0.0.0", "0"), "without a key, it does not start"
    assert of(last, "EXPOSE")[0].value == env["MINDIE_MM_PORT"]


@pytest.mark.parametrize("device", DEVICES)
def test_no_argument_or_variable_holds_a_secret(device: str) -> None:
    for one in read(device):
        if one.name in ("ARG", "ENV"):
            assert not re.search(r"KEY|TOKEN|SECRET|PASSW", one.value, re.IGNORECASE), one.value
    assert not any("mount" in one.flags for one in of(read(device), "RUN"))


@pytest.mark.parametrize("device", DEVICES)
def test_the_labels_follow_the_oci_specification(device: str) -> None:
    last = last_stage(read(device))
    values = args(device)
    labels = pairs(of(last, "LABEL")[0].value, values)
    keys = {"title", "description", "version", "revision", "licenses", "base.name"}
    assert labels.keys() == {f"org.opencontainers.image.{key}" for key in keys}
    assert all(labels.values())
    assert labels["org.opencontainers.image.version"] == PROJECT["project"]["version"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]
    source = of(read(device), "FROM")[0].value.partition(" AS ")[0].replace("${CANN_TAG}", values.get("CANN_TAG", ""))
    assert labels["org.opencontainers.image.base.name"].endswith(source)


def test_the_images_have_the_tested_torch() -> None:
    (tested,) = re.findall(r"^TORCH := torch==([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {args(device)["TORCH_VERSION"] for device in DEVICES} == {tested}


def test_the_versions_of_torch_npu_and_cann_agree_everywhere() -> None:
    (tested,) = PROJECT["project"]["optional-dependencies"]["test-npu"]
    arguments = args("npu")
    assert tested == f"torch_npu=={arguments['TORCH_NPU_VERSION']}"
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert set(re.findall(r"torch_npu==[\d.]+\d", text)) == {tested}
    (series,) = re.findall(r"^\d+\.\d+", arguments["CANN_TAG"])
    assert set(re.findall(r"machine with CANN (\d+\.\d+)", text)) == {series}


def test_the_versions_of_torch_and_torch_npu_match() -> None:
    arguments = args("npu")
    assert arguments["TORCH_NPU_VERSION"].partition(".post")[0] == arguments["TORCH_VERSION"]
    allowed = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["npu"]]
    ranges = {one.name: one.specifier for one in map(Requirement, allowed)}
    assert arguments["TORCH_VERSION"] in ranges["torch"]
    assert arguments["TORCH_NPU_VERSION"] in ranges["torch_npu"]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("pyproject.toml", True),
        ("mindie_mm/assets/tiny/model.safetensors", True),
        ("service/static/page.js", True),
        ("mindie_mm/shm/__pycache__/arena.cpython-311.pyc", False),
        (".git/config", False),
        (".env", False),
        ("keys.env", False),
        ("tests/conftest.py", False),
        ("docker/compose.yaml", False),
        (".venv/bin/python", False),
    ],
)
def test_only_sources_are_sent_to_a_build(path: str, sent: bool) -> None:
    assert is_sent(PurePosixPath(path), ignore_patterns()) is sent


def test_the_parser_reads_dockerfiles_like_docker() -> None:
    text = "# syntax\nFROM a AS b\nRUN one \\\n    # between\n    && two\nCOPY --from=b /x /y\nENV A=1 \\\n    B=$A/c\n"
    parsed = parse(text)
    assert [one.name for one in parsed] == ["FROM", "RUN", "COPY", "ENV"]
    assert parsed[1].value.split() == ["one", "&&", "two"]
    assert parsed[2].flags == {"from": "b"}
    assert pairs(parsed[3].value, {"A": "0"}) == {"A": "1", "B": "0/c"}, "a variable has the value that it had before"
