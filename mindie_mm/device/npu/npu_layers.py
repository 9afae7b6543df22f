"""Replacement of transformers' layers by fused operators of torch_npu.

For each kind of layer, a trial on random values shows whether the fused operator gives the same results. The name of a
layer would not show this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mindie_mm.device import rotation
from mindie_mm.device.npu import npu_rows, npu_sdpa, npu_towers
from mindie_mm.device.npu.npu_kernels import rms_norm, rotary, works


class FusedRMSNorm(nn.Module):
    """An RMS normalization layer that uses the fused operator."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize [..., width], which must have the dtype of the weight."""
        return rms_norm(hidden, self.weight, self.eps)


def fuse(module: nn.Module) -> None:
    """Replace the RMS normalization, tower attention and rotary embeddings of `module` on an NPU by fused operators."""
    npu_sdpa.check(module)
    _fuse_norms(module)
    npu_towers.pack(module)
    # The operator requires cosines in [-1, 1], but YaRN scales cosines.
    if all(getattr(part, "attention_scaling", 1.0) == 1.0 for part in module.modules()):
        rotation.replace(module, rotation.TEXT, _rotate)


def _fuse_norms(module: nn.Module) -> None:
    same: dict[tuple[type[nn.Module], torch.dtype, torch.Size], bool] = {}
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if not type(child).__name__.endswith("RMSNorm") or isinstance(child, FusedRMSNorm):
                continue
            if child._forward_pre_hooks or child._forward_hooks:  # noqa: SLF001 - moved separately (nn/placement.py)
                continue
            weight = getattr(child, "weight", None)
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if weight is None or eps is None or weight.device.type != "npu":
                continue
            fused = FusedRMSNorm(weight, eps)
            kind = type(child), weight.dtype, weight.shape
            if kind not in same:
                runs = works("npu_rms_norm", weight.device, weight.dtype, *weight.shape)
                same[kind] = runs and _agree(child, fused, weight)
            if same[kind]:
                setattr(parent, name, fused)


def _agree(layer: nn.Module, fused: nn.Module, weight: Tensor) -> bool:
    with torch.inference_mode():
        values = torch.randn(4, *weight.shape, dtype=torch.float32).to(weight)
        try:
            return _close(layer(values), fused(values))
        except (TypeError, AttributeError):  # the layer needs additional arguments
            return False


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = 1e-5 if one.dtype == torch.float32 else 0.05
    return bool(torch.allclose(one.float().cpu(), other.float().cpu(), rtol=tolerance, atol=tolerance))


def _rotate(
    own: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    width = q.shape[-1]
    if (
        q.device.type != "npu"
        or unsqueeze_dim != 1
        or q.dim() != 4
        or q.dtype != cos.dtype
        or cos.shape[-1] != width
        or not npu_rows.rotates("npu_rotary_mul", q, k)
        or not works("npu_rotary_mul", q.device, q.dtype, width)
    ):
        return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotary(q, cos, sin), rotary(k, cos, sin)
