"""Conversion of images to patches, the input of vision towers with a convolutional patch embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindie_mm.media.image.encoded_image import Pixels


def patchify(rgb: Pixels, patches: np.ndarray[Any, np.dtype[np.uint8]], patch_size: int, merge_size: int) -> None:
    """Cut an image into patches.

    Patches that a tower merges into one token are adjacent in the output. The output consists of blocks of
    merge_size x merge_size patches, row by row.

    Args:
        rgb: Pixels, uint8 [H, W, 3]. H and W are multiples of patch_size * merge_size.
        patches: Output, uint8 [H/patch * W/patch, patch, patch, 3]. In memory, each patch is contiguous or consists of
            one plane per channel. Writing planes takes five times as long.
        patch_size: Side of a patch in pixels.
        merge_size: Side of a merged block in patches.

    """
    height, width, channels = rgb.shape
    blocks_high, blocks_wide = height // (patch_size * merge_size), width // (patch_size * merge_size)
    if not patches[0].flags.c_contiguous:
        blocks = rgb.reshape(blocks_high, merge_size, patch_size, blocks_wide, merge_size, patch_size, channels)
        apart = patches.reshape(blocks_high, blocks_wide, merge_size, merge_size, patch_size, patch_size, channels)
        assert np.shares_memory(apart, patches)
        np.copyto(apart, blocks.transpose(0, 3, 1, 4, 2, 5, 6))
        return
    # One element is one row of one patch, so that numpy copies whole rows.
    patch_row = np.dtype((np.void, patch_size * channels))
    rows = np.ascontiguousarray(rgb).reshape(height, -1).view(patch_row)
    source = rows.reshape(blocks_high, merge_size, patch_size, blocks_wide, merge_size)
    target = patches.reshape(len(patches), patch_size, -1).view(patch_row)
    assert np.shares_memory(target, patches)
    np.copyto(
        target.reshape(blocks_high, blocks_wide, merge_size, merge_size, patch_size),
        source.transpose(0, 3, 1, 4, 2),
    )


def unpatchify(patches: Pixels, rows: int, columns: int, merge_size: int) -> Pixels:
    """Return the image that `patchify` has cut into patches.

    Args:
        patches: Patches, uint8 [rows * columns, patch, patch, 3].
        rows: Height of the image in patches.
        columns: Width of the image in patches.
        merge_size: Side of a merged block in patches.

    Returns:
        Pixels, uint8 [rows * patch, columns * patch, 3].

    """
    size = patches.shape[1]
    blocks = patches.reshape(rows // merge_size, columns // merge_size, merge_size, merge_size, size, size, 3)
    return np.ascontiguousarray(blocks.transpose(0, 2, 4, 1, 3, 5, 6)).reshape(rows * size, columns * size, 3)
