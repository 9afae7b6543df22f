"""The devices of an engine that shares its host with other engines of the service."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mindie_mm.device import open_device
from mindie_mm.engine.ranks import Ranks
from mindie_mm.engine.requests.engine_messages import Replica
from mindie_mm.errors import DeviceError
from mindie_mm.settings.cgroup import available_cpus, read
from mindie_mm.settings.config import EngineConfig, kind_of_name

_CPUS = Path("/sys/devices/system/cpu")


def num_devices(config: EngineConfig) -> int:
    """Return the number of visible devices that the setting `device` allows. The CPU is one device.

    Raises:
        InputError, DeviceError: The device is unknown, or cannot be used.

    """
    kind = type(open_device(config.device))
    return 1 if config.device != kind_of_name(config.device) else kind.count()


def placed(config: EngineConfig, replica: Replica, ranks: Ranks) -> EngineConfig:
    """Return the settings of one engine of a service, with a device of its own.

    On the CPU, each engine gets its share of the processors, and this thread and its later children are bound to them.
    If the engine has ranks, `join` has given each rank its device.

    Raises:
        DeviceError: The service has more engines than devices, or more than processors.

    """
    if replica.count == 1:
        return config
    name = ranks.run_on_all(lambda: _require_devices(config, replica))
    if name != "cpu":
        return config if config.tensor_parallel > 1 else replace(config, device=f"{name}:{replica.number}")
    if config.num_threads:
        return config
    num_threads = max(1, ranks.num_threads() // replica.count)
    os.sched_setaffinity(0, shares(os.sched_getaffinity(0), replica.count)[replica.number])
    return replace(config, num_threads=num_threads)


def _require_devices(config: EngineConfig, replica: Replica) -> str:
    """Return the name of the device without an index. Raise DeviceError if there are too few devices."""
    kind = type(open_device(config.device))
    wanted, found = f"replicas is {replica.count}", kind.count()
    if kind.name == "cpu":
        if (num_cpus := available_cpus()) < replica.count:
            raise DeviceError(f"{wanted}, but the number of CPUs is {num_cpus}; lower replicas")
    elif found < replica.count * config.tensor_parallel:
        each = f", each on {config.tensor_parallel} devices" if config.tensor_parallel > 1 else ""
        raise DeviceError(
            f"{wanted}{each}, but the number of visible {kind.name} devices is {found}; lower replicas, or make more "
            "devices visible"
        )
    return kind.name


def shares(cpus: set[int], count: int) -> list[set[int]]:
    """Divide `cpus` into `count` disjoint sets of nearly equal size. Threads of one core and one socket stay together.

    There must be at least `count` CPUs.
    """
    ordered = sorted(cpus, key=_place)
    return [set(ordered[len(cpus) * i // count : len(cpus) * (i + 1) // count]) for i in range(count)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return the socket and the core of a CPU, and its number."""
    folder = _CPUS / f"cpu{cpu}" / "topology"
    socket, core = (read(folder / name).strip() for name in ("physical_package_id", "core_id"))
    return int(socket or 0), int(core or cpu), cpu
