"""`mindie-mm serve --ray`: runs the application on a Ray cluster, or on a Ray that this process starts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from mindie_mm.errors import InputError, OperationalError, os_errors_as
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.nn.checkpoint.hub import checkpoint_name
from mindie_mm.processes.ray_cluster import LOCAL, accelerators, join
from mindie_mm.settings.config import EngineConfig
from mindie_mm.settings.sources import Configuration
from service.http.access import require_key

EXTRA = "serve-ray"
NAME = "mindie_mm"
"""Name of the application in the cluster."""


def serve_on_ray(given: Configuration, address: str, replicas: int) -> None:
    """Serve on the Ray cluster at `address` until SIGTERM, SIGINT or SIGHUP.

    Print one line when the service is ready. A cluster that this process has joined keeps running afterwards.

    Raises:
        InputError: Ray is not installed, the cluster cannot be joined, it has too few devices, or it already runs the
            application.
        OperationalError: The application cannot be started. The message gives the reason of the replica that failed.

    """
    config = given.service
    require_key(config)
    local = address == LOCAL
    port = config.port
    options: dict[str, Any] = {}
    if local:
        with os_errors_as(OperationalError, f"cannot listen on {config.host}:{port}"):
            port = _usable_port(config.host, port)
        # The CPUs of a local Ray only count replicas, so that a machine with few cores can run them.
        options = {"num_cpus": max(os.cpu_count() or 1, replicas + 1), "log_to_driver": True}
    join(address, EXTRA, **options)
    import ray  # imported late, because `join` first limits the time that Ray takes to connect

    try:
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise InputError(f"Ray Serve cannot be imported ({error}): pip install 'mindie_mm[{EXTRA}]'") from error
    from service.ray.application import Arguments, application
    from service.ray.plan import given_settings, plan_of, require_supported
    from service.ray.running import failure_of, require_free

    require_supported(config, given.worker)
    require_free(NAME, address)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    arguments = Arguments(
        num_replicas=replicas, worker_resources=worker_resources(ray.cluster_resources(), replicas, given.worker.engine)
    )
    with contextlib.suppress(KeyboardInterrupt):
        try:
            serve.start(http_options={"host": config.host, "port": port})
            serve.run(application(plan_of(given_settings(given)), arguments), name=NAME, route_prefix="/")
            model = next(iter(config.served_model_name), checkpoint_name(given.worker.model or EMBEDDED))
            host = f"[{config.host}]" if ":" in config.host else config.host
            noun = "replica" if replicas == 1 else "replicas"
            print(f"mindie_mm serves {model} at http://{host}:{port} on Ray with {replicas} {noun}", flush=True)
            threading.Event().wait()
        except (RuntimeError, ValueError, RayError, RayServeException) as error:
            cause = failure_of(NAME) or str(error)
            raise OperationalError(f"the application cannot be started on Ray: {cause}") from error
        finally:
            if local:
                serve.shutdown()
                ray.shutdown()
            else:
                serve.delete(NAME)


def worker_resources(cluster: Mapping[str, float], replicas: int, engine: EngineConfig) -> dict[str, float]:
    """Return the Ray resources of a worker replica: its devices, or a CPU if the cluster has no devices.

    Args:
        cluster: Resources of the whole cluster.
        replicas: Number of worker replicas.
        engine: Settings of the engine.

    Raises:
        InputError: The cluster has too few devices or CPUs.

    """
    devices = accelerators(cluster, engine.device)
    if devices is None:
        if (cpus := int(cluster.get("CPU", 0))) < replicas + 1:
            raise InputError(
                f"{replicas} replicas and their ingress need {replicas + 1} CPUs, but the cluster has {cpus}; start "
                "fewer replicas, or add nodes"
            )
        return {"CPU": 1}
    name, count = devices
    if (wanted := replicas * engine.tensor_parallel) > count:
        raise InputError(
            f"{replicas} replicas with tensor_parallel {engine.tensor_parallel} need {wanted} devices ({name}), but "
            f"the cluster has {count}; start fewer replicas, or add nodes"
        )
    return {"CPU": 1, name: engine.tensor_parallel}


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _usable_port(host: str, port: int) -> int:
    """Return `port`, or a free port if it is 0. Raise OSError if the port cannot be used."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        found: int = sock.getsockname()[1]
        return found
