"""Tests for cutting images into patches, and joining patches to an image."""

from __future__ import annotations

import numpy as np
import pytest

from mindie_mm.media.image.patches import patchify, unpatchify

SIZES = [(1, 1, 1, 1), (14, 2, 2, 4), (14, 2, 6, 2), (16, 1, 3, 5), (30, 1, 2, 1), (4, 4, 8, 4)]
"""Cases: patch size, merge size, rows of patches and columns of patches."""


def image(rows: int, columns: int, patch: int) -> np.ndarray:
    rng = np.random.default_rng([rows, columns, patch])
    return rng.integers(0, 256, (rows * patch, columns * patch, 3), np.uint8)


@pytest.mark.parametrize(("patch", "merge", "rows", "columns"), SIZES)
def test_patches_are_in_the_order_in_which_a_tower_merges_them(patch, merge, rows, columns):
    rgb = image(rows, columns, patch)
    patches = np.empty((rows * columns, patch, patch, 3), np.uint8)
    patchify(rgb, patches, patch, merge)
    own = iter(patches)
    for top in range(0, rows, merge):
        for left in range(0, columns, merge):
            for row in range(top, top + merge):
                for column in range(left, left + merge):
                    y, x = row * patch, column * patch
                    assert np.array_equal(next(own), rgb[y : y + patch, x : x + patch])


@pytest.mark.parametrize(("patch", "merge", "rows", "columns"), SIZES)
def test_patches_can_be_written_into_a_strided_array(patch, merge, rows, columns):
    """Patches of two frames alternate in memory, because a temporal patch consists of two frames."""
    rgb = image(rows, columns, patch)
    together, apart = np.zeros((2, rows * columns, 2, patch, patch, 3), np.uint8)
    patchify(rgb, together[:, 0], patch, merge)
    whole = np.empty((rows * columns, patch, patch, 3), np.uint8)
    patchify(rgb, whole, patch, merge)
    assert np.array_equal(together[:, 0], whole)
    assert np.array_equal(together[:, 1], apart[:, 1])
    by_plane = np.zeros((rows * columns, 3, patch, patch), np.uint8)
    patchify(rgb, by_plane.transpose(0, 2, 3, 1), patch, merge)
    assert np.array_equal(by_plane, whole.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("patch", "merge", "rows", "columns"), SIZES)
def test_unpatchify_restores_the_image(patch, merge, rows, columns):
    rgb = image(rows, columns, patch)
    patches = np.empty((rows * columns, patch, patch, 3), np.uint8)
    patchify(rgb[:, ::-1][:, ::-1], patches, patch, merge)  # a view is accepted, too
    assert np.array_equal(unpatchify(patches, rows, columns, merge), rgb)
