"""The check of versions: torch with torch_npu, torch_npu with CANN, and CANN with the driver.

Only pairs that are known to fail are errors. A pair that is missing from these tables may still work and is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor import driver
from mindie_mm.device.npu.doctor.cann import CANN
from mindie_mm.device.npu.doctor.machine import Machine, Software

# Version of CANN with which each version of torch_npu was released. Sources: COMPATIBILITY.md of
# gitcode.com/Ascend/pytorch, and the release notes of TorchNPU 26.2.0 (docs/zh/release_notes, October 2026).
_RELEASED_WITH = {
    "2.10.0": "9.0.0",
    "2.10.0.post4": "9.1.0",
    "2.11.0": "9.1.0",
    "2.12.0": "9.1.0",
    "2.10.0.post7": "9.2.0",
    "2.11.0.post3": "9.2.0",
    "2.12.0.post3": "9.2.0",
    "2.13.0": "9.2.0",
    "2.14.0": "9.2.0",
}
# Series of CANN that work with TorchNPU 7.3 to 26.2, which are all versions above. Source: the same release notes.
_COMPATIBLE = ("8.5", "9.0", "9.1", "9.2")
# Series of drivers that work with each series of CANN. Source: release notes of CANN 8.5.0 and 9.1.1 (hiascend.com,
# gitcode.com/cann).
_DRIVERS = {
    "8.5": ("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1"),
    "9.0": ("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1"),
    "9.1": ("25.2", "25.3", "25.5", "25.7", "26.0", "26.1"),
}
_TABLE = "https://www.hiascend.com/developer/download/compatibility lists compatible versions"


def findings(machine: Machine, software: Software, cann: CANN | None) -> Iterator[Finding]:
    """Report on each pair whose two parts are installed."""
    if software.torch_npu:
        yield _torch_build(software)
        yield _torch(software.torch, software.torch_npu)
        if cann and cann.version:
            yield _torch_npu(software.torch_npu, cann.version)
    installed = driver.version(machine)
    if cann and cann.version and installed:
        yield _driver(cann, cann.version, installed, driver.inner_version(machine) or "")


def _torch_build(software: Software) -> Finding:
    subject, version = "torch build", _release(software.torch)
    if software.accelerator is None:
        return Finding(subject, "ok", f"{software.torch}, built for the CPU")
    # _check_device_conflict in torch_npu/__init__.py checks what torch was built for, not which devices exist.
    found = f"{software.torch} is built for {software.accelerator}; torch_npu needs the CPU build"
    advice = f"pip install torch=={version} --index-url https://download.pytorch.org/whl/cpu"
    if software.architecture == "aarch64":  # torch_npu's README names the CPU index for aarch64 since 2.11
        advice += (
            "; PyPI has only CUDA builds for aarch64, so install this version before other packages that need torch"
        )
    return Finding(subject, "error", found, advice)


def _torch(torch: str, torch_npu: str) -> Finding:
    wanted = _release(torch_npu)
    if _release(torch) != wanted:
        advice = f"pip install torch=={wanted} --index-url https://download.pytorch.org/whl/cpu"
        return Finding(
            "torch and torch_npu", "error", f"torch_npu {torch_npu} is for torch {wanted}, not {torch}", advice
        )
    return Finding("torch and torch_npu", "ok", f"{torch} and {torch_npu}")


def _torch_npu(torch_npu: str, cann: str) -> Finding:
    subject, pair = "torch_npu and CANN", f"{torch_npu} and {cann}"
    released_with = _RELEASED_WITH.get(torch_npu)
    if released_with is None:
        return Finding(subject, "warning", f"{pair}: compatibility of this torch_npu is unknown", _TABLE)
    if _series(cann) == _series(released_with):
        return Finding(subject, "ok", pair)
    found = f"{pair}: this torch_npu was released with CANN {released_with}"
    if _series(cann) in _COMPATIBLE:
        return Finding(subject, "ok", f"{found}, and is documented to work with {_series(cann)}")
    return Finding(subject, "warning", f"{found}, and is documented to work with {', '.join(_COMPATIBLE)}", _TABLE)


def _driver(cann: CANN, version: str, driver: str, inner: str) -> Finding:
    subject, pair = "CANN and driver", f"CANN {version}, driver {driver}"
    drivers = _DRIVERS.get(_series(version), ())
    if _series(driver) in drivers or _suits(inner, cann.drivers):
        return Finding(subject, "ok", pair)
    if drivers:
        found = f"{pair}: the release notes of this CANN list the drivers {', '.join(drivers)}"
        # A driver that is older than CANN requires reports drvRet=87 or 507899.
        return Finding(
            subject, "warning", found, f"update the driver (Ascend HDK), or install a CANN that supports it; {_TABLE}"
        )
    return Finding(subject, "warning", f"{pair}: compatibility of this CANN is unknown", _TABLE)


def _suits(inner: str, drivers: str) -> bool:
    """Return whether CANN's list of drivers contains the internal version of this driver.

    An internal version is V100R001C23SPC006B220, for example. The list has single versions and ranges, such as
    [V100R001C15],[V100R001C18,V100R001C23].
    """
    if not (counted := _counted(inner)):
        return False
    bounds = [[_counted(end) for end in group.split(",")] for group in re.findall(r"\[([^]]*)\]", drivers)]
    return any(min(ends) <= counted <= max(ends) for ends in bounds)


def _counted(inner: str) -> tuple[int, ...]:
    match = re.match(r"V(\d+)R(\d+)C(\d+)", inner.strip())
    return tuple(map(int, match.groups())) if match else ()


def _release(version: str) -> str:
    """Return the release part of a version, such as 2.10.0 for 2.10.0.post4 and for 2.10.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match.group() if match else version


def _series(version: str) -> str:
    """Return the series of a version, such as 9.1 for 9.1.0 and for 9.1.RC1."""
    return ".".join(_release(version).split(".")[:2])
