"""Cutting images into the rows that a vision tower with a convolutional patch embedding takes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def patchify(
    rgb: NDArray[np.uint8], patches: np.ndarray[Any, np.dtype[np.uint8]], patch_size: int, merge_size: int
) -> None:
    """Cuts `rgb`, uint8 [H, W, 3], into `patches`, uint8 [H/patch * W/patch, 3, patch, patch], in place.

    Patches that a tower merges into one token stand together: blocks of merge_size x merge_size patches, row by row.
    H and W are multiples of patch_size * merge_size; the last axis of `patches` is contiguous.
    """
    height, width, channels = rgb.shape
    blocks_high, blocks_wide = height // (patch_size * merge_size), width // (patch_size * merge_size)
    # One element is one row of one patch: numpy moves it at once, several times faster than byte by byte.
    patch_row = np.dtype((np.void, patch_size))
    target = patches.view(patch_row)[..., 0].reshape(
        blocks_high, blocks_wide, merge_size, merge_size, channels, patch_size
    )
    assert np.shares_memory(target, patches)
    # A row of blocks at a time stays in the processor's cache between the two copies.
    planes = np.empty((channels, merge_size * patch_size, width), np.uint8)
    source = planes.view(patch_row).reshape(channels, merge_size, patch_size, blocks_wide, merge_size)
    for row, stripe in enumerate(rgb.reshape(blocks_high, merge_size * patch_size, width, channels)):
        np.copyto(planes, stripe.transpose(2, 0, 1))
        np.copyto(target[row], source.transpose(3, 1, 4, 0, 2))
