"""Conversion of decoded video frames to 8-bit RGB: HDR becomes SDR, and transparent pixels show a background.

HLG and PQ are the curves of ITU-R BT.2100. Frames in these curves are converted to the colors of ITU-R BT.709, with
diffuse white (203 cd/m2, ITU-R BT.2408) near white and brighter light compressed. torchcodec and FFmpeg's scaler do not
convert them, so that colors look pale.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from mindie_mm.media.image.colours import on_background
from mindie_mm.media.image.encoded_image import Pixels
from mindie_mm.settings.config import Colour

PQ, HLG = 16, 18
"""Transfer characteristics of HDR in ITU-T H.273."""
BT2020 = 9
"""Primaries of BT.2020 in ITU-T H.273."""
UNSURE_ALPHA = frozenset({"rawvideo", "huffyuv"})
"""Codecs that have an alpha channel whenever pixels have 32 bits, even if the writer left it empty."""
_LEVELS = 2**12
"""Number of levels of the lookup tables. HDR videos have 10 bits, rarely 12."""
_ROWS = 2**20
"""Approximate number of pixels that are converted at once, which bounds the memory for their floats."""
_DIFFUSE_WHITE = 203.0
"""Luminance of diffuse white in cd/m2."""
_PQ_PEAK, _HLG_PEAK = 10_000.0 / _DIFFUSE_WHITE, 3.774
"""Light of the largest value, as a multiple of diffuse white. HLG encodes diffuse white as 75%."""
_KNEE = 0.9
"""Light, as a multiple of diffuse white, above which light is compressed."""
_BRIGHTEST = 1000.0 / _DIFFUSE_WHITE
"""Light that becomes white. Few videos have brighter light."""
_TO_BT709 = np.array(
    [[1.660491, -0.587641, -0.072850], [-0.124550, 1.132900, -0.008349], [-0.018151, -0.100579, 1.118730]], np.float32
)
"""Matrix from the primaries of BT.2020 to those of BT.709, from ITU-R BT.2087."""


class FrameConverter:
    """Converter of frames to RGB. One converter is used for all frames of a video, because its setup takes time."""

    def __init__(self, background: Colour | None, *, hdr_to_sdr: bool) -> None:
        """Create a converter.

        Args:
            background: Color behind transparent pixels. None means that the alpha channel is dropped.
            hdr_to_sdr: Whether HDR becomes SDR.

        """
        self._scaler = VideoReformatter()
        self._background = background
        self._hdr_to_sdr = hdr_to_sdr

    def rgb(self, frame: av.VideoFrame, width: int, height: int) -> Pixels:
        """Return a frame as uint8 [height, width, 3]."""
        has_alpha = self._background is not None and _has_alpha(frame)
        if self._hdr_to_sdr and frame.color_trc in (PQ, HLG):
            deep = self._scaled(frame, width, height, "rgba64le" if has_alpha else "rgb48le")
            alpha = (deep[..., 3:] >> 8).astype(np.uint8)
            pixels = hdr_to_sdr(deep[..., :3], int(frame.color_trc), int(frame.color_primaries))
            return self._behind(np.concatenate([pixels, alpha], axis=2)) if has_alpha else pixels
        pixels = self._scaled(frame, width, height, "rgba" if has_alpha else "rgb24").astype(np.uint8, copy=False)
        return self._behind(pixels) if has_alpha else pixels

    def _behind(self, rgba: NDArray[np.uint8]) -> Pixels:
        """Put the background behind the transparent pixels of uint8 [height, width, 4]."""
        assert self._background is not None, "without a background, the alpha channel is dropped"
        return np.asarray(on_background(Image.fromarray(rgba), self._background))

    def _scaled(self, frame: av.VideoFrame, width: int, height: int, pixel_format: str) -> NDArray[Any]:
        return self._scaler.reformat(frame, width, height, pixel_format, threads=torch.get_num_threads()).to_ndarray()


def is_alpha_empty(frames: Iterable[av.VideoFrame]) -> bool:
    """Return whether `frames` have an alpha channel that is 0 in all of them. Stop at the first frame that decides."""
    scaler = VideoReformatter()
    for frame in frames:
        if not _has_alpha(frame):
            return False
        if scaler.reformat(frame, format="rgba", threads=torch.get_num_threads()).to_ndarray()[..., 3].any():
            return False
    return True


def _has_alpha(frame: av.VideoFrame) -> bool:
    return any(component.is_alpha for component in frame.format.components)


def hdr_to_sdr(pixels: NDArray[np.uint16], curve: int, primaries: int) -> Pixels:
    """Convert uint16 [height, width, 3] in the curve `PQ` or `HLG` to SDR, uint8 [height, width, 3].

    `primaries` are those of ITU-T H.273. Only those of BT.2020 are converted.
    """
    to_light, to_sdr = _light_of(curve), _sdr_of()
    found = np.empty(pixels.shape, np.uint8)
    rows = max(1, _ROWS // max(1, pixels.shape[1]))
    for start in range(0, len(pixels), rows):
        light = to_light[pixels[start : start + rows] >> 4]
        if primaries == BT2020:
            light = light @ _TO_BT709.T
        # The square root spends more levels on dark colors, in which steps are visible.
        levels = np.sqrt(np.clip(light, 0, _BRIGHTEST) / _BRIGHTEST, out=light)
        found[start : start + rows] = to_sdr[np.rint(levels * (len(to_sdr) - 1)).astype(np.uint16)]
    return found


@cache
def _light_of(curve: int) -> NDArray[np.float32]:
    """Return the light of each level as a multiple of diffuse white, float32 [levels]."""
    values = np.arange(_LEVELS) / (_LEVELS - 1)
    if curve == HLG:  # inverse of the OETF in ITU-R BT.2100, table 5
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        scene = np.where(values <= 0.5, values**2 / 3, (np.exp((values - c) / a) + b) / 12)
        return (scene * _HLG_PEAK).astype(np.float32)
    m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128  # table 4
    root = values ** (1 / m2)
    return ((np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1) * _PQ_PEAK).astype(np.float32)


@cache
def _sdr_of() -> NDArray[np.uint8]:
    """Return the SDR value of each level, uint8 [levels]. A level is the square root of the light of BT.709."""
    light = np.linspace(0, 1, 2 * _LEVELS) ** 2 * _BRIGHTEST
    above, room = np.maximum(light - _KNEE, 0), 1 - _KNEE
    slope = 1 / room - 1 / (_BRIGHTEST - _KNEE)
    shown = np.where(light <= _KNEE, light, _KNEE + above / (1 + above * slope))
    encoded = np.where(shown < 0.018, 4.5 * shown, 1.099 * shown**0.45 - 0.099)  # ITU-R BT.709
    values: NDArray[np.uint8] = np.rint(encoded * 255).astype(np.uint8)
    return values
