"""Places of patches for vision towers of transformers, computed on the host.

The towers themselves would compute them on the device, or would wait for the device to read an index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import upload


def interpolation(embeddings: Any, grids: Tensor, merge: int, device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of a tower that interpolate its learned positions.

    Args:
        embeddings: The module of the tower that adds the positions.
        grids: Size of each item in patches, int64 [items, 3], on the host.
        merge: Side in patches of the squares whose patches are adjacent.
        device: Device of the result.

    """
    from transformers.vision_utils import (
        get_vision_interpolation_indices_and_weights,  # imported late, because it is slow to import
    )

    indices, weights = get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=embeddings.num_grid_per_side,
        mode=embeddings.interpolation_mode,
        align_corners=embeddings.interpolation_align_corners,
        spatial_merge_size=merge,
    )
    return {"interp_indices": upload(indices, device), "interp_weights": upload(weights, device)}


def window_places(visual: Any, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the keyword arguments of the windowed tower `visual` that describe its windows.

    The tower itself would reorder patches with an index on the host. Each such operation waits for the device.

    Args:
        visual: The vision tower.
        grids: Size of each item in patches, int64 [items, 3], on the host.
        device: Device of the window indices. The bounds of the windows stay on the host, where the tower reads them.

    """
    from transformers.vision_utils import get_vision_window_index  # imported late, because it is slow to import

    index, bounds = get_vision_window_index(grids, visual.spatial_merge_size, visual.window_size, visual.patch_size)
    return {"window_index": upload(index, device), "cu_window_seqlens": bounds}
