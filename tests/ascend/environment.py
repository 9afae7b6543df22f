"""The environment of a process that is to see simulated Ascend devices."""

from __future__ import annotations

import os
from pathlib import Path

from tests.ascend.cann.build import build

_HERE = Path(__file__).parent


def environment(**settings: str | int) -> dict[str, str]:
    """This process's environment with the simulated CANN in it.

    `settings` are those of the library, without ASCEND_SIM_ and in small letters: devices, memory_bytes, trace, soc,
    fail, ...; a name in capitals is that of a variable as it stands.
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
