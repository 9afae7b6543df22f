"""Environment variables of a process with simulated Ascend devices."""

from __future__ import annotations

import os
from pathlib import Path

from tests.ascend.cann.build import build

_HERE = Path(__file__).parent


def environment(**settings: str | int) -> dict[str, str]:
    """Return this process's environment with the simulated CANN.

    Upper-case `settings` are environment variables. Lower-case `settings` configure the simulator, and become variables
    such as ASCEND_SIM_DEVICES:

    - `devices`: number of devices, 0 to 8, limited by ASCEND_RT_VISIBLE_DEVICES. The default is 1.
    - `memory_bytes`: memory of each device, counted separately in each process. The default is 8 GiB.
    - `others_bytes`: part of the memory that other processes appear to use. The default is 0.
    - `poison_bytes`: number of bytes of newly allocated device memory that are filled with 0xFF. The default is 32 MiB.
    - `soc`: name of the device. The default is Ascend910B1.
    - `cann`: release of CANN. The default is 9.1.0.
    - `driver`: release of the driver. The default is 25.5.1.
    - `without`: comma-separated functions that this CANN's libraries lack. This needs a new process.
    - `kernel`: release of Linux. Up to 5.10, copies of registered memory fail.
    - `page_bytes`: page size of the host. The default is 4096.
    - `register_bytes`: host memory that can be registered. The default is 200 GiB.
    - `trace`: file to which a line is appended for each call to CANN and to torch_npu's fused operators. A line
      contains the time in seconds, the process, the thread, the name and the arguments.
    - `fail`: comma-separated rules that make calls fail. "name=code" applies to every call, "name=code@N" only to call
      N, and "name=code@N+" to call N and all later calls.
    - `races`: whether a call fails if it uses memory that another stream may still write. The default is 1, which means
      yes.
    - `clock`: whether virtual time passes (virtual_time.py). The default is 0, which means no. The host's calls cost
      `launch_ns` (30000), `copy_ns` (10000), `sync_ns` (10000) and `event_ns` (2000). A launch takes so long because
      Qwen2.5-7B took 17.2 ms for the 550 launches of a token (issue 878 of vllm-project/vllm-ascend). Kernels cost
      `kernel_ns` (3000) and the time for `memory_bytes_per_us` (1200000) or `flops_per_us` (280000000), whichever is
      longer. The defaults are three quarters of what a 910B can do. Collectives cost `link_ns` (10000) and the time for
      `link_bytes_per_us` (25000). Copies to and from the host have `bus_bytes_per_us` (20000).
    - `patience_ms`: time that a collective waits for a synchronization before the device runs it without one. The
      default is 20.
    - `timeout_ms`: time that a graph waits for the update of an operator before it fails. The default is 1000.
    - `missing`: comma-separated operators that this CANN lacks: names of torch_npu's operators, names with a width of
      the first tensor, such as npu_rms_norm@48, or names of torch's operators, such as aten::matmul.
    - `wrong`: comma-separated faults "operator:fault" of torch_npu's operators (operators/wrong.py). Such an operator
      returns wrong results.
    - `idle`: comma-separated operators of torch that do not write their results, which are then uninitialized memory.
    """
    folder = build(str(settings.pop("without", "")))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_SIM_")}
    paths = [str(_HERE / "site"), str(_HERE.parents[1]), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch does not import torch_npu; code that needs torch_npu does
        "TASK_QUEUE_ENABLE": "0",  # calls reach CANN in the calling thread
        "HCCL_CONNECT_TIMEOUT": "60",
        "HCCL_EXEC_TIMEOUT": "60",
    }
    for name, value in settings.items():
        variables[name if name.isupper() else f"ASCEND_SIM_{name.upper()}"] = str(value)
    return variables
