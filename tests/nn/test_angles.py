"""Tests for the table of rotary angles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindie_mm.nn.angles import Angles, AngleTable

AXES, HEAD_DIM = 3, 8


def rotary_emb(hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute angles as transformers' M-RoPE does. A different axis determines each frequency."""
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.02])
    angles = positions[[0, 1, 2, 0], 0].T * frequencies
    angles = torch.cat([angles, angles], -1).unsqueeze(0)
    return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_table_has_the_angles_of_the_embedding(dtype: torch.dtype) -> None:
    table = AngleTable(rotary_emb)
    same = torch.tensor([0, 7, 1023, 1024, 5000, 20_000]).expand(AXES, -1)
    # The last step is beyond the longest table, and the positions of the second differ between axes.
    steps = [same[:, :2], same[:, :2] + torch.arange(AXES).unsqueeze(1), same[:, :4], same[:, 4:5], same[:, 5:]]
    for positions in steps:
        hidden = torch.zeros(1, positions.shape[1], 4, dtype=dtype)
        expected = Angles.of(*rotary_emb(hidden, positions.unsqueeze(1)))
        actual = table.angles(hidden, positions)
        assert torch.equal(actual.cos, expected.cos)
        assert torch.equal(actual.sin, expected.sin)
