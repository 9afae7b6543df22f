"""The check of HCCL's requirements if there are several NPUs: free ports, and a user in /etc/passwd."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor.machine import Machine

_BASE, _NUM_PORTS = 60000, 32
"""Default of HCCL_IF_BASE_PORT, and the number of ports: 32 since CANN 8.2, 16 before.

Source: hiascend.com, environment variables.
"""
_LEAST, _MOST = 1024, 65520
_IPV4 = "/proc/sys/net/ipv4"


def findings(machine: Machine, num_visible: int) -> Iterator[Finding]:
    """Report whether the user has a name, and whether the ports are free and reserved.

    Yield nothing if only one NPU is visible, because HCCL is used only with several NPUs.
    """
    if num_visible < 2:
        return
    yield from _user()
    ranges = machine.variables.get("HCCL_HOST_SOCKET_PORT_RANGE")  # takes precedence over HCCL_IF_BASE_PORT
    base = machine.variables.get("HCCL_IF_BASE_PORT", str(_BASE))
    if ranges == "auto":
        yield Finding("HCCL ports", "ok", "chosen by the system (HCCL_HOST_SOCKET_PORT_RANGE)")
        return
    if ranges is None and not (base.isdecimal() and _LEAST <= int(base) <= _MOST):
        found = f"HCCL_IF_BASE_PORT={base!r} must be from {_LEAST} to {_MOST}"
        yield Finding("HCCL ports", "warning", found, f"unset it, or set it to {_BASE}")
        return
    wanted = _numbers(ranges) if ranges else set(range(int(base), int(base) + _NUM_PORTS))
    if not wanted:
        advice = 'set it to ports and ranges separated by commas, such as "60000-60050", or to auto'
        yield Finding("HCCL ports", "warning", f"HCCL_HOST_SOCKET_PORT_RANGE is {ranges!r}", advice)
        return
    span = ranges or f"{min(wanted)}-{max(wanted)}"
    if taken := sorted(wanted & _bound(machine)):
        # HCCL reports used ports as EJ0003, EI0019 or EI0020, "Failed to bind the IP port".
        advice = (
            "free them, or export HCCL_HOST_SOCKET_PORT_RANGE=auto (with CANN before 8.1, change HCCL_IF_BASE_PORT)"
        )
        found = (
            f"{', '.join(map(str, taken))} of {span} are in use by other programs; --tensor-parallel would fail to bind"
        )
        yield Finding("HCCL ports", "warning", found, advice)
    elif wanted & _ephemeral(machine) - _numbers(machine.read(f"{_IPV4}/ip_local_reserved_ports").strip()):
        advice = f"sysctl -w net.ipv4.ip_local_reserved_ports={span}"
        found = f"{span} are free, but the kernel may give them to other programs"
        yield Finding("HCCL ports", "warning", found, advice)
    else:
        yield Finding("HCCL ports", "ok", f"{span} are free and reserved")


def _user() -> Iterator[Finding]:
    """Report a user without a name. A container may run as such a user (vllm-project/vllm-ascend#9490)."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        found = f"user {os.geteuid()} is not in /etc/passwd; --tensor-parallel would fail (HcclGetRootInfo, code 19)"
        advice = "run as a user that is in /etc/passwd (in this project's image, 10001), or add a line for the user"
        yield Finding("HCCL user", "warning", found, advice)


def _bound(machine: Machine) -> set[int]:
    """Return the local ports of all sockets that are listening, connected or in TIME_WAIT."""
    ports = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in machine.read(file).splitlines()[1:]:
            _, local, *_ = line.split()
            ports.add(int(local.rsplit(":", 1)[1], 16))
    return ports


def _ephemeral(machine: Machine) -> set[int]:
    """Return the ports that the kernel assigns to outgoing connections."""
    bounds = machine.read(f"{_IPV4}/ip_local_port_range").split()
    return set(range(int(bounds[0]), int(bounds[1]) + 1)) if len(bounds) == 2 else set()


def _numbers(ranges: str) -> set[int]:
    """Return the ports in a string such as 60000,60050-60060. Return an empty set if the string is malformed."""
    numbers: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return set()
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
