"""The environment of a process that is to see simulated Ascend devices."""

from __future__ import annotations

import os
from pathlib import Path

from tests.ascend.cann.build import build

_HERE = Path(__file__).parent


def environment(**settings: str | int) -> dict[str, str]:
    """This process's environment with the simulated CANN in it.

    `settings` in small letters are the library's, as ASCEND_SIM_ and the name in capitals:
    devices          how many, 0 to 8 (1); ASCEND_RT_VISIBLE_DEVICES is obeyed, too
    memory_bytes     of each device (8 GiB), counted in each process for itself
    others_bytes     what of it other processes are said to use (0)
    poison_bytes     how much of fresh device memory is filled with 0xFF (32 MiB)
    soc, cann        what the device and CANN are called (Ascend910B1, 9.1.0)
    trace            a file to which each call is added, of CANN's and of torch_npu's fused operators: seconds, process,
                     thread, name, arguments
    fail             "name=code" (always), "name=code@N" (the Nth call only), "name=code@N+" (from it on), by comma
    races            0: use of memory that another stream may still write is no error (1)
    patience_ms      how long a collective waits for somebody to synchronise before the device runs it by itself (20)
    missing          operators that this CANN does not have, by comma: of torch_npu by their names, or npu_rms_norm@48
                     where the first tensor is so wide; aten::matmul
    idle             torch's operators that leave the memory of their results as it was, by comma
    A name in capitals is that of a variable as it stands.
    """
    folder = build()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_SIM_")}
    paths = [str(_HERE / "site"), str(_HERE.parents[1]), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported by who needs it, not by torch
        "TASK_QUEUE_ENABLE": "0",  # calls reach CANN in the thread that makes them
        "HCCL_CONNECT_TIMEOUT": "60",
        "HCCL_EXEC_TIMEOUT": "60",
    }
    for name, value in settings.items():
        variables[name if name.isupper() else f"ASCEND_SIM_{name.upper()}"] = str(value)
    return variables
