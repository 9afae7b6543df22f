"""The inputs of the checks: system files, CANN's environment variables, and installed Python packages."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mindie_mm.settings.environment import foreign

ASCEND = "/usr/local/Ascend"
"""Default folder of the driver and of CANN when root installs them."""

_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HCCL_IF_BASE_PORT",
    "HCCL_HOST_SOCKET_PORT_RANGE",
    "HOME",
    "LD_LIBRARY_PATH",
    "PATH",
)
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")
_HUAWEI, _PROCESSING_ACCELERATOR = "0x19e5", "0x1200"
"""PCI vendor of an NPU, and the prefix of its PCI class, as in /sys/bus/pci and in the output of `lspci -nn`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """System files and environment variables. Absolute paths of files are resolved below `root`."""

    root: Path
    variables: Mapping[str, str]

    @classmethod
    def here(cls, root: Path) -> Machine:
        """Return the machine whose files are below `root`, with the environment variables of this process."""
        return cls(root, foreign(_VARIABLES))

    def path(self, absolute: str) -> Path:
        """Return the path of a file below `root`."""
        return self.root / absolute.lstrip("/")

    def exists(self, absolute: str) -> bool:
        """Return whether the file or folder exists and this user may see it."""
        try:
            return self.path(absolute).exists()
        except OSError:
            return False

    def read(self, absolute: str) -> str:
        """Return the text of a file, or an empty string if it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return ""

    def setting(self, absolute: str, key: str) -> str | None:
        """Return the value of the line KEY=VALUE in a file, or None. The case of the key is ignored."""
        match = re.search(rf"^{key}\s*=\s*(.+?)\s*$", self.read(absolute), re.MULTILINE | re.IGNORECASE)
        return match.group(1) if match else None

    def device_ids(self) -> list[int]:
        """Return the number N of each /dev/davinciN, ascending."""
        names = (path.name for path in self.path("/dev").glob("davinci*"))
        return sorted(int(name[7:]) for name in names if name[7:].isdecimal())

    def num_boards(self) -> int:
        """Return the number of NPUs on the PCI bus. They are found even without a driver."""
        devices = (f"/{path.relative_to(self.root)}" for path in self.path("/sys/bus/pci/devices").glob("*"))
        return sum(
            self.read(f"{device}/vendor").strip() == _HUAWEI
            and self.read(f"{device}/class").startswith(_PROCESSING_ACCELERATOR)
            # HiSilicon's compression engines have the same class. NPUs have the ids d100, d500, d801, d802 and d803.
            and self.read(f"{device}/device").startswith(("0xd1", "0xd5", "0xd8"))
            for device in devices
        )

    def loads(self, library: str) -> bool:
        """Return whether the loader finds `library` in LD_LIBRARY_PATH, ld.so.conf or the system's folders."""
        return any(self.exists(f"{folder}/{library}") for folder in self._library_folders())

    def _library_folders(self) -> Iterator[str]:
        yield from filter(None, self.variables.get("LD_LIBRARY_PATH", "").split(":"))
        for file in ("/etc/ld.so.conf", *self._configurations()):
            yield from (line.strip() for line in self.read(file).splitlines() if line.startswith("/"))
        yield from _SYSTEM_LIBRARIES
        yield from (f"{folder}/{platform.machine()}-linux-gnu" for folder in _SYSTEM_LIBRARIES)

    def _configurations(self) -> list[str]:
        return [f"/{path.relative_to(self.root)}" for path in self.path("/etc/ld.so.conf.d").glob("*.conf")]


@dataclass(frozen=True, slots=True)
class Software:
    """The versions of Python packages that must be compatible with each other."""

    torch: str
    """Version of torch with the local part, such as 2.13.0+cpu."""
    accelerator: str | None
    """Accelerator that torch is built for, such as "CUDA 13.0" or "ROCm 7.1". None for a CPU build."""
    torch_npu: str | None
    architecture: str
    """Output of `uname -m`."""

    @classmethod
    def installed(cls) -> Software:
        """Return the versions in this environment."""
        try:
            torch_npu = version("torch_npu")
        except PackageNotFoundError:
            torch_npu = None
        cuda, hip = torch.version.cuda, torch.version.hip
        accelerator = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else None
        return cls(torch.__version__, accelerator, torch_npu, platform.machine())
