"""The memory of a step on the CPU, computed from the shapes of its tensors.

`computed_peak_bytes` runs the step on fake tensors, which have shapes and no data, and adds up the tensors that exist
at the same time. The result depends on the model and the settings, and not on other programs or on time
(docs/decisions/0016-memory-is-computed.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from mindie_mm.device.host_memory import MAPPED_BYTES

_MOST_NUMBERS, _MOST_FLOATS = 2**20, 2**12
"""Maximum number of elements of tensors of integers, and of other tensors, that are computed. Models read sizes from
such tensors, for example from the grids of images."""


def computed_peak_bytes(work: Callable[[], object], scale: float = 1.0) -> int:
    """Return an upper bound of the memory in bytes that `work` allocates at the same time, without running it.

    The bound is 1.25 times the peak of the tensors' sizes. A tensor below 32 MiB counts twice,
    because the C library puts it in its heap, where free pieces may be too small for the next tensor.

    Args:
        work: Function that runs the step.
        scale: Number by which the size of each tensor is multiplied.

    Raises:
        RuntimeError: `work` depends on values that only a real run computes.

    """
    shapes = _Shapes(scale)
    with shapes:
        work()
    return shapes.peak_bytes * 5 // 4


class _Shapes(FakeTensorMode):
    """A mode in which operators only compute shapes, and small tensors of integers.

    An integer that depends on weights or media is 0: each token takes the first expert, for example.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._scale = scale
        self.peak_bytes = 0
        self._now_bytes = 0
        self._sizes: dict[int, int] = {}
        self._attended: dict[Any, tuple[int, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # half of all calls, so it must be fast
            return args[0].fake_device if isinstance(args[0], FakeTensor) else torch.device("cpu")
        given = _tensors((args, kwargs))
        if given and all(map(_is_small, given)):
            out = func(*args, **kwargs)
        elif func is torch.ops.aten.scaled_dot_product_attention.default:
            out = self._attend(func, types, args, kwargs)
        elif (own := _OWN.get(func.name())) is not None:
            out = own(self, func, args)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func.namespace == "aten" and not torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
                func.name(), "CompositeImplicitAutograd"
            ):
                out = self._known(func, args, kwargs, given, out)
        self._count(_tensors(out), given)
        return out

    def _attend(self, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        """Return the result of attention. Equal shapes are evaluated once, because a tower may have 1,000 windows."""
        key = tuple(
            (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, Tensor) else one
            for one in tree_leaves((args, sorted(kwargs.items())))
        )
        if key in self._attended:
            extra_bytes, like = self._attended[key]
            self.peak_bytes = max(self.peak_bytes, self._now_bytes + extra_bytes)
            with self:
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        earlier, before, self.peak_bytes = self.peak_bytes, self._now_bytes, self._now_bytes
        out: Tensor = super().__torch_dispatch__(func, types, args, kwargs)
        self._attended[key] = self.peak_bytes - before, torch.empty_like(out, device="meta")
        self.peak_bytes = max(self.peak_bytes, earlier)
        return out

    def _known(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], out: Any) -> Any:
        """Return real tensors instead of small fake tensors of integers."""
        if not given:
            return func(*args, **kwargs) if all(map(_may_be_small, _tensors(out))) else out

        def known(one: Any) -> Any:
            small = isinstance(one, FakeTensor) and not one.is_floating_point() and one.numel() <= _MOST_NUMBERS
            if not small or any(one.untyped_storage()._cdata == part.untyped_storage()._cdata for part in given):  # noqa: SLF001
                return one
            return torch.zeros(one.shape, dtype=one.dtype)

        if isinstance(out, tuple | list):
            return type(out)(map(known, out)) if type(out) in (tuple, list) else tuple(map(known, out))
        return known(out)

    def _count(self, made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        views = {_storage(part) for part in given}
        for one in made:
            key = _storage(one)
            if key is None or key in views or key in self._sizes:
                continue
            storage = one.untyped_storage()
            self._sizes[key] = size = _occupied(math.ceil(storage.nbytes() * self._scale))
            self._now_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._now_bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now_bytes -= self._sizes.pop(key, 0)


def _occupied(num_bytes: int) -> int:
    """Return the memory that a tensor may occupy. It never falls when the tensor grows."""
    return max(num_bytes, min(2 * num_bytes, 2 * MAPPED_BYTES))


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None  # noqa: SLF001


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _is_small(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and _may_be_small(tensor)


def _may_be_small(tensor: Tensor) -> bool:
    most = _MOST_FLOATS if tensor.is_floating_point() else _MOST_NUMBERS
    return tensor.layout == torch.strided and tensor.numel() <= most


def _int8_product(mode: _Shapes, func: Any, args: Any) -> Tensor:
    """Return the result of a product with packed int8 weights, whose shape only the packed weights know."""
    rows, *packed = args
    width = func(torch.zeros(1, rows.shape[-1]), *packed).shape[-1]
    with mode:
        return torch.empty(*rows.shape[:-1], width)


def _index(mode: _Shapes, func: Any, args: Any) -> Tensor:
    """Return the rows that a mask selects."""
    values, indices = args
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            places += index.nonzero().unbind(1)
        else:
            places.append(index)
    result: Tensor = super(_Shapes, mode).__torch_dispatch__(func, (), (values, places), {})
    return result


_OWN: dict[str, Callable[[_Shapes, Any, Any], Tensor]] = {
    "quantized::linear_dynamic": _int8_product,
    "aten::index.Tensor": _index,
}
"""Operators for which FakeTensorMode has no rule, or needs values."""
