"""Windows of the tower of Qwen2.5-VL and Qwen2.5-Omni."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import upload

PICOSECONDS = 10**12
"""Picoseconds per second."""


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
