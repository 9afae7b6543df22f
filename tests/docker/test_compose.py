"""Tests that docker/compose.yaml conforms to the Compose specification and that its values are consistent."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindie_mm.settings.config import GiB, MiB, ServiceConfig, WorkerConfig
from tests.docker.dockerfile import DEVICES, FOLDER, ROOT, args
from tests.docker.settings import VARIABLES, nbytes, shm_bytes

pytestmark = pytest.mark.slow

FILE = FOLDER / "compose.yaml"
FOUND = yaml.safe_load(FILE.read_text())
CACHE = "/var/cache/huggingface"
"""Folder of downloaded checkpoints. The image has it, because a new volume gets the owner of the image's folder."""
MONITORING = ("prometheus", "grafana")
BUILDS = ("docker/Dockerfile.npu", "docs/deploy.md")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def of_device(device: str) -> dict[str, Any]:
    service: dict[str, Any] = FOUND["services"][device]
    return service


def plain(value: object) -> str:
    """Return a value as Compose reads it when none of its variables are set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def validate(file: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*command, str(file)], capture_output=True, text=True, check=False, timeout=300)


def test_the_file_conforms_to_the_compose_specification() -> None:
    checked = validate(FILE)
    assert checked.returncode == 0, checked.stdout


def test_the_schema_refuses_a_misspelt_key(tmp_path: Path) -> None:
    bad = tmp_path / "compose.yaml"
    bad.write_text(FILE.read_text().replace("shm_size:", "shm_sise:"))
    checked = validate(bad)
    assert checked.returncode == 1
    assert "shm_sise" in checked.stdout


def test_each_device_has_a_service() -> None:
    assert FOUND["services"].keys() == {*DEVICES, "npu-a3", *MONITORING}
    for device in DEVICES:
        service = of_device(device)
        assert service["profiles"] == [device]
        assert service["image"] == f"mindie_mm:{VERSION}-{device}"
        assert (FILE.parent / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).name == f"Dockerfile.{device}"


def test_shm_size_fits_the_arena() -> None:
    service, defaults = of_device("cpu"), WorkerConfig()
    env = {name: plain(value) for name, value in service["environment"].items()}
    assert int(env["MINDIE_MM_ARENA_BYTES"]) == defaults.arena_bytes
    for arena_bytes in (64 * MiB, defaults.arena_bytes, 16 * GiB):
        size = service["shm_size"].replace("${MINDIE_MM_ARENA_BYTES:-268435456}", str(arena_bytes))
        assert nbytes(size) >= shm_bytes(arena_bytes)


def test_tmpfs_has_twice_the_size_of_the_spool() -> None:
    """The rest of /tmp is for other temporary files."""
    (tmp,) = of_device("cpu")["tmpfs"]
    (size,) = re.findall("size=([^,]+)", tmp)
    assert "MINDIE_MM_MAX_SPOOL_BYTES" not in of_device("cpu")["environment"]
    assert 2 * ServiceConfig().max_spool_bytes <= nbytes(size)


@pytest.mark.parametrize("device", DEVICES)
def test_the_container_has_minimal_privileges(device: str) -> None:
    service = of_device(device)
    assert service["read_only"] is True
    assert [one.partition(":")[0] for one in service["tmpfs"]] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "ipc", "pid", "network_mode", "cap_add"} & service.keys()
    assert [plain(one) for one in service["ports"]] == ["127.0.0.1:8000:8000"], "loopback alone, unless asked"
    assert [volume for volume in service["volumes"] if not volume.endswith(":ro")] == [f"huggingface:{CACHE}"]


@pytest.mark.parametrize("device", DEVICES)
def test_every_environment_variable_is_a_setting(device: str) -> None:
    service = of_device(device)
    named = {name for name in service["environment"] if name.startswith("MINDIE_MM_")}
    assert service["environment"].keys() - named == {"HF_HOME", "HF_TOKEN", "HF_ENDPOINT"}
    assert named <= VARIABLES
    assert service["environment"]["HF_HOME"] == CACHE
    assert service["environment"]["MINDIE_MM_API_KEY"] is None, "handed on, not written here"


def test_the_stop_grace_period_covers_the_grace_time() -> None:
    service = of_device("cpu")
    grace_s = float(service["environment"]["MINDIE_MM_GRACE_S"])
    assert grace_s > ServiceConfig().grace_s
    assert float(service["stop_grace_period"].removesuffix("s")) > grace_s + 5


def test_the_npu_has_its_devices_and_driver() -> None:
    service = of_device("npu")
    devices = {plain(one) for one in service["devices"]}
    assert devices == {"/dev/davinci0", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
    mounted = {plain(volume).split(":")[1] for volume in service["volumes"]}
    driver = {"/usr/local/Ascend/driver", "/usr/local/dcmi", "/usr/local/bin/npu-smi", "/etc/ascend_install.info"}
    assert mounted == {"/models", CACHE, *driver}, "its own list stands in place of the common one"
    assert service["group_add"], "the devices are of a group, and the user is not root"


def test_the_a3_has_the_base_of_its_chip_and_is_otherwise_like_the_a2() -> None:
    a2, a3 = of_device("npu"), of_device("npu-a3")
    tag = args("npu")["CANN_TAG"].replace("910b", "a3")
    own = {"profiles": ["npu-a3"], "image": f"mindie_mm:{VERSION}-npu-a3", "build": {"args": {"CANN_TAG": tag}}}
    assert a3 == a2 | own | {"build": a2["build"] | own["build"]}
    for file in BUILDS:
        assert f"--build-arg CANN_TAG={tag}" in " ".join((ROOT / file).read_text().split())


def test_monitoring_is_a_profile_with_pinned_images_and_files_that_exist() -> None:
    for name in MONITORING:
        service = of_device(name)
        assert service["profiles"] == ["monitoring"]
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(plain(port).startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        own = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith(".")]
        assert all((FOLDER / path).exists() for path in own)


def test_prometheus_scrapes_every_service_of_a_device() -> None:
    (job,) = yaml.safe_load((FOLDER / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    (names,) = [found["names"] for found in job["dns_sd_configs"]]
    assert set(names) == FOUND["services"].keys() - {*MONITORING}


def test_cuda_has_its_gpu() -> None:
    (device,) = of_device("cuda")["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "${GPUS:-1}", "capabilities": ["gpu"]}
