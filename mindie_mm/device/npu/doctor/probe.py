"""`python -m mindie_mm.device.npu.doctor.probe`: has the NPU multiply and says in JSON what it has, or fails."""

from __future__ import annotations

import json

import torch

from mindie_mm.device.npu import NPU
from mindie_mm.device.npu.doctor.runtime import ANSWER


def main() -> None:
    """Prints a line: ANSWER, and {"count": ..., "name": ..., "free_bytes": ..., "total_bytes": ...}."""
    if reason := NPU.missing():
        raise SystemExit(reason)
    npu = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
    # Starts it: before, it is asked nothing (107002). Memory is there without CANN's operators, a product is not.
    ones = torch.ones(16, 16, dtype=torch.float16, device=NPU().torch_device)
    if (total := (ones @ ones).sum().item()) != 16**3:
        raise SystemExit(f"the NPU multiplies wrongly: {16**3} comes out as {total:g}")
    device = ones.device
    free_bytes, total_bytes = npu.mem_get_info(device)
    report = {
        "count": npu.device_count(),
        "name": npu.get_device_name(device),
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
    }
    # In one piece, which a pipe keeps whole, and a line of its own, whatever was printed before.
    print(f"\n{ANSWER}{json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main()
