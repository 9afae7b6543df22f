"""Features that a tower has computed before, in place of a media source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import InputError
from mindie_mm.settings.limits import python_number

_FLOATS = {"float16", "bfloat16", "float32"}


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Features that the model's tower has computed before, in place of an image, a video or an audio clip.

    `LLM.encode` returns them. `{"image_embeds": Embeddings(array, grid)}` is the same as
    `{"image_embeds": array, "grid": grid}`.
    """

    array: Any
    """Features of one item: a numpy array or torch tensor [features, width] or [1, features, width] of float16,
    bfloat16 or float32. For several items, a list of such arrays, or an array [items, features, width].

    It is stored as a numpy array [features, width], or a list of them for several items. bfloat16 becomes float32."""
    grid: Any = ()
    """Geometry of the item as integers, for example the number of patches along time, height and width. Needed only if
    the number of features does not determine it. For several items, a list with a grid for each item.

    It is stored as a tuple, or a list of tuples for several items."""

    def __post_init__(self) -> None:
        items, grid = _items(self.array), self.grid
        if not items:
            raise InputError("the embeddings are an empty list; give at least one array")
        if not grid_given(grid) and all(isinstance(one, Embeddings) for one in items):
            grid = [one.grid for one in items]
        arrays = [_rows(one.array if isinstance(one, Embeddings) else one) for one in items]
        grids = _grids(grid, len(arrays))
        is_one = len(arrays) == 1
        object.__setattr__(self, "array", arrays[0] if is_one else arrays)
        object.__setattr__(self, "grid", grids[0] if is_one else grids)

    def each(self) -> list[Embeddings]:
        """Return the embeddings of each item."""
        if not isinstance(self.array, list):
            return [self]
        return [Embeddings(array, grid) for array, grid in zip(self.array, self.grid, strict=True)]


def grid_given(grid: Any) -> bool:
    """Return whether `grid` is neither None nor empty."""
    has_length = hasattr(grid, "__len__") and getattr(grid, "ndim", 1) > 0
    return len(grid) > 0 if has_length else grid is not None


def _items(array: Any) -> Sequence[Any]:
    if isinstance(array, list | tuple):
        return array
    return [*array] if len(getattr(array, "shape", ())) == 3 and len(array) > 1 else [array]


def _rows(array: Any) -> NDArray[Any]:
    """Return the features of one item as a numpy array [features, width]."""
    shape = [*getattr(array, "shape", ())]
    axes = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    dtype = str(getattr(array, "dtype", "no array")).removeprefix("torch.")
    if dtype not in _FLOATS or len(axes) != 2 or 0 in axes:
        raise InputError(
            f"the embeddings have dtype {dtype} and shape {shape}; they must be float16, bfloat16 or float32 "
            "[rows, width] or [1, rows, width], with at least one row"
        )
    try:
        if hasattr(array, "detach"):  # a tensor of torch, which this module does not import, because that is slow
            array = array.detach().cpu()
            array = (array.float() if dtype == "bfloat16" else array).contiguous().numpy()
        rows = np.asarray(array, np.float32 if dtype == "bfloat16" else dtype).reshape(axes)
    except (TypeError, ValueError, RuntimeError) as error:  # for example a sparse tensor
        if "DefaultCPUAllocator" in str(error):
            raise MemoryError from error
        raise InputError(f"the embeddings cannot be read: {error}") from error
    if not np.isfinite(rows).all():
        raise InputError("the embeddings contain infinite values or NaN")
    return rows


def _grids(given: Any, count: int) -> list[tuple[int, ...]]:
    if not grid_given(given):
        return [()] * count
    listed = _listed(given)
    grids = [_listed(grid) for grid in listed] if isinstance(listed, list) else []
    if count == 1 and grids and not any(isinstance(grid, list) for grid in grids):
        grids = [grids]
    grids = [[*map(python_number, grid)] if isinstance(grid, list) else grid for grid in grids]
    if len(grids) != count or not all(isinstance(grid, list) and all(type(n) is int for n in grid) for grid in grids):
        wanted = "a list of integers" if count == 1 else f"a list of {count} lists of integers, one for each item"
        raise InputError(f"the grid of the embeddings is {str(given)[:200]}; it must be {wanted}")
    return [tuple(grid) for grid in grids]


def _listed(value: Any) -> Any:
    """Return a tuple, array or tensor as a list, and any other value unchanged."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [*value] if isinstance(value, tuple) else value
