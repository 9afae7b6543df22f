"""A program that multiplies matrices on the NPU and prints the NPU's properties as JSON.

The program exits with an error if the NPU cannot be used. Run it as `python -m mindie_mm.device.npu.doctor.probe`.
"""

from __future__ import annotations

import json

import torch

from mindie_mm.device.npu import NPU
from mindie_mm.device.npu.doctor.runtime import ANSWER


def main() -> None:
    """Print one line with ANSWER and {"count": ..., "name": ..., "free_bytes": ..., "total_bytes": ...}."""
    if reason := NPU.missing():
        raise SystemExit(reason)
    npu = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    # This line initializes the NPU, because queries would otherwise fail (107002). The matrix product shows whether
    # CANN's operators are installed, because allocation works without them.
    ones = torch.ones(16, 16, dtype=torch.float16, device=NPU().torch_device)
    if (total := (ones @ ones).sum().item()) != 16**3:
        raise SystemExit(f"the NPU computes wrong results: a sum of products is {total:g} instead of {16**3}")
    device = ones.device
    free_bytes, total_bytes = npu.mem_get_info(device)
    report = {
        "count": npu.device_count(),
        "name": npu.get_device_name(device),
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
    }
    # A single write keeps the report in one piece in a pipe. The newline separates it from earlier output.
    print(f"\n{ANSWER}{json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main()
