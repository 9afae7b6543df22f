"""A simulated Ascend machine: a folder with the files of the driver, CANN and the kernel, and with an npu-smi."""

import platform
from pathlib import Path

RULE = "+===========================+===============+====================================================+"

VERSION_INFO = """\
Version=25.5.1
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C23SPC006B220
compatible_version=[V100R001C30],[V100R001C13],[V100R001C15],[V100R001C17]
compatible_version_fw=[7.0.0,8.9.9]
"""
INSTALL_INFO = """\
UserName=HwHiAiUser
UserGroup=HwHiAiUser
Driver_Install_Type=full
Driver_Install_Path_Param=/usr/local/Ascend
Driver_Install_For_All=no
"""
TOOLKIT_INFO = """\
package_name=Ascend-cann-toolkit
version={version}
innerversion=V100R001C26SPC001B210
compatible_version=[V100R001C15],[V100R001C18,V100R001C25]
arch={arch}
os=linux
path={home}/{arch}-linux
"""
TCP_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def smi_table(health=("OK", "OK"), used=(3397, 3395), processes=(), first=0):
    """Return the output of `npu-smi info` for 910B2 cards, as in vllm-project/vllm-ascend#1767 and #2534.

    `first` is the number of the first card. It may be above 0 in a container that has only some of the host's cards.
    """
    lines = [
        "+------------------------------------------------------------------------------------------------+",
        "| npu-smi 25.5.1                   Version: 25.5.1                                               |",
        "+---------------------------+---------------+----------------------------------------------------+",
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
        RULE,
    ]
    for npu, (state, mib) in enumerate(zip(health, used, strict=True), first):
        lines += [
            f"| {npu}     910B2               | {state:<13} | 96.4        37                0    / 0             |",
            f"| 0                         | 0000:C{npu}:00.0  | 0           0    / 0          {mib} / 65536         |",
            RULE,
        ]
    lines.append("+---------------------------+---------------+----------------------------------------------------+")
    lines.append("| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |")
    lines.append(RULE)
    for npu in range(first, first + len(health)):
        rows = [one for one in processes if one[0] == npu]
        for _, pid, name, mib in rows:
            lines.append(f"| {npu}       0                 | {pid:<13} | {name:<24} | {mib:<23} |")
        if not rows:
            lines.append(f"| No running processes found in NPU {npu:<60} |")
        lines.append(RULE)
    return "\n".join(lines)


class AscendTree:
    """A healthy machine with two NPUs, driver 25.5.1 and, by default, CANN 9.2.0."""

    def __init__(self, root: Path, cann: str = "9.2.0") -> None:
        self.root = root
        self.home = f"/usr/local/Ascend/cann-{cann}"
        arch = platform.machine()
        for node in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
            self.write(f"/dev/{node}", "")
        self.write("/etc/ascend_install.info", INSTALL_INFO)
        self.write("/etc/ld.so.conf.d/ascend_driver_so.conf", "/usr/local/Ascend/driver/lib64/driver\n")
        self.write("/usr/local/Ascend/driver/version.info", VERSION_INFO)
        self.write("/usr/local/Ascend/driver/lib64/driver/libascend_hal.so", "")
        self.write(f"{self.home}/set_env.sh", "")
        self.write(f"{self.home}/lib64/libhccl.so", "")
        info = TOOLKIT_INFO.format(version=cann, arch=arch, home=self.home)
        self.write(f"{self.home}/{arch}-linux/ascend_toolkit_install.info", info)
        self.at("/usr/local/Ascend/cann").symlink_to(f"cann-{cann}")
        self.write("/proc/net/tcp", TCP_HEAD)
        self.write("/proc/net/tcp6", TCP_HEAD)
        self.write("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
        self.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60031\n")
        self.npu_smi(smi_table())

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that set_env.sh sets."""
        return {
            "ASCEND_HOME_PATH": self.home,
            "LD_LIBRARY_PATH": f"{self.home}/lib64",
            "PATH": f"{self.at('/bin')}:/bin",
        }

    def at(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def write(self, absolute: str, text: str) -> Path:
        path = self.at(absolute)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def remove(self, *absolutes: str) -> None:
        for absolute in absolutes:
            self.at(absolute).unlink()

    def npu_smi(self, says: str, status: int = 0) -> None:
        """Write an npu-smi that prints `says` and exits with `status`."""
        script = f"#!/bin/sh\n[ \"$*\" = info ] || exit 2\ncat <<'END'\n{says}\nEND\nexit {status}\n"
        self.write("/bin/npu-smi", script).chmod(0o755)

    def torch_npu(self, version: str, code: str) -> str:
        """Write a torch_npu whose import runs `code`, and return the folder to add to PYTHONPATH.

        Like the real torch_npu, the package registers itself, so that torch imports it.
        """
        self.write("/site/torch_npu/__init__.py", f"{code}\n\n\ndef _autoload():\n    pass\n")
        folder = f"/site/torch_npu-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
        self.write(f"{folder}/entry_points.txt", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        return str(self.at("/site"))
