"""Error texts of torch_npu, CANN and its driver, and what they mean.

Codes are of acl's rt_error_codes.h and of the error code reference of CANN (hiascend.com, maintenance, "error codes").
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that is known."""

    pattern: str
    """Regular expression that finds it."""
    meaning: str
    advice: str


_OCCUPIED = (
    "stop what uses it (npu-smi info, also in other containers); to share one NPU among containers "
    "npu-smi set -t device-share -i NPU -c CHIP -d 1"
)

# The first that is found counts: what is more exact stands before what is more general.
SYMPTOMS = (
    Symptom(
        r"libascend_hal\.so[\d.]*: cannot open shared object|libdrvdsmi\w*\.so[\d.]*: cannot open shared object",
        "the driver's libraries are not on the loader's path",
        "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver:$LD_LIBRARY_PATH; in a container mount "
        "/usr/local/Ascend/driver/lib64",
    ),
    Symptom(
        r"lib(hccl|ascendcl|ge_\w+|graph\w*|opapi|runtime|acl_\w+|register|msprofiler|nnopbase)\.so[\d.]*: cannot open",
        "CANN's libraries are not on the loader's path: its environment is not set in this shell",
        "source /usr/local/Ascend/cann/set_env.sh, until 8.3 /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    # torch_npu/__init__.py, _check_device_conflict
    Symptom(
        r"Two accelerators cannot be used at the same time",
        "torch is a build for another accelerator",
        "install the CPU build, in torch_npu's version: pip install torch --index-url https://download.pytorch.org/whl/cpu",
    ),
    Symptom(
        r"undefined symbol",
        "libraries of different versions: torch, torch_npu or CANN",
        "install the torch that torch_npu names, and source one CANN alone, in a new shell",
    ),
    # EL0020 of CANN 9.1
    Symptom(r"EL0020|occupied by multiple containers", "another container has this NPU", _OCCUPIED),
    Symptom(r"EL0005|resources are busy|-8020\b|device is used", "the NPU is in use, or being reset", _OCCUPIED),
    Symptom(
        r"EL0007|No permission",
        "this user may not use the NPU",
        "usermod -aG HwHiAiUser USER, then log in anew; in a container --group-add",
    ),
    # vllm-project/vllm-ascend#2698 (occupied), mind-cluster's FAQ (not rebooted after an update)
    Symptom(
        r"-8005\b|dcmi mod\w+ initiali[sz]e",
        "the driver does not answer",
        "another container has the NPU, this user is not of its group (HwHiAiUser), or the machine was not "
        "rebooted after the driver was installed",
    ),
    Symptom(
        r"drvRet(Code)?=87|\b507899\b",
        "an internal error of the driver (507899, drvRet=87)",
        f"{_OCCUPIED}; update a driver that is older than CANN wants",
    ),
    Symptom(
        r"E30006|Failed to verify the OPP|not in lib\w*opapi\w*\.so",
        "CANN's operators are not installed, or not of its version",
        "install the ops package of this NPU (until 8.3 the kernels package) in the toolkit's version",
    ),
    Symptom(
        r"\b507033\b",
        "the NPU does not start (507033)",
        "npu-smi info -t health -i NPU; it is ill, in use by another container, or its driver does not suit CANN; "
        "reset it or reboot",
    ),
    # "valid device range is [0, N)" of CANN's page on EE1001
    Symptom(
        r"\b107001\b|EL0002|valid device range is",
        "there is no NPU of that number",
        "see ASCEND_RT_VISIBLE_DEVICES; in a container they count anew from 0",
    ),
    Symptom(
        r"EL0004|\b207001\b|NPU out of memory",
        "its memory is used up",
        "stop what uses it (npu-smi info), or lower --memory-share",
    ),
    Symptom(
        r"EJ0003|EI0019|EI0020|bind the IP port",
        "a port that HCCL listens on is taken",
        "export HCCL_HOST_SOCKET_PORT_RANGE=auto, or another HCCL_IF_BASE_PORT; sysctl -w "
        "net.ipv4.ip_local_reserved_ports=60000-60031",
    ),
    Symptom(
        r"EI0006|Getting socket times out",
        "a rank of the group did not come within HCCL_CONNECT_TIMEOUT (120 s)",
        "see the log of the others: one failed before; else HCCL_CONNECT_TIMEOUT=600, and the same TLS switch on all "
        "NPUs (hccn_tool -i NPU -tls -g)",
    ),
    # The last: CANN reports it beside other errors, too. That of rtGetDevMsg says no more than that a device which did
    # not start has no messages (vllm-project/vllm-omni#2898, hw-native-sys/PTOAS#948).
    Symptom(
        r"EE1001(?!.*rtGetDevMsg)",
        "an argument that CANN refuses",
        "the line says which, such as an ASCEND_RT_VISIBLE_DEVICES; else CANN's log, ~/ascend/log/debug/plog",
    ),
)


def explain(text: str) -> Symptom | None:
    """The first symptom that is in `text`."""
    return next((symptom for symptom in SYMPTOMS if re.search(symptom.pattern, text)), None)
