"""The check of the NPU driver: its version, its library and its device files."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor.machine import ASCEND, Machine

_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_INSTALLED = "/etc/ascend_install.info"
_LIBRARY = "libascend_hal.so"
_DOCKER = (
    "in a container, pass --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm "
    f"--device /dev/hisi_hdc -v {ASCEND}/driver/lib64:{ASCEND}/driver/lib64:ro -v "
    f"{ASCEND}/driver/version.info:{ASCEND}/driver/version.info:ro"
)


def version(machine: Machine) -> str | None:
    """Return the driver's version, such as 25.5.1, or None if it is unknown."""
    return machine.setting(_version_file(machine), "Version")


def inner_version(machine: Machine) -> str | None:
    """Return the internal version, such as V100R001C23SPC006B220, or None. CANN lists drivers by this version."""
    return machine.setting(_version_file(machine), "Innerversion")


def findings(machine: Machine) -> Iterator[Finding]:
    """Report the state of the driver and of its device files."""
    yield _driver(machine)
    yield _device_files(machine)


def _version_file(machine: Machine) -> str:
    return f"{_folder(machine)}/version.info"


def _folder(machine: Machine) -> str:
    return f"{machine.setting(_INSTALLED, 'Driver_Install_Path_Param') or ASCEND}/driver"


def _driver(machine: Machine) -> Finding:
    installed, loads = version(machine), machine.loads(_LIBRARY)
    if installed and loads:
        return Finding("npu driver", "ok", f"{installed} in {_folder(machine)}")
    if installed:
        folder = f"{_folder(machine)}/lib64"
        if not machine.exists(folder):
            return Finding("npu driver", "error", f"{installed}, but {folder} does not exist", _DOCKER)
        # CANN does not include this library. Its folder is listed in the host's ld.so.conf.d, but not in a container's.
        advice = f"export LD_LIBRARY_PATH={folder}/driver:{folder}/common:$LD_LIBRARY_PATH"
        return Finding("npu driver", "error", f"{installed}, but the loader does not find {_LIBRARY}", advice)
    if machine.device_ids():
        found = f"the driver is loaded, but {_version_file(machine)} cannot be read"
        return Finding("npu driver", "warning" if loads else "error", found, _DOCKER)
    boards = machine.num_boards()
    found = f"NPUs on the PCI bus: {boards}; " if boards else ""
    found += f"no driver: {_version_file(machine)} and /dev/davinci* do not exist"
    return Finding(
        "npu driver", "error", found, f"install the driver and firmware of Ascend HDK, then reboot; {_DOCKER}"
    )


def _device_files(machine: Machine) -> Finding:
    ids = machine.device_ids()
    missing = [node for node in _NODES if not machine.exists(node)]
    if not ids:
        missing.insert(0, "/dev/davinci0")
    if missing:
        advice = f"{_DOCKER}; on the host, install the driver and reboot"
        return Finding("npu device files", "error", f"{', '.join(missing)}: missing", advice)
    nodes = [*(f"/dev/davinci{one}" for one in ids), *_NODES]
    denied = [node for node in nodes if not os.access(machine.path(node), os.R_OK | os.W_OK, effective_ids=True)]
    if denied:
        group = machine.setting(_INSTALLED, "UserGroup") or "HwHiAiUser"
        advice = (
            f"usermod -aG {group} USER, then log in again; in a container, --group-add with the number that "
            f"`stat -c %g {denied[0]}` prints; or install the driver with --install-for-all"
        )
        found = f"{', '.join(denied)}: user {os.geteuid()} may not read and write them; their group is {group}"
        return Finding("npu device files", "error", found, advice)
    return Finding("npu device files", "ok", f"number of NPUs: {len(ids)} (/dev/davinci{', '.join(map(str, ids))})")
