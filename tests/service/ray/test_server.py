"""Tests for settings, versions and resources, which need no cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from mindie_mm.errors import InputError
from mindie_mm.processes import ray_cluster
from mindie_mm.settings.config import EngineConfig
from mindie_mm.settings.sources import SECRETS, configuration
from service.ray.plan import configuration_of, given_settings, plan_of
from service.ray.server import serve_on_ray, worker_resources


def test_a_plan_keeps_the_settings(tmp_path):
    given = {
        "model": tmp_path,
        "port": 8100,
        "api_key": ("a", "b"),
        "limit_mm_per_prompt": {"image": 2},
        "strict": True,
    }
    given |= {"rgba_background_color": (1, 2, 3), "request_timeout_s": 5.0, "device": "cpu"}
    before = configuration(given).for_service()
    after = configuration_of(plan_of(given_settings(before)))
    assert (after.worker, after.service) == (before.worker, before.service)


def test_a_node_adds_its_own_settings(monkeypatch):
    """A key in the Serve config file would be logged."""
    monkeypatch.setenv("MINDIE_MM_API_KEY", "secret")
    assert configuration_of(plan_of({"port": 8100})).service.api_key == ("secret",)


def test_a_worker_has_one_engine_unless_the_application_sets_several(monkeypatch):
    """The nodes of a local Ray inherit the environment of `mindie-mm serve --ray`."""
    monkeypatch.setenv("MINDIE_MM_REPLICAS", "2")
    assert configuration_of(plan_of({})).worker.replicas == 1
    assert configuration_of(plan_of({"replicas": 4})).worker.replicas == 4


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_the_config_file_must_not_contain_keys(name):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    from service.ray.application import Arguments, build

    with pytest.raises(InputError, match=f"set MINDIE_MM_{name.upper()} in the environment of all nodes") as refused:
        build(Arguments(settings={name: "hidden"}))
    assert "hidden" not in str(refused.value)
    with pytest.raises(ValidationError, match="Extra inputs") as misplaced:
        Arguments.model_validate({name: "hidden"})
    assert "hidden" not in str(misplaced.value)


def test_a_wrong_setting_is_named():
    with pytest.raises(InputError, match=r"there is no setting 'decoder'; did you mean 'decoders'\?"):
        configuration_of(plan_of({"decoder": 1}))
    with pytest.raises(InputError, match="port"):
        configuration_of(plan_of({"port": "many"}))


def test_another_wire_format_is_refused_with_both_versions():
    other = msgspec.json.decode(plan_of({}))
    ours = f"mindie_mm {other['version']} with wire format {other['wire']}"
    other |= {"version": "0.0.9", "wire": "9.9", "settings": {"a setting of that version": 1}}
    with pytest.raises(InputError) as error:
        configuration_of(msgspec.json.encode(other))
    assert ours in str(error.value)
    assert "mindie_mm 0.0.9 with wire format 9.9" in str(error.value)


def test_another_version_with_the_same_wire_format_is_accepted():
    other = msgspec.json.decode(plan_of({"port": 8100})) | {"version": "0.0.9"}
    assert configuration_of(msgspec.json.encode(other)).service.port == 8100


def test_the_error_without_ray_names_the_extra(monkeypatch):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'mindie_mm\[serve-ray\]'"):
        serve_on_ray(configuration({}), "127.0.0.1:6379", 1)


@pytest.mark.slow
def test_an_address_without_a_cluster_ends_the_command_with_the_reason():
    pytest.importorskip("ray.serve", exc_type=ImportError)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", "--ray", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"cannot join a Ray cluster at {address}: Failed to connect" in done.stderr.splitlines()[-1]


def test_a_ray_client_address_is_refused():
    with pytest.raises(InputError, match="mindie-mm joins the cluster directly"):
        serve_on_ray(configuration({}), "ray://127.0.0.1:10001", 1)


@pytest.mark.parametrize(
    ("cluster", "replicas", "engine", "wanted"),
    [
        ({"CPU": 16, "NPU": 8, "memory": 1e9, "node:10.0.0.1": 1}, 4, EngineConfig(tensor_parallel=2), {"NPU": 2}),
        ({"CPU": 16, "GPU": 8, "accelerator_type:H100": 1}, 8, EngineConfig(), {"GPU": 1}),
        ({"CPU": 3, "GPU": 8}, 2, EngineConfig(device="cpu"), {}),
        ({"CPU": 2}, 1, EngineConfig(), {}),
    ],
)
def test_a_replica_gets_its_devices(cluster, replicas, engine, wanted):
    assert worker_resources(cluster, replicas, engine) == {"CPU": 1} | wanted


@pytest.mark.parametrize(
    ("cluster", "engine", "message"),
    [
        ({"CPU": 64, "NPU": 8}, EngineConfig(tensor_parallel=4), r"need 12 devices \(NPU\), but the cluster has 8"),
        ({"CPU": 3}, EngineConfig(), "need 4 CPUs, but the cluster has 3"),
        ({}, EngineConfig(), "need 4 CPUs, but the cluster has 0"),
    ],
)
def test_more_replicas_than_devices_are_refused_with_both_numbers(cluster, engine, message):
    with pytest.raises(InputError, match=message):
        worker_resources(cluster, 3, engine)


def test_the_reason_of_a_failed_replica_is_the_error_at_the_end_of_its_traceback():
    pytest.importorskip("ray.serve", exc_type=ImportError)
    from service.ray.running import reason

    message = "A replica failed to start with exception. Error:\nray::ServeReplica:a() (pid=1)\n  File x, line 1\n"
    assert reason(f"{message}mindie_mm.errors.CheckpointError: /a has no config.json\n") == "/a has no config.json"
    assert reason(f"{message}OSError: no space\n") == "OSError: no space"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_that_cannot_start_ends_the_command_with_its_reason(tmp_path):
    pytest.importorskip("ray.serve", exc_type=ImportError)
    (tmp_path / "config.json").write_text("{}")
    command = [str(Path(sys.executable).with_name("mindie-mm")), "serve", "--ray", "--device", "cpu", "--port", "0"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "the application cannot be started on Ray: " in last
    assert str(tmp_path) in last
