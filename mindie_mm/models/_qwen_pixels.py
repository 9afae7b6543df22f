"""Sizes of images and video frames in Qwen2-VL and later models, computed as in transformers' processors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindie_mm.errors import InputError, LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import MediaOptions
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.media.video.frames import bounded, stepped
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, normalize_patches, normalize_planes, repeat_frames

MAX_ASPECT_RATIO = 200
_LOW_DETAIL_PIXELS = 512 * 512
DEFAULT_FPS = 2.0
_BICUBIC = 3
# Defaults of transformers' classes for settings that a file leaves out.
IMAGE_DEFAULTS: Mapping[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
VIDEO_DEFAULTS: Mapping[str, Any] = {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}}


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Preprocessing settings of a checkpoint for images or for videos."""

    min_pixels: int
    """Minimum number of pixels of a resized image or frame."""
    max_pixels: int
    """Maximum number of pixels of a resized image or frame."""
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    total_pixels: int | None = None
    """Maximum number of pixels of all frames together. None if there is no such limit."""

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def patch_bytes(self) -> int:
        """Size of a patch with all of its frames, in bytes."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> PixelSettings:
        """Read a preprocessor configuration that has a `size`. Raise UnsupportedCheckpoint if it is not supported."""
        needed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC}
        check_settings(config, needed, where)
        size = config["size"]
        min_pixels = config.get("min_pixels") or size.get("shortest_edge")
        max_pixels = config.get("max_pixels") or size.get("longest_edge")
        if min_pixels is None or max_pixels is None:
            raise UnsupportedCheckpoint(f"{where}: size={size!r} must have shortest_edge and longest_edge")
        settings = cls(
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            patch_size=config.get("patch_size", 14),
            temporal_patch_size=config.get("temporal_patch_size", 2),
            merge_size=config.get("merge_size", 2),
            mean=tuple(config.get("image_mean", CLIP_MEAN)),
            std=tuple(config.get("image_std", CLIP_STD)),
            rescale_factor=config.get("rescale_factor", 1 / 255),
            fps=config.get("fps"),
            num_frames=config.get("num_frames"),
            min_frames=config.get("min_frames", 4),
            max_frames=config.get("max_frames", 768),
        )
        if config.get("cap_pixels_per_frame"):
            budget = int(config.get("max_video_tokens", 128_000) * settings.factor**2 * 0.9)
            settings = replace(settings, total_pixels=budget * settings.temporal_patch_size)
        return settings

    def with_options(self, options: MediaOptions) -> PixelSettings:
        """Return these settings with the options of an item applied.

        Raises:
            InputError: The options ask for fewer frames than a temporal patch has.
            LimitExceeded: An option exceeds a limit of the checkpoint.

        """
        limits = {"pixels": self.max_pixels, "frames": self.max_frames}
        for name in ("min_pixels", "max_pixels", "num_frames", "min_frames", "max_frames"):
            value, limit = getattr(options, name), limits[name.partition("_")[2]]
            if value is not None and value > limit:
                raise LimitExceeded(f"{name} is {value}; the checkpoint's limit is {limit}")
        for name in ("num_frames", "max_frames"):
            value = getattr(options, name)
            if value is not None and value < self.temporal_patch_size:
                raise InputError(f"{name} is {value}; this model needs at least {self.temporal_patch_size} frames")
        max_pixels = options.max_pixels or self.max_pixels
        if options.detail == "low":
            max_pixels = min(max_pixels, _LOW_DETAIL_PIXELS)
        sampling: dict[str, Any] = {"num_frames": self.num_frames and bounded(self.num_frames, options)}
        if options.num_frames is not None or options.fps is not None:
            sampling = {"num_frames": options.num_frames, "fps": options.fps}
        return replace(
            self,
            max_pixels=max_pixels,
            min_pixels=min(options.min_pixels or self.min_pixels, max_pixels),
            min_frames=options.min_frames or self.min_frames,
            max_frames=options.max_frames or self.max_frames,
            **sampling,
        )

    def normalize(self, patches: torch.Tensor) -> torch.Tensor:
        """Normalize the uint8 patches of a block for the tower.

        The result is float32 [n, 3 * temporal * patch * patch] on the same device.
        """
        values = normalize_patches(patches, self.mean, self.std, self.rescale_factor)
        return values if values.shape[1] == self.patch_bytes else repeat_frames(values, self.temporal_patch_size)

    def normalize_planes(self, planes: torch.Tensor) -> torch.Tensor:
        """Normalize patches in MindIE's wire format, uint8 [n, 3 * temporal * patch * patch], as `normalize` does."""
        return normalize_planes(planes, self.mean, self.std, self.rescale_factor)


