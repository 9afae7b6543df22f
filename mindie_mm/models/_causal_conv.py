"""Causal convolutions over a flat batch, whose last inputs are states of the sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from mindie_mm.nn.paged_batch import States


def causal_conv(conv: nn.Conv1d, rows: Tensor, states: States, kept: Tensor | None) -> Tensor:
    """Convolve each sequence of a flat batch, and keep its last inputs for the next step.

    Args:
        conv: The convolution, with a group for each channel.
        rows: Inputs, [T, channels].
        states: The slots that the sequences read and write.
        kept: Last inputs of the sequences in their slots, [slots, channels, kernel - 1]. None without a cache.

    Returns:
        [T, channels].

    """
    if kept is None or not len(states.rows):
        steps = None
    else:
        # Without prefills, the rows are all rows in order.
        steps = rows.index_select(0, states.rows) if states.prefills else rows
        window = torch.cat([kept.index_select(0, states.reads), steps.unsqueeze(-1)], dim=-1)
        convolved = (window.float() * conv.weight.squeeze(1).float()).sum(-1)
        steps = (convolved if conv.bias is None else convolved + conv.bias).to(rows.dtype)
        kept.index_copy_(0, states.writes, window[..., 1:])
        if not states.prefills:
            return steps
    out = torch.empty_like(rows)
    for prefill in states.prefills:
        own = rows[prefill.rows].t()
        if kept is None or prefill.reads is None:
            inputs = own.new_zeros(len(own), conv.weight.shape[-1] - 1)
        else:
            inputs = kept[prefill.reads]
        window = torch.cat([inputs, own], dim=1)
        out[prefill.rows] = conv1d(window.unsqueeze(0), conv.weight, conv.bias, groups=len(window))[0].t()
        if kept is not None:
            kept[prefill.writes] = window[:, own.shape[1] :]
    if steps is not None:
        out.index_copy_(0, states.rows, steps)
    return out
