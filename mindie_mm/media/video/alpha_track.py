"""Transparency of VP8 and VP9 in WebM, where a second video contains the alpha channel.

Each block has an addition (BlockAdditional) with a packet of the second video, whose luma is the alpha channel.
FFmpeg's own decoders drop it.
"""

from __future__ import annotations

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from mindie_mm.errors import MediaError

_CODECS = frozenset({"vp8", "vp9"})
_SIDE_DATA = "matroska_block_additional"
_ALPHA = (1).to_bytes(8)
"""BlockAddID of an alpha channel, which FFmpeg puts before the data of the addition."""


def has_alpha_track(stream: VideoStream) -> bool:
    """Return whether the container states that blocks have additions with the alpha channel."""
    return stream.codec_context.name in _CODECS and stream.metadata.get("alpha_mode") == "1"


class AlphaTrack:
    """Decoder of the alpha channel of a stream."""

    def __init__(self, stream: VideoStream) -> None:
        self._context: av.VideoCodecContext = av.CodecContext.create(stream.codec_context.name, "r")
        self._context.options = dict(stream.codec_context.options)
        self._context.thread_count = 1
        self._scaler = VideoReformatter()
        self._planes: dict[int | None, NDArray[np.uint8]] = {}
        """Alpha channels of frames that the decoder of the colors still keeps, by time."""

    def read(self, packet: av.Packet[VideoStream]) -> None:
        """Decode the alpha channel of a packet. PyAV errors are propagated unchanged."""
        for side_data in packet.iter_sidedata():
            addition = bytes(side_data) if side_data.data_type == _SIDE_DATA else b""
            if addition.startswith(_ALPHA):
                for frame in self._context.decode(av.Packet(addition[len(_ALPHA) :])):
                    self._planes[packet.pts] = _luma(frame)

    def merged(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Return `frame` with its alpha channel in the format rgba, or unchanged if it has none."""
        alpha = self._planes.pop(frame.pts, None)
        if alpha is None:
            return frame
        if alpha.shape != (frame.height, frame.width):
            raise MediaError(
                f"the alpha channel has {alpha.shape[1]}x{alpha.shape[0]} pixels, but the video has "
                f"{frame.width}x{frame.height}"
            )
        # By default, the scaler starts threads, which a locked-in decoder is not allowed to do.
        colors = self._scaler.reformat(frame, format="rgb24", threads=1).to_ndarray()
        return av.VideoFrame.from_ndarray(np.dstack([colors, alpha]), format="rgba")


def _luma(frame: av.VideoFrame) -> NDArray[np.uint8]:
    """Return the luma of a frame as uint8 [height, width]."""
    if frame.format.components[0].bits != 8:
        raise MediaError("the alpha channel of the video has more than 8 bits, which is not supported")
    plane = frame.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    return rows[: frame.height, : frame.width].copy()
