"""Tests with torch_npu's default task queue and its stream sanitizer, which sees missing waits and record_stream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ascend.processes import call
from tests.ascend.test_engine import answers

SANITIZED: dict[str, Any] = {"TASK_QUEUE_ENABLE": 1, "TORCH_NPU_SANITIZER": 1}


def sanitized(work: Any, *arguments: Any) -> tuple[Any, list[str]]:
    """Return the result of `work` and what the sanitizer reports."""
    import torch
    import torch_npu  # noqa: F401
    from torch_npu.npu._sanitizer import npu_sanitizer

    torch.zeros(1, device="npu")
    npu_sanitizer.enable()
    reports = []
    try:
        result = work(*arguments)
    except torch.cuda._sanitizer.CUDASanitizerErrors as errors:
        result, reports = None, [str(error) for error in errors.errors]
    torch.npu.synchronize()
    npu_sanitizer.event_handler.flush_record_stream_warnings()
    npu_sanitizer.dispatch.__exit__(None, None, None)
    return result, reports + [repr(error) for error in npu_sanitizer.event_handler.record_stream_errors]


def two_streams(waits: bool, records: bool) -> list[float]:
    """Use a result of one stream in another, and free it while it may still be read."""
    import torch

    side = torch.npu.Stream()
    values = torch.ones(4, device="npu") * 3
    if waits:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        twice = values + values
        if records:
            values.record_stream(side)
    del values
    side.synchronize()
    twice.record_stream(torch.npu.current_stream())
    found: list[float] = twice.cpu().tolist()
    return found


@pytest.mark.parametrize(
    ("waits", "records", "report"),
    [(True, True, None), (False, True, "possible data race"), (True, False, "MissingRecordStreamError")],
)
def test_the_sanitizer_sees_missing_waits_and_records(waits, records, report):
    result, reports = call(sanitized, two_streams, waits, records, races=0, **SANITIZED)
    if report is None:
        assert (result, reports) == ([6.0] * 4, [])
    else:
        assert any(report in one for one in reports), reports


def test_an_engine_waits_and_records_its_use_of_streams():
    # The sanitizer takes operators that are captured for operators that run.
    found, reports = call(sanitized, answers, "wide", {"enforce_eager": True}, **SANITIZED)
    assert reports == []
    assert {number: len(tokens) for number, (_, tokens) in found["found"].items()} == dict.fromkeys("01234", 8)
