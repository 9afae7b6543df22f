"""Copies that hide in operators because of strides.

Most aclnn functions call l0op::Contiguous for each operand and l0op::ViewCopy for each result, which start a kernel of
their own for a tensor that is not contiguous (hicann/ops-math and hicann/ops-nn, */op_api/aclnn_*.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor


def _anything(_: Tensor) -> bool:
    return True


def _swapped(tensor: Tensor) -> bool:
    """Return whether the last two axes are contiguous in the other order. Products have a flag for such operands."""
    return tensor.dim() > 1 and tensor.transpose(-1, -2).is_contiguous()


_PRODUCTS = ("mm", "matmul", "bmm", "addmm", "baddbmm", "linear", "mv", "dot")
READS: Mapping[str, Callable[[Tensor], bool]] = {
    **{f"aten::{name}": _swapped for name in _PRODUCTS},
    **{f"aten::{name}": _anything for name in ("copy_", "clone", "contiguous")},  # such an operator is the copy
}
"""For operators that read or write some other strides without a copy: whether a tensor has such strides."""


def hidden_copies(operator: str, tensors: Iterable[Tensor], written: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that `operator` copies before and after its kernel.

    A tensor that the operator changes (`written`) is copied before and after.
    """
    direct = READS.get(operator, lambda _: False)
    found = [tensor for tensor in (*tensors, *written) if tensor.numel() and not tensor.is_contiguous()]
    return [tensor for tensor in found if not direct(tensor)]
