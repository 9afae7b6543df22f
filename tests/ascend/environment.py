"""Environment of a process with simulated Ascend devices."""

from __future__ import annotations

import os
from pathlib import Path

from tests.ascend.cann.build import build

_HERE = Path(__file__).parent


def environment(**settings: str | int) -> dict[str, str]:
    """Return this process's environment with the simulated CANN.

    Lower-case `settings` configure the simulator and become variables such as ASCEND_SIM_DEVICES:
    devices          number of devices, 0 to 8 (default 1), limited by ASCEND_RT_VISIBLE_DEVICES
    memory_bytes     memory of each device (8 GiB), counted separately in each process
    others_bytes     part of the memory that other processes appear to use (0)
    poison_bytes     number of bytes of fresh device memory to fill with 0xFF (32 MiB)
    soc, cann        name of the device and release of CANN (Ascend910B1, 9.1.0)
    trace            file to append each call of CANN and of torch_npu's fused operators to: seconds, process, thread,
                     name, arguments
    fail             comma-separated rules: "name=code" (every call), "name=code@N" (only call N), "name=code@N+" (from
                     call N on)
    races            0 allows the use of memory that another stream may still write (default 1: an error)
    patience_ms      time that a collective waits for a synchronisation before the device runs it by itself (20)
    missing          comma-separated operators that this CANN lacks: torch_npu's by name, or as npu_rms_norm@48 for a
                     width of the first tensor, or torch's such as aten::matmul
    idle             comma-separated operators of torch that leave their results' memory unwritten

    Upper-case `settings` are environment variables.
    """
    folder = build()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_SIM_")}
    paths = [str(_HERE / "site"), str(_HERE.parents[1]), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # code that needs torch_npu imports it, not torch
        "TASK_QUEUE_ENABLE": "0",  # calls reach CANN in the thread that makes them
        "HCCL_CONNECT_TIMEOUT": "60",
        "HCCL_EXEC_TIMEOUT": "60",
    }
    for name, value in settings.items():
        variables[name if name.isupper() else f"ASCEND_SIM_{name.upper()}"] = str(value)
    return variables
