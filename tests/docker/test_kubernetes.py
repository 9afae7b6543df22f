"""Tests that the chart in docker/helm renders to manifests that conform to Kubernetes' schemas and are consistent."""

from __future__ import annotations

import copy
import dataclasses
import ipaddress
import os
import shutil
import subprocess
import tomllib
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mindie_mm.settings.config import MediaCaps, ServiceConfig
from tests.docker.dockerfile import DEVICES, FOLDER, ROOT, last_stage, of, read
from tests.docker.settings import VARIABLES, nbytes, shm_bytes

pytestmark = pytest.mark.slow

CHART = FOLDER / "helm"
VERSIONS = ("1.25", "1.31", "1.37")
"""Versions of Kubernetes. The first is the oldest that `kubernetes_validate` supports, and the last is the newest."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
RESOURCES = {"cpu": {}, "cuda": {"nvidia.com/gpu": "1"}, "npu": {"huawei.com/Ascend910": "1"}}
GRACE_PLUS_S = 5
"""Seconds that a stop may take in addition to the grace time, according to docs/deploy.md."""


def helm(command: str, *options: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm", path=f"{ROOT / 'build/helm'}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("no Helm, which renders the chart")
    return subprocess.run([program, command, *options], capture_output=True, text=True, check=False, timeout=300)


@cache
def rendered(device: str = "cpu", *values: str) -> dict[str, dict[str, Any]]:
    """Return the manifests that Helm renders with values such as `replicas=2`, by kind."""
    done = helm("template", "mindie-mm", str(CHART), "--set", ",".join((f"device={device}", *values)))
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {one["kind"]: one for one in found}


def pod_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return pod


def container_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(manifests)["containers"]
    only: dict[str, Any] = container
    return only


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


KINDS = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
EVERYTHING = (
    "tlsSecret=tls",
    "apiKeys.file=keys.toml",
    "podMonitor.enabled=true",
    "podMonitor.labels.release=prometheus",
    "tolerations[0].key=huawei.com/npu",
    "tolerations[0].operator=Exists",
    "nodeSelector.zone=a",
    "strategy.type=Recreate",
    "imagePullSecrets[0].name=registry",
    "podAnnotations.a=b",
    "podLabels.team=a",
    "networkPolicy.fetchMedia=false",
)
"""Values that turn everything on that is off by default."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [(), EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_manifests_are_valid(device: str, values: tuple[str, ...], version: str) -> None:
    manifests = rendered(device, *values)
    assert manifests.keys() - {"PodMonitor"} == KINDS
    for kind, manifest in manifests.items():
        if kind != "PodMonitor":  # the Prometheus operator defines it
            kubernetes_validate.validate(manifest, version, strict=True)


def test_helm_finds_no_mistake_in_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {VERSION}


@pytest.mark.parametrize(
    ("value", "message"),
    [("device=tpu", "device"), ("arenaMib=512", "arenaMib"), ("settings.MINDIE_MM_DECODERS=2", "DECODERS")],
)
def test_a_value_that_is_misspelt_or_of_another_type_is_refused(value: str, message: str) -> None:
    done = helm("template", "mindie-mm", str(CHART), "--set", value)
    assert done.returncode == 1
    assert message in done.stderr