def bounding_grids(settings: PixelSettings) -> Iterator[tuple[int, int]]:
    """Yield grids (shorter side, longer side), in tokens, that bound the grids of resized images.

    Each grid of a resized image fits into one of these grids.
    """
    limits = (settings.max_pixels, settings.min_pixels)
    area, least = (pixels // settings.factor**2 for pixels in limits)
    # The longer side of an image that is resized to these pixels and whose proportions are the limit.
    longest, long = (math.isqrt(MAX_ASPECT_RATIO * pixels) // settings.factor for pixels in limits)
    narrow = math.isqrt(area // MAX_ASPECT_RATIO)  # the shorter side of such an image, rounded down
    if not narrow:  # the shorter side has one token nevertheless
        yield 1, max(1, longest)
    for short in range(1, math.isqrt(area) + 1):
        # Rounding makes the proportions of other images more elongated by up to half a token.
        most = MAX_ASPECT_RATIO * short + MAX_ASPECT_RATIO // 2
        yield short, min(area // short, max(most, longest) if short == narrow else most)
    # Both sides of an enlarged image are rounded up, even from a whole number, because of floating point.
    for short in range(math.isqrt(least // MAX_ASPECT_RATIO), math.isqrt(least) + 1):
        yield short + 1, (min(least // short, long) if short else long) + 1


def largest(settings: PixelSettings) -> Iterator[tuple[int, int]]:
    """Yield sizes (height, width) of images no higher than wide. One of them takes nearly the most tokens."""
    factor, area = settings.factor, settings.max_pixels // settings.factor**2
    yield 1, MAX_ASPECT_RATIO
    yield factor, MAX_ASPECT_RATIO * factor
    for short in range(1, math.isqrt(area) + 1):
        yield short * factor, min(area // short, MAX_ASPECT_RATIO * short) * factor
    # After enlarging, these sides are slightly longer than a whole number of tokens.
    half, least = factor // 2, settings.min_pixels / factor**2
    for short in range(max(1, math.isqrt(int(least) // MAX_ASPECT_RATIO)), math.isqrt(int(least)) + 1):
        yield short * half, min(math.ceil(least * half / short) - 1, MAX_ASPECT_RATIO * short * half)


def check_aspect_ratio(height: int, width: int, own_size: str = "") -> None:
    """Raise LimitExceeded if one side of an image or video is more than 200 times as long as the other.

    `own_size` is the size in the message if the image or video was enlarged.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise LimitExceeded(
            f"the image or video has {own_size or f'{width}x{height}'} pixels; the longer side must be at most "
            f"{MAX_ASPECT_RATIO} times the shorter one"
        )


def smart_resize(height: int, width: int, settings: PixelSettings, num_frames: int = 1) -> tuple[int, int]:
    """Return the height and width of a resized image or video frame.

    Both are multiples of `settings.factor`, and their product is between min_pixels and max_pixels. Proportions are
    kept as far as this allows.

    Args:
        height: Height in pixels before the resize.
        width: Width in pixels before the resize.
        settings: Preprocessing settings.
        num_frames: Number of sampled frames of the video, 1 for an image.

    Raises:
        LimitExceeded: One side is more than 200 times as long as the other.

    """
    check_aspect_ratio(height, width)
    factor, min_pixels, max_pixels = settings.factor, settings.min_pixels, settings.max_pixels
    if settings.total_pixels is not None:
        max_pixels = max(min(max_pixels, settings.total_pixels // num_frames), int(min_pixels * 1.05))
    return _resized(height, width, factor, (min_pixels, max_pixels))


def joint_resize(height: int, width: int, num_frames: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width of the resized frames of a video whose frames share the limits on pixels.

    A side that is shorter than `settings.factor` is first enlarged, with the proportions kept.

    Args:
        height: Height in pixels before the resize.
        width: Width in pixels before the resize.
        num_frames: Number of frames.
        settings: Preprocessing settings. min_pixels and max_pixels are limits for all frames together.

    Raises:
        InputError: There are fewer frames than a temporal patch has.
        LimitExceeded: One side is more than 200 times as long as the other.

    """
    factor, temporal = settings.factor, settings.temporal_patch_size
    if num_frames < temporal:
        raise InputError(f"{num_frames} frames of the video would be sampled; this model needs at least {temporal}")
    own_size = f"{width}x{height}"
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect_ratio(height, width, own_size)
    limits = (settings.min_pixels, settings.max_pixels)
    return _resized(height, width, factor, limits, num_frames, round(num_frames / temporal) * temporal)


def _resized(
    height: int, width: int, factor: int, limits: tuple[int, int], num_frames: int = 1, num_stored: int = 1
) -> tuple[int, int]:
    """Return the nearest multiples of `factor` that keep the pixels of all frames together within `limits`.

    As in the references, the pixels are counted with `num_stored` frames, but scaled as those of `num_frames`.
    """
    min_pixels, max_pixels = limits
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = num_stored * new_height * new_width
    if pixels > max_pixels:
        scale = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def sample_frames(num_frames: int, fps: float | None, settings: PixelSettings) -> list[int]:
    """Return ascending, evenly spread indices of the frames to sample from a video.

    `settings.num_frames` is the number of frames to take. If it is None, the number is computed from `settings.fps`
    (2.0 if the checkpoint has none) and clamped to [min_frames, max_frames]. The number is a multiple of the temporal
    patch size if the video is long enough.

    Args:
        num_frames: Number of frames of the video.
        fps: Frame rate of the video. If both `fps` and `settings.num_frames` are None, all frames are taken, up to
            max_frames.
        settings: Preprocessing settings.

    Raises:
        InputError: `settings.num_frames` is greater than the number of frames of the video.

    """
    temporal = settings.temporal_patch_size
    most = settings.max_frames // temporal * temporal
    if settings.num_frames is not None:
        wanted = min(round(settings.num_frames / temporal) * temporal, most)
        if settings.num_frames > max(num_frames, temporal):
            raise InputError(f"num_frames is {settings.num_frames}; the video has only {num_frames} frames")
    elif fps is None:
        wanted = num_frames if num_frames <= settings.max_frames else most
    else:
        expected = num_frames / fps * (settings.fps or DEFAULT_FPS)
        wanted = math.floor(min(max(expected, settings.min_frames), most, num_frames) / temporal) * temporal
    wanted = min(max(wanted, temporal), num_frames)
    return stepped(num_frames, wanted)
