"""Number of samples that FFmpeg decodes from a clip, counted from its packets without decoding them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from typing import TypeAlias

import av
from av.audio.stream import AudioStream

_MOV = "mov,mp4,m4a,3gp,3g2,mj2"
_OF_BYTES = frozenset({"wav", "w64", "aiff", "caf", "au", "nistsphere", "avi", "matroska,webm", _MOV})
"""FFmpeg's names of the containers in which packets of PCM contain whole samples."""
_OF_EQUAL_FRAMES = {"mp3": ("mp3float",), "aac": ("aac",), _MOV: ("aac", "mp3float")}
"""Decoders by container whose packets are one frame each, and whose frames all have the same number of samples."""
_OF_DURATION = {
    "flac": ("flac",),
    "amr": ("amrnb", "amrwb"),
    "caf": ("alac",),
    "wav": ("adpcm_ima_wav", "adpcm_ms", "gsm_ms"),
    "aiff": ("adpcm_ima_qt",),
    _MOV: ("alac", "flac", "adpcm_ima_qt"),
}
"""Decoders by container whose packets have an exact duration. The unit of time is one sample."""
_OF_OPUS = frozenset({"ogg", "matroska,webm", _MOV})
_OPUS_CHANNELS = 2
"""Maximum number of channels of a clip with a single stream of Opus."""
_OPUS_FRAMES = (480, 960, 1920, 2880) * 3 + (480, 960) * 2 + (120, 240, 480, 960) * 4
"""Number of samples of a frame for each configuration of an Opus packet (RFC 6716, section 3.1)."""
_MAX_PACKETS = 2**17
"""Maximum number of packets to count, which takes a second. Decoding stops earlier, at the limit of the model."""
_LOW_COMPLEXITY = "LC"
"""PyAV's name of the AAC profile without extensions. The extensions double the rate and the number of samples."""

_Packet: TypeAlias = "av.Packet[AudioStream]"


def num_decoded(
    packets: Iterable[_Packet], container: str, stream: AudioStream, num_channels: int, max_samples: int
) -> int | None:
    """Return the number of samples per channel that FFmpeg decodes from all packets of a clip.

    If the packets have more than `max_samples`, the rest is not counted. Follows `discard_samples` in FFmpeg's
    libavcodec/decode.c, which drops the padding of encoders and samples that an edit list hides. Return None if the
    number of samples of a packet is not certain:

    - A packet of WMA may contain the ends of several frames. The number of samples of a Vorbis packet depends on the
      packet before it. Several streams of Opus, and extensions of AAC, give other numbers.
    - MPEG streams, ASF, FLV and DV may begin in the middle of a frame. Such packets are passed over.
    - In Matroska, durations are rounded to milliseconds.
    - A packet is truncated, or there are more than `_MAX_PACKETS`.
    """
    if (num_samples := _counter(container, stream, num_channels)) is None:
        return None
    total, left, skips = 0, max_samples, stream.codec_context.delay if num_samples is _opus_samples else 0
    for place, packet in enumerate(packets):
        number, padding = num_samples(packet), 0
        if packet.is_corrupt or not number or place >= _MAX_PACKETS:
            return None
        if left < 0:
            return max_samples + 1
        left -= number
        if packet.has_sidedata("skip_samples"):
            skips, padding = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
        if packet.is_discard or skips >= number:
            skips = max(0, skips - number)
            continue
        number, skips = number - skips, 0
        total += number - (padding if padding <= number else 0)
    return total or None


def _counter(container: str, stream: AudioStream, num_channels: int) -> Callable[[_Packet], int] | None:
    """Return a function from a packet to the number of samples per channel that the decoder makes of it.

    Return None if there is no such function.
    """
    context, rate, time_base = stream.codec_context, stream.rate, stream.time_base
    name = context.name
    if container in _OF_BYTES and (bits := _pcm_bits(name)):
        num_bytes = bits // 8 * num_channels
        return lambda packet: packet.size // num_bytes
    if name == "opus" and container in _OF_OPUS and num_channels <= _OPUS_CHANNELS:
        return _opus_samples
    if name in _OF_EQUAL_FRAMES.get(container, ()) and (size := context.frame_size):
        return (lambda _: size) if name != "aac" or context.profile == _LOW_COMPLEXITY else None
    if name in _OF_DURATION.get(container, ()) and time_base and time_base * rate == 1:
        return lambda packet: packet.duration or 0
    return None


def _pcm_bits(codec: str) -> int:
    """Return the number of bits of a sample, or 0 if the codec does not store samples one after the other."""
    found = re.fullmatch(r"pcm_(?:alaw|mulaw|[suf](8|16|24|32|64)(?:be|le)?)", codec)
    return 0 if found is None else int(found[1] or 8)


def _opus_samples(packet: _Packet) -> int:
    """Return the number of samples of an Opus packet (RFC 6716, section 3.2)."""
    data = memoryview(packet)
    num_frames = (1, 2, 2, 0)[data[0] & 3] or (data[1] & 63 if len(data) > 1 else 0)
    return num_frames * _OPUS_FRAMES[data[0] >> 3]
