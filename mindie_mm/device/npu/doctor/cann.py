"""The check of CANN: its installation, version and environment variables."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor.machine import ASCEND, Machine

_LIBRARY = "libhccl.so"
"""A library that torch_npu links with. If the loader does not find it, `import torch_npu` fails."""
_IN_FORCE = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# The default folder is ascend-toolkit/latest until 8.3, and cann since 8.5. Source: hiascend.com, CANN 8.5.0, release
# notes, "changes of the layout".
_USUAL = ("cann", "ascend-toolkit/latest", "nnae/latest", "nnrt/latest")


@dataclass(frozen=True, slots=True)
class CANN:
    """An installation of CANN."""

    home: str
    version: str | None
    """Version, such as 9.1.0 or 8.3.RC1. None if unknown."""
    drivers: str
    """Compatible versions of the driver, such as [V100R001C15],[V100R001C23]. Empty if unknown."""
    in_force: bool
    """True if the environment variables of this installation are set in this process."""


def find(machine: Machine) -> CANN | None:
    """Return the installation whose environment variables are set, or else an installation in a default folder."""
    named = [machine.variables[name] for name in _IN_FORCE if machine.variables.get(name)]
    users = f"{machine.variables['HOME']}/Ascend" if machine.variables.get("HOME") else ASCEND
    usual = [f"{folder}/{place}" for folder in (ASCEND, users) for place in _USUAL]
    for home in (*named, *usual):
        if machine.exists(home):
            in_force = home in named and machine.loads(_LIBRARY)
            return CANN(home, _version(machine, home), _drivers(machine, home), in_force)
    return None


def findings(machine: Machine, cann: CANN | None) -> Iterator[Finding]:
    """Report whether CANN is installed and its environment variables are set."""
    wrong = {name: machine.variables[name] for name in _IN_FORCE if machine.variables.get(name)}
    for name, home in wrong.items():
        if not machine.exists(home):
            advice = "source the set_env.sh of the installed CANN in a new shell"
            yield Finding("CANN", "error", f"{name} is {home}, which does not exist", advice)
            return
    if cann is None:
        advice = (
            "install Ascend-cann-toolkit and the ops package of this NPU (hiascend.com/cann/download), or use "
            "an image from quay.io/ascend/cann"
        )
        yield Finding("CANN", "error", f"not installed: {', '.join(f'{ASCEND}/{place}' for place in _USUAL)}", advice)
    elif not cann.in_force:
        script = _script(machine, cann.home)
        advice = f"source {script}" if script else f"source set_env.sh of {cann.home}"
        found = f"{cann.version or 'unknown version'} in {cann.home}, but its environment is not set: "
        found += f"the loader does not find {_LIBRARY}" if wrong else f"{' and '.join(_IN_FORCE)} are not set"
        yield Finding("CANN", "error", found, f"{advice}; a systemd unit must do this too")
    else:
        yield Finding("CANN", "ok", f"{cann.version or 'unknown version'} in {cann.home}")


def _script(machine: Machine, home: str) -> str | None:
    """Return the path of set_env.sh.

    Up to CANN 8.3, the script is beside CANN's folder. In later versions, it is inside the folder.
    """
    scripts = (f"{home}/set_env.sh", f"{home.rsplit('/', 1)[0]}/set_env.sh")
    return next((script for script in scripts if machine.exists(script)), None)


def _version(machine: Machine, home: str) -> str | None:
    if stated := machine.setting(_install_info(home), "version"):
        return stated
    # version.cfg: toolkit_running_version=[7.7.T20.0.B210:8.1.RC1]
    for name in ("toolkit_running_version", "runtime_running_version"):
        if (value := machine.setting(f"{home}/version.cfg", name)) and ":" in value:
            return value.strip("[]").rsplit(":", 1)[1]
    if stated := machine.setting(f"{home}/version.info", "Version"):
        return stated
    named = re.search(r"cann-(\d[\w.]*)$|ascend-toolkit/(\d[\w.]*)$", home)
    return named.group(1) or named.group(2) if named else None


def _drivers(machine: Machine, home: str) -> str:
    return machine.setting(_install_info(home), "compatible_version") or ""


def _install_info(home: str) -> str:
    return f"{home}/{platform.machine()}-linux/ascend_toolkit_install.info"
