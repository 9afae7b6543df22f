"""Tests that the files in docker/ray conform to the schemas of Ray Serve and Kubernetes, and that their values fit.

The schema of a RayService is not available here, so only its Serve config and its pods are checked.
"""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from mindie_mm.settings.sources import checked_settings
from tests.docker.dockerfile import FOLDER
from tests.docker.settings import nbytes, shm_bytes
from tests.docker.test_kubernetes import VERSION, VERSIONS, env_of

pytestmark = pytest.mark.slow

SERVE = yaml.safe_load((FOLDER / "ray/serve.yaml").read_text())
SERVICE = yaml.safe_load((FOLDER / "ray/rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
(APPLICATION,) = SERVE["applications"]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


def test_ray_serve_accepts_the_config_file() -> None:
    schema = pytest.importorskip("ray.serve.schema", exc_type=ImportError)
    from service.ray.application import Arguments, build

    given = schema.ServeDeploySchema.model_validate(SERVE).model_dump(exclude_unset=True)
    assert given == SERVE, "Serve ignores unknown fields"
    module, name = APPLICATION["import_path"].split(":")
    assert (module, name) == (build.__module__, build.__name__)
    arguments = Arguments.model_validate(APPLICATION["args"])
    assert build(arguments)._bound_deployment.name == "Ingress"


def test_the_settings_exist() -> None:
    assert checked_settings("serve.yaml", APPLICATION["args"]["settings"])


def test_the_rayservice_has_the_same_config() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("group", GROUPS, ids=["head", *(one["groupName"] for one in GROUPS[1:])])
def test_the_pods_are_valid(group: dict[str, Any], version: str) -> None:
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod(group)}
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("group", GROUPS, ids=["head", *(one["groupName"] for one in GROUPS[1:])])
def test_the_values_of_a_pod_fit(group: dict[str, Any]) -> None:
    spec, settings = pod(group), APPLICATION["args"]["settings"]
    (container,) = spec["containers"]
    env = env_of(container)
    (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    store_bytes = int(group["rayStartParams"]["object-store-memory"])
    assert shm["medium"] == "Memory"
    assert nbytes(shm["sizeLimit"]) >= store_bytes + shm_bytes(settings["arena_bytes"])
    drain_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert settings["grace_s"] < drain_s < spec["terminationGracePeriodSeconds"]
    assert env["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert container["image"].startswith(f"registry.example.org/mindie_mm:{VERSION}-")
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}


def test_the_workers_fit_into_their_pods() -> None:
    wanted = APPLICATION["args"]["worker_resources"]
    npu, gpu = (pod(group)["containers"][0]["resources"]["limits"] for group in GROUPS[1:])
    assert (npu["huawei.com/Ascend910"], gpu["nvidia.com/gpu"]) == ("1", "1")
    assert wanted["NPU"] == 1
    assert min(int(npu["cpu"]), int(gpu["cpu"])) > wanted["CPU"], "an ingress replica may need a CPU, too"
    assert GROUPS[1]["maxReplicas"] >= APPLICATION["args"]["max_replicas"]
