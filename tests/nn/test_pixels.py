"""Tests for the conversion from uint8 pixels to a tower's input."""

from __future__ import annotations

import pytest
import torch

from mindie_mm.nn.pixels import Normalization

CHANNELS = {"mean": (0.48, 0.46, 0.41), "std": (0.27, 0.26, 0.28)}
PIXELS = torch.arange(2 * 5 * 7 * 3).remainder(256).to(torch.uint8).view(2, 5, 7, 3)


def channels_first(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def sliced(pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat([pixels, pixels], dim=2)[:, :, : pixels.shape[2]]


@pytest.mark.parametrize("layout", [lambda pixels: pixels, channels_first, sliced])
@pytest.mark.parametrize("values", [CHANNELS, {"mean": (0.5,), "std": (0.25,)}])
def test_each_channel_is_normalized_in_any_memory_layout(layout, values):
    normalized = Normalization(**values, rescale_factor=1 / 255)(layout(PIXELS))
    mean, std = (torch.tensor(values[name]).view(-1, 1, 1) * 255.0 for name in ("mean", "std"))
    assert normalized.dtype == torch.float32
    assert torch.equal(normalized, (PIXELS.permute(0, 3, 1, 2).float() - mean) / std)


def test_pixels_may_be_rescaled_without_normalization():
    normalized = Normalization((), (), 1 / 255)(PIXELS)
    assert torch.equal(normalized, PIXELS.permute(0, 3, 1, 2).float() * (1 / 255))
    assert torch.equal(Normalization((), (), 1.0)(PIXELS), PIXELS.permute(0, 3, 1, 2).float())
