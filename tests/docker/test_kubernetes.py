"""Tests that the manifests in docker/kubernetes conform to Kubernetes' schemas and that their values are consistent."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import subprocess
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mindie_mm.settings.config import MediaCaps, ServiceConfig
from tests.docker.dockerfile import DEVICES, FOLDER, ROOT, last_stage, of, read
from tests.docker.settings import VARIABLES, nbytes, shm_bytes

pytestmark = pytest.mark.slow

MANIFESTS = FOLDER / "kubernetes"
VERSIONS = ("1.25", "1.31", "1.37")
"""Versions of Kubernetes. The first is the oldest that `kubernetes_validate` supports, and the last is the newest."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
RESOURCES = {"cpu": {}, "cuda": {"nvidia.com/gpu": "1"}, "npu": {"huawei.com/Ascend910": "1"}}
GRACE_PLUS_S = 5
"""Seconds that a stop may take in addition to the grace time, according to docs/operate.md."""


def base() -> dict[str, dict[str, Any]]:
    """Return the manifests that all devices share, by kind."""
    files = [path for path in sorted((MANIFESTS / "base").glob("*.yaml")) if path.name != "kustomization.yaml"]
    return {one["kind"]: one for one in (yaml.safe_load(path.read_text()) for path in files)}


def built(device: str) -> dict[str, dict[str, Any]]:
    """Return the manifests that kubectl builds from a device's overlay, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which puts overlays together")
    command = ["kubectl", "kustomize", str(MANIFESTS / device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}


def pod_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return pod


def container_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(manifests)["containers"]
    only: dict[str, Any] = container
    return only


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_base_is_valid(version: str) -> None:
    assert base().keys() == {"Deployment", "Service"}
    for manifest in base().values():
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_overlays_are_valid(device: str, version: str) -> None:
    manifests = built(device)
    assert manifests.keys() == {"Deployment", "Service"}
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_refuses_an_unknown_field() -> None:
    bad = copy.deepcopy(base()["Deployment"])
    (shm,) = [one for one in bad["spec"]["template"]["spec"]["volumes"] if one["name"] == "shm"]
    shm["emptyDir"]["size"] = shm["emptyDir"].pop("sizeLimit")
    with pytest.raises(kubernetes_validate.ValidationError, match="size"):
        kubernetes_validate.validate(bad, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("device", DEVICES)
def test_an_overlay_adds_only_its_device(device: str) -> None:
    manifests = built(device)
    container, shared = container_of(manifests), container_of(base())
    assert container["image"] == f"registry.example.org/mindie_mm:{VERSION}-{device}"
    assert container["resources"]["limits"] == shared["resources"]["limits"] | RESOURCES[device]
    assert {key: value for key, value in container.items() if key not in ("image", "resources", "volumeMounts")} == {
        key: value for key, value in shared.items() if key not in ("image", "resources", "volumeMounts")
    }
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    further = mounts - {one["mountPath"] for one in shared["volumeMounts"]}
    driver = {"/usr/local/Ascend/driver", "/usr/local/dcmi", "/usr/local/bin/npu-smi", "/etc/ascend_install.info"}
    assert further == (driver if device == "npu" else set())
    hosts = [one["hostPath"]["path"] for one in pod_of(manifests)["volumes"] if "hostPath" in one]
    assert set(hosts) == further


def test_the_npu_overlay_adds_the_group_of_its_devices() -> None:
    security = pod_of(built("npu"))["securityContext"]
    assert security["supplementalGroups"]
    assert security.items() >= pod_of(base())["securityContext"].items()


def test_the_selectors_match_the_pods() -> None:
    shared = base()
    labels = shared["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert shared["Deployment"]["spec"]["selector"]["matchLabels"] == labels == shared["Service"]["spec"]["selector"]


def test_every_volume_is_mounted_and_every_mount_has_a_volume() -> None:
    container, pod = container_of(base()), pod_of(base())
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/dev/shm", "/tmp"} <= set(mounts.values())


def test_the_shm_volume_fits_the_arena() -> None:
    pod, env = pod_of(base()), env_of(container_of(base()))
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    arena_bytes = int(env["MINDIE_MM_ARENA_BYTES"])
    assert nbytes(shm["sizeLimit"]) == shm_bytes(arena_bytes)


def test_the_tmp_volume_has_twice_the_size_of_the_spool() -> None:
    """The rest of /tmp is for other files. Kubernetes evicts a pod that exceeds the limit."""
    (tmp,) = [volume["emptyDir"] for volume in pod_of(base())["volumes"] if volume["name"] == "tmp"]
    assert "MINDIE_MM_MAX_SPOOL_BYTES" not in env_of(container_of(base()))
    assert 2 * ServiceConfig().max_spool_bytes <= nbytes(tmp["sizeLimit"])


def test_the_memory_limit_covers_shared_memory_and_decoding() -> None:
    container = container_of(base())
    env, resources = env_of(container), container["resources"]
    decoders, decode = int(env["MINDIE_MM_DECODERS"]), int(env["MINDIE_MM_MAX_DECODE_BYTES"])
    assert decode <= MediaCaps().max_decode_bytes
    shm = shm_bytes(int(env["MINDIE_MM_ARENA_BYTES"]))
    assert nbytes(resources["limits"]["memory"]) > 2 * (shm + decoders * decode), "the rest is for the engine"
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_probes_and_scrapes_use_paths_that_need_no_key() -> None:
    container = container_of(base())
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/health/live"}
    (port,) = container["ports"]
    annotations = base()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/path"] == "/metrics"
    ports = {int(of(last_stage(read(device)), "EXPOSE")[0].value) for device in DEVICES}
    assert {port["containerPort"], int(annotations["prometheus.io/port"]), ServiceConfig().port} == ports


def test_the_termination_grace_period_covers_the_grace_time() -> None:
    pod, container = pod_of(base()), container_of(base())
    delay_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = float(env_of(container)["MINDIE_MM_GRACE_S"])
    assert pod["terminationGracePeriodSeconds"] > grace_s + delay_s + GRACE_PLUS_S


def test_the_pod_has_minimal_privileges() -> None:
    pod, container = pod_of(base()), container_of(base())
    uid, gid = {of(last_stage(read(device)), "USER")[0].value for device in DEVICES}.pop().split(":")
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(uid),
        "runAsGroup": int(gid),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_every_environment_variable_is_a_setting_that_kubernetes_does_not_override() -> None:
    env = env_of(container_of(base()))
    assert env.keys() <= VARIABLES
    assert all(isinstance(value, str) for value in env.values()), "numbers are to be quoted"
    assert env["MINDIE_MM_API_KEY"] == "", "from a Secret"
    prefix = base()["Service"]["metadata"]["name"].upper().replace("-", "_")
    clashes = {
        field.name
        for field in dataclasses.fields(ServiceConfig)
        if f"{prefix}_PORT" == f"MINDIE_MM_{field.name.upper()}"
    }
    assert clashes == {"port"}, "which is why links are off"
    assert pod_of(base())["enableServiceLinks"] is False
