"""Norms, rotary embeddings and activations, computed in float32 by the formulas of the operators' documentation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:  # noqa: A002 - the schema's name
    """Return x / rms(x) * gamma, and 1 / rms in float32. The root mean square is taken over the axes of gamma."""
    axes = tuple(range(-gamma.dim(), 0))
    values = input.float()
    rstd = torch.rsqrt(values.square().mean(axes, keepdim=True) + epsilon)
    return (values * rstd * gamma.float()).to(input.dtype), rstd


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Return the RMS norm of the sum of x1 and x2, 1 / rms in float32, and the sum in the dtype of the inputs."""
    total = x1 + x2
    out, rstd = rms_norm(total, gamma, epsilon)
    return out, rstd, total


def _turned(values: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = values.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)
    if mode == "interleave":
        return torch.stack([-values[..., 1::2], values[..., ::2]], dim=-1).flatten(-2)
    raise NotImplementedError(f"rotary_mode {mode!r} is not simulated")


def rotary_mul(
    input: Tensor,  # noqa: A002 - the schema's name
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    """Return r1 * x + r2 * turned(x). r1 contains the cosines and r2 the sines."""
    values = input.float()
    turned = values @ rotate.float() if rotate is not None else _turned(values, rotary_mode)
    return (r1.float() * values + r2.float() * turned).to(input.dtype)


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to both tensors in place, as the device does, and return the tensors."""
    query.copy_(rotary_mul(query, cos, sin, rotary_mode))
    key.copy_(rotary_mul(key, cos, sin, rotary_mode))
    return query, key


def swiglu(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002 - the schema's name
    """Return silu(first half) * second half."""
    gate, up = input.float().chunk(2, dim=dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:  # noqa: A002 - the schema's name
    return torch.nn.functional.gelu(input, approximate=approximate)


def silu(input: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    return torch.nn.functional.silu(input)


def fast_gelu(input: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """Return x / (1 + exp(-1.702 |x|)) * exp(0.851 (x - |x|))."""
    values = input.float()
    size = values.abs()
    return (values / (1 + (-1.702 * size).exp()) * (0.851 * (values - size)).exp()).to(input.dtype)
