"""Joins Ray clusters, and starts local ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.processes.interpreter import interpreter
from mindie_mm.processes.ray_probe import require_grpc
from mindie_mm.settings.environment import limit_ray_connect, ray_address, ray_uses_tls

_CHECK = (
    "Start its head node, or correct the host and port. If the cluster requires an authentication token, set "
    "RAY_AUTH_TOKEN on this machine"
)
LOCAL = "local"
"""Address that stands for a new cluster on this machine."""
KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Environment of actors with a worker. Ray would otherwise kill the child processes of a dead actor before they can
remove its arenas. These processes end by themselves when the actor ends."""
_NO_DEVICES = frozenset({"CPU", "memory", "object_store_memory"})


def accelerators(resources: Mapping[str, float], device: str) -> tuple[str, int] | None:
    """Return the most frequent kind of accelerator in a cluster or node, and the number of such accelerators.

    Return None for the device "cpu", and if there are no accelerators.

    Args:
        resources: Resources by Ray's names, which are in capitals for devices, such as GPU.
        device: Setting `device` of the engines.

    """
    found = {name: int(count) for name, count in resources.items() if name.isupper() and name not in _NO_DEVICES}
    if device == "cpu" or not found:
        return None
    return max(found.items(), key=lambda one: one[1])


def join(address: str, extra: str, **options: Any) -> None:
    """Join the cluster at `address`, unless this process is already in a cluster.

    Args:
        address: Address of the cluster to join as host:port, "auto" for the cluster that runs on this machine, or
            `LOCAL` to start a cluster.
        extra: Name of the extra that installs the packages for Ray.
        options: Further arguments of `ray.init`.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be joined.
        ProcessDied: This process has no Python interpreter that could start other processes.

    """
    named = address
    if address == "auto" and (address := ray_address() or "auto") != "auto":
        named = f"{address} (from RAY_ADDRESS)"
    if "://" in address:
        raise InputError(
            f"--ray {named}: mindie-mm joins the cluster directly, not through a Ray client. Give the host and port of "
            "the head node"
        )
    if find_spec("ray") is None:
        raise InputError(f"Ray is not installed: pip install 'mindie_mm[{extra}]'")
    imported = "ray" in sys.modules
    if imported and sys.modules["ray"].is_initialized():
        return
    interpreter()  # Ray starts its processes with this interpreter
    if address != LOCAL:
        _probe(address, named)
        limit_ray_connect()
    import ray
    from ray.exceptions import RayError

    try:
        if imported and address != LOCAL:
            _require_answer(address)
        ray.init(address=address, include_dashboard=False, **{"log_to_driver": False, **options})
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise _not_joined(named, error) from error


def _probe(address: str, named: str) -> None:
    """Raise InputError if nothing answers at `address`, before the import of Ray takes its seconds."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        return  # "auto", or an address that Ray refuses at once
    try:
        require_grpc(host.removeprefix("[").removesuffix("]"), int(port), tls=ray_uses_tls())
    except ConnectionError as error:
        raise _not_joined(named, error) from error


def _not_joined(named: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    advice = _CHECK if isinstance(error, ConnectionError) else "Give the host and port of the head node, as host:port"
    return InputError(f"cannot join a Ray cluster at {named}: {reason.rstrip('.')}. {advice}")


def _require_answer(address: str) -> None:
    """Raise ConnectionError unless a new process can join the cluster.

    This process imported Ray before `limit_ray_connect` set shorter timeouts. It would therefore use the longer default
    timeouts.
    """
    code = "import sys, ray; ray.init(address=sys.argv[1], include_dashboard=False, log_to_driver=False)"
    done = subprocess.run(  # noqa: S603 - our own code
        [interpreter(), "-c", code, address], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        _, _, reason = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1].partition(": ")
        raise ConnectionError(reason or done.stderr)
