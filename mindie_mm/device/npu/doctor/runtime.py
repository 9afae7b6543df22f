"""The check that an NPU starts. It runs in a separate process, because the driver may crash or hang the process."""

from __future__ import annotations

import json
import re
from typing import Any

from mindie_mm.device import programs
from mindie_mm.device.finding import Finding
from mindie_mm.device.npu.doctor.machine import Software
from mindie_mm.device.npu.doctor.symptoms import explain
from mindie_mm.processes.interpreter import interpreter

# Importing torch_npu takes 10 s, and starting a device takes some seconds. A faulty device never answers.
_TIMEOUT_S = 120.0
_GiB = 2**30
_LITTLE = 0.5
"""If the share of free memory is below this value, another process must be using the NPU."""
ANSWER = "mindie_mm.device.npu.doctor.probe: "
"""Prefix of the line that the probe prints. CANN may print its log on standard output before and after this line."""


def finding(software: Software, timeout_s: float = _TIMEOUT_S) -> Finding:
    """Start an NPU in a separate process and report the result."""
    subject = "npu runtime"
    if software.torch_npu is None:
        # Name only this version, because a later version would install its own torch, which is a CUDA build on PyPI.
        advice = f"pip install torch_npu=={software.torch.partition('+')[0]}"
        return Finding(subject, "error", "torch_npu is not installed", advice)
    command = [interpreter(), "-P", "-m", "mindie_mm.device.npu.doctor.probe"]
    ended = programs.run(command, timeout_s)
    if ended is None:
        advice = "check npu-smi info -t health -i NPU; reset the NPU when no process uses it, or reboot"
        return Finding(subject, "error", f"the NPU did not respond within {timeout_s:.0f} s", advice)
    if ended.status:
        return _failed(subject, ended.stderr, ended.status)
    answer = _answer(ended.stdout)
    if answer is None:
        advice = "run python -m mindie_mm.device.npu.doctor.probe; see CANN's log, ~/ascend/log/debug/plog, and dmesg"
        return Finding(
            subject, "error", "the process that starts the NPU exited without an error and without a result", advice
        )
    free, total = answer["free_bytes"], answer["total_bytes"]
    found = f"{answer['count']} x {answer['name']}, {free / _GiB:.1f} of {total / _GiB:.1f} GiB free on the first"
    if free < _LITTLE * total:
        advice = "stop the processes that use it (npu-smi info), or choose another NPU with ASCEND_RT_VISIBLE_DEVICES"
        return Finding(subject, "warning", found, advice)
    return Finding(subject, "ok", found)


def _answer(stdout: str) -> dict[str, Any] | None:
    """Return the report in the output of the probe, or None if there is no report."""
    match = re.search(rf"^{re.escape(ANSWER)}(.*)$", stdout, re.MULTILINE)
    return json.loads(match.group(1)) if match else None


def _failed(subject: str, stderr: str, status: int) -> Finding:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    symptom = explain(stderr)
    if symptom:
        line = next((line for line in lines if explain(line) is symptom), lines[-1])
        return Finding(subject, "error", f"{symptom.meaning}: {line[:300]}", symptom.advice)
    # The exception is at the end of a traceback, but torch_npu adds lines after the traceback.
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)] or lines[-1:]
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    message = errors[-1][:300] if errors else ""
    advice = "see CANN's log, ~/ascend/log/debug/plog, and dmesg"
    return Finding(subject, "error", f"the process that starts the NPU exited with {ended}: {message}", advice)