def test_the_pods_get_what_the_values_turn_on() -> None:
    manifests = rendered("npu", *EVERYTHING)
    pod, container = pod_of(manifests), container_of(manifests)
    assert pod["tolerations"] == [{"key": "huawei.com/npu", "operator": "Exists"}]
    assert pod["nodeSelector"] == {"zone": "a"}
    env, mounts = env_of(container), {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert env["MINDIE_MM_SSL_CERTFILE"] == f"{mounts['tls']}/tls.crt"
    assert env["MINDIE_MM_SSL_KEYFILE"] == f"{mounts['tls']}/tls.key"
    assert env["MINDIE_MM_API_KEY_FILE"] == f"{mounts['keys']}/keys.toml"
    assert env.keys() <= VARIABLES
    assert {container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "readiness", "liveness")} == {
        "HTTPS"
    }
    assert manifests["NetworkPolicy"]["spec"]["egress"] == []
    (scraped,) = manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"], scraped["scheme"]) == (container["ports"][0]["name"], "/metrics", "https")
    assert manifests["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"


def test_the_network_policy_allows_no_private_address() -> None:
    policy = rendered()["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"port": "http"}]}]
    _, public = policy["egress"]
    blocks = [to["ipBlock"] for to in public["to"]]
    refused = [ipaddress.ip_network(one) for block in blocks for one in block["except"]]
    for address in ("10.0.0.1", "172.20.1.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "fd00::1", "fe80::1"):
        assert any(ipaddress.ip_address(address) in network for network in refused), address


@pytest.mark.parametrize("arena_mib", [256, 4096])
def test_one_value_sizes_the_arena_and_its_volume(arena_mib: int) -> None:
    manifests = rendered("cpu", f"arenaMiB={arena_mib}")
    (shm,) = [volume["emptyDir"] for volume in pod_of(manifests)["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    arena_bytes = int(env_of(container_of(manifests))["MINDIE_MM_ARENA_BYTES"])
    assert arena_bytes == arena_mib * 2**20
    assert nbytes(shm["sizeLimit"]) == shm_bytes(arena_bytes)


def test_the_schema_refuses_an_unknown_field() -> None:
    bad = copy.deepcopy(rendered()["Deployment"])
    (shm,) = [one for one in bad["spec"]["template"]["spec"]["volumes"] if one["name"] == "shm"]
    shm["emptyDir"]["size"] = shm["emptyDir"].pop("sizeLimit")
    with pytest.raises(kubernetes_validate.ValidationError, match="size"):
        kubernetes_validate.validate(bad, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_adds_only_what_it_needs(device: str) -> None:
    manifests = rendered(device)
    container, shared = container_of(manifests), container_of(rendered())
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


def test_the_npu_adds_the_group_of_its_devices() -> None:
    security = pod_of(rendered("npu"))["securityContext"]
    assert security["supplementalGroups"]
    assert security.items() >= pod_of(rendered())["securityContext"].items()


def test_the_selectors_match_the_pods() -> None:
    shared = rendered()
    labels = shared["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        shared["Deployment"]["spec"]["selector"]["matchLabels"],
        shared["Service"]["spec"]["selector"],
        shared["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        shared["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels


def test_every_volume_is_mounted_and_every_mount_has_a_volume() -> None:
    container, pod = container_of(rendered()), pod_of(rendered())
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert {"/dev/shm", "/tmp"} <= set(mounts.values())


def test_the_tmp_volume_has_twice_the_size_of_the_spool() -> None:
    """The rest of /tmp is for other files. Kubernetes evicts a pod that exceeds the limit."""
    (tmp,) = [volume["emptyDir"] for volume in pod_of(rendered())["volumes"] if volume["name"] == "tmp"]
    assert "MINDIE_MM_MAX_SPOOL_BYTES" not in env_of(container_of(rendered()))
    assert 2 * ServiceConfig().max_spool_bytes <= nbytes(tmp["sizeLimit"])


def test_the_memory_limit_covers_shared_memory_and_decoding() -> None:
    container = container_of(rendered())
    env, resources = env_of(container), container["resources"]
    decoders, decode = int(env["MINDIE_MM_DECODERS"]), int(env["MINDIE_MM_MAX_DECODE_BYTES"])
    assert decode <= MediaCaps().max_decode_bytes
    shm = shm_bytes(int(env["MINDIE_MM_ARENA_BYTES"]))
    assert nbytes(resources["limits"]["memory"]) > 2 * (shm + decoders * decode), "the rest is for the engine"
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_probes_and_scrapes_use_paths_that_need_no_key() -> None:
    container = container_of(rendered())
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/health/live"}
    (port,) = container["ports"]
    annotations = rendered()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/path"] == "/metrics"
    ports = {int(of(last_stage(read(device)), "EXPOSE")[0].value) for device in DEVICES}
    assert {port["containerPort"], int(annotations["prometheus.io/port"]), ServiceConfig().port} == ports


def test_the_termination_grace_period_covers_the_grace_time() -> None:
    pod, container = pod_of(rendered()), container_of(rendered())
    delay_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = float(env_of(container)["MINDIE_MM_GRACE_S"])
    assert pod["terminationGracePeriodSeconds"] > grace_s + delay_s + GRACE_PLUS_S


def test_the_pod_has_minimal_privileges() -> None:
    pod, container = pod_of(rendered()), container_of(rendered())
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
    env = env_of(container_of(rendered()))
    assert env.keys() <= VARIABLES
    assert all(isinstance(value, str) for value in env.values()), "numbers are to be quoted"
    assert env["MINDIE_MM_API_KEY"] == "", "from a Secret"
    prefix = rendered()["Service"]["metadata"]["name"].upper().replace("-", "_")
    clashes = {
        field.name
        for field in dataclasses.fields(ServiceConfig)
        if f"{prefix}_PORT" == f"MINDIE_MM_{field.name.upper()}"
    }
    assert clashes == {"port"}, "which is why links are off"
    assert pod_of(rendered())["enableServiceLinks"] is False
