"""Tests for the counters: launches, copies that strides cause, operators on the AI CPU, and copies to the device."""

from __future__ import annotations

import pytest
import torch

from tests.ascend.counted import counted

ROWS = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("work", "launches"),
    [
        (lambda x: x.view(6, 4)[1:].t().unsqueeze(0), 0),
        (lambda x: x.to(x.dtype).contiguous(), 0),
        (lambda x: x + x * 2, 2),
        (lambda x: x.t().contiguous(), 1),
        (lambda x: x.clone(), 1),
        (lambda x: x.bfloat16(), 1),
        (lambda x: torch.empty_like(x).copy_(x), 1),
        (lambda x: torch.zeros(3, device=x.device), 1),
        (lambda x: torch.nn.functional.linear(x, x), 1),
        (lambda x: x.softmax(-1).argmax(-1), 2),
    ],
)
def test_operators_are_launches_and_views_are_not(npu, work, launches):
    values = ROWS.to(npu)
    with counted() as counts:
        work(values)
    assert (counts.launches, counts.hidden_copies, counts.aicpu) == (launches, 0, 0), counts.names


def heads(rows: torch.Tensor) -> torch.Tensor:
    """Return [1, heads, tokens, width] as in transformers, where the tokens lie further apart than the heads."""
    return rows.view(1, 4, 2, 8).transpose(1, 2)


def scattered(rows: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros(16, 1, dtype=torch.int64, device=rows.device)
    return torch.ops.npu.npu_scatter_nd_update_(rows, indices, updates)


@pytest.mark.parametrize(
    ("operator", "copies"),
    [
        (lambda x: torch.ops.npu.npu_rotary_mul(heads(x), *(x[None, None, :, :8].contiguous(),) * 2), 1),
        (lambda x: torch.ops.npu.npu_rotary_mul(heads(x).contiguous(), *(x[None, None, :, :8].contiguous(),) * 2), 0),
        (lambda x: scattered(x.view(16, 4), x.view(4, 16).t()), 1),
        (lambda x: x @ x.t(), 0),
        (lambda x: x[:, ::4] @ x, 1),
        (lambda x: x[:, 0].add_(1), 2),
        (lambda x: x[:, :3] + x[:, 3:6], 2),
        (lambda x: x + x[0].expand(4, 16), 1),
    ],
    ids=["rotated views", "rotated rows", "scattered columns", "product", "gaps", "in place", "two", "expanded"],
)
def test_operators_copy_operands_that_are_not_contiguous(npu, operator, copies):
    values = torch.ones(4, 16).to(npu)
    with counted() as counts:
        operator(values)
    assert counts.hidden_copies == copies, counts.names


@pytest.mark.parametrize(
    ("operator", "dtype", "aicpu"),
    [
        (lambda x: x.sort(), torch.float32, 0),
        (lambda x: x.sort(), torch.int64, 1),
        (lambda x: x.cumsum(-1), torch.int64, 1),
        (lambda x: x.index_copy_(0, torch.zeros_like(x[:, 0], dtype=torch.int64), x.clone()), torch.bool, 1),
        (lambda x: x.index_copy_(0, torch.zeros_like(x[:, 0], dtype=torch.int64), x.clone()), torch.bfloat16, 0),
        (lambda x: torch.where(x > 1, x, x), torch.int64, 0),
        (lambda x: x.masked_fill(x > 1, 0), torch.int64, 1),
        (lambda x: x + x, torch.float64, 1),
        (lambda x: x // 2, torch.int64, 1),
    ],
)
def test_operators_run_on_the_ai_cpu_for_other_dtypes(npu, operator, dtype, aicpu):
    values = ROWS.to(dtype).to(npu)
    with counted() as counts:
        operator(values)
    assert counts.aicpu == aicpu, counts.names


def test_copies_between_host_and_device_are_counted(npu):
    pinned = ROWS.pin_memory()
    with counted() as counts:
        first = pinned.to(npu, non_blocking=True)
        second = ROWS.to(npu)
        first.cpu()
        torch.full((2,), 3.0, device=npu)
        second[:, ::2] = ROWS[:, ::2]
    assert (counts.uploads, counts.downloads, counts.launches, counts.syncs) == (3, 1, 2, 3)
