"""Normalization of uint8 pixels from shared memory, for patch embeddings. It runs on the device in plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mindie_mm.device import upload

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation for SigLIP and some other towers."""


def normalize_patches(
    patches: torch.Tensor, mean: Sequence[float], std: Sequence[float], rescale_factor: float = 1 / 255
) -> torch.Tensor:
    """Normalize patches whose channels are interleaved.

    The result equals that of transformers' torchvision backend bit for bit: `(x - mean / rescale) / (std / rescale)`.

    Args:
        patches: uint8 [n, k * channels].
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        rescale_factor: Factor that is applied to the bytes before normalization.

    Returns:
        float32 [n, channels * k].

    """
    planes = patches.view(len(patches), -1, len(mean)).transpose(1, 2)
    return normalize_planes(
        planes.contiguous(), mean, std, rescale_factor
    )  # bytes are cheaper to transpose than floats


def normalize_planes(
    planes: torch.Tensor, mean: Sequence[float], std: Sequence[float], rescale_factor: float = 1 / 255
) -> torch.Tensor:
    """Normalize patches whose channels are separate, uint8 [n, channels * k] or [n, channels, k].

    The result equals that of `normalize_patches`.
    """
    channels = (1, len(mean), 1)
    scaled_mean = upload(torch.tensor(mean) * (1.0 / rescale_factor), planes.device)
    scaled_std = upload(torch.tensor(std) * (1.0 / rescale_factor), planes.device)
    values = planes.view(len(planes), len(mean), -1).to(torch.float32)
    return values.sub_(scaled_mean.view(channels)).div_(scaled_std.view(channels)).view(len(planes), -1)


def normalize_images(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Normalize images as torchvision's ToTensor and Normalize do, bit for bit.

    Args:
        images: uint8 [n, H, W, 3].
        mean: Mean of each channel.
        std: Standard deviation of each channel.

    Returns:
        float32 [n, 3, H, W].

    """
    planes = images.permute(0, 3, 1, 2)
    own_mean, own_std = (upload(values, planes.device).view(1, 3, 1, 1) for values in (mean, std))
    return planes.float().div_(255).sub_(own_mean).div_(own_std)


def repeat_frames(patches: torch.Tensor, temporal_patch_size: int) -> torch.Tensor:
    """Repeat the patches of an image in time, from [n, 3 * k] to [n, 3 * temporal_patch_size * k]."""
    planes = patches.view(len(patches), 3, 1, -1)
    return planes.expand(-1, -1, temporal_patch_size, -1).reshape(len(patches), -1)


def joined(parts: Iterable[torch.Tensor], num_rows: int | None = None) -> torch.Tensor:
    """Concatenate the tensors of all items along the first axis. The tensor of a single item is not copied.

    If the total `num_rows` is given, only one of the tensors is in memory beside the result at a time.
    """
    if num_rows is None:
        tensors = list(parts)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    rows = iter(parts)
    first = next(rows)
    if len(first) == num_rows:
        return first
    out, stop = first.new_empty(num_rows, *first.shape[1:]), 0
    for part in itertools.chain([first], rows):
        start, stop = stop, stop + len(part)
        out[start:stop] = part
    if stop != num_rows:  # a damaged item
        raise RuntimeError(f"the items have {stop} rows instead of {num_rows}")
    return out


@dataclass(frozen=True, slots=True)
class Normalization:
    """The rescaling and normalization of images that a checkpoint specifies."""

    mean: tuple[float, ...]
    """One number per channel, or one for all channels. Empty if images are not normalized."""
    std: tuple[float, ...]
    """Standard deviations, in the same form as `mean`."""
    rescale_factor: float
    """Factor that is applied to the bytes. 1.0 means no rescaling."""

    @classmethod
    def read(cls, config: Mapping[str, Any], prefix: str = "") -> Normalization:
        """Read the normalization from an image processor's settings, which include the class's defaults.

        Args:
            config: Settings of the image processor.
            prefix: Prefix of the keys `image_mean` and `image_std`.

        """
        factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
        if not config.get("do_normalize", True):
            return cls((), (), factor)
        values = (config[f"{prefix}image_{name}"] for name in ("mean", "std"))
        mean, std = ((value,) if isinstance(value, (int, float)) else tuple(value) for value in values)
        return cls(mean, std, factor)

    def table(self) -> bytes:
        """Return the normalized value of each byte, for each of three channels: float32 [3, 256], little-endian.

        The values equal those of `__call__`. numpy computes them, because families are also checked without torch.
        """
        values = np.tile(np.arange(256, dtype=np.float32), (3, 1))
        if self.mean:
            scale = np.float32(1.0 / self.rescale_factor)
            mean, std = (np.array(v, np.float32).reshape(-1, 1) * scale for v in (self.mean, self.std))
            values = (values - mean) / std
        elif self.rescale_factor != 1.0:
            values *= np.float32(self.rescale_factor)
        return values.astype("<f4").tobytes()

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalize images as transformers' torchvision backend does, bit for bit.

        Args:
            pixels: uint8 [n, H, W, channels].

        Returns:
            float32 [n, channels, H, W], a view in channels-last memory format. Convolutions accept this format, so
            no bytes are moved.

        """
        values = pixels.to(torch.float32)
        if self.mean:
            # Repeat mean and std over a whole row, because broadcasting over three numbers at a time is slow.
            rows, (width, channels) = values.flatten(2), pixels.shape[2:]
            scale = 1.0 / self.rescale_factor
            mean, std = (
                upload((torch.tensor(v) * scale).expand(channels).repeat(width), pixels.device)
                for v in (self.mean, self.std)
            )
            values = rows.sub_(mean).div_(std).view(pixels.shape)  # `rows` is a copy if the pixels are not contiguous
        elif self.rescale_factor != 1.0:
            values.mul_(self.rescale_factor)
        return values.permute(0, 3, 1, 2)


def as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale normalized pixels so that their minimum becomes 0 and their maximum 255. Return uint8 pixels unchanged."""
    if pixels.dtype == np.uint8:
        return pixels
    least, most = pixels.min(), pixels.max()
    scaled = (pixels - least) * (255 / max(float(most - least), 1e-9))
    return np.asarray(scaled, np.uint8)
