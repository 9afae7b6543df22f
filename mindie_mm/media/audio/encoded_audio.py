"""Decoding of audio with PyAV. Like `load_audio` of transformers, this module returns one channel at a given rate.

For lossless files, the result is identical, bit for bit, to that of `librosa.load` and of the soundfile backend of
`load_audio`. Channels are averaged, soxr resamples with quality HQ, and the result has
ceil(samples * rate / source rate) samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import av
import numpy as np
import soxr
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from mindie_mm.errors import InputError, LimitExceeded, MediaError, Miscounted
from mindie_mm.media.audio.declared_length import declared_length_s, is_truncated
from mindie_mm.media.audio.packet_samples import num_decoded
from mindie_mm.media.document.pages import DocumentPage
from mindie_mm.media.guard.caps import caps, decodes_to_count, length_text
from mindie_mm.media.guard.container import (
    BARE,
    best_stream,
    check_codec,
    frames_of,
    open_container,
    packets_of,
    reading,
)
from mindie_mm.media.image.encoded_image import Data

CONTAINERS = (
    *("wav", "flac", "mp3", "aac", "ogg", "aiff", "caf", "w64", "au", "nistsphere", "amr"),
    *("mov", "matroska", "asf", "avi", "mpegts", "flv", "mpeg", "dv"),
)
"""Supported containers, detected by content. They include video containers with an audio stream.

`mov` includes MP4 and M4A, `matroska` includes WebM, and `mpeg` is the MPEG program stream. Playlists are not
supported.
"""
_PASSED_OVER = (*BARE, "mpegts", "mpeg")
"""Containers in which packets that cannot be decoded are skipped. A broadcast recording may start within a frame."""
MIN_RATE, MAX_RATE = 1_000, 768_000
"""Minimum and maximum sampling rate of a source in Hz."""
MAX_CHANNELS = 64
MAX_AMPLITUDE = 1e9
"""Maximum absolute sample value. The squares of much larger values would overflow in the spectrogram."""

_MAX_PLANES = 7
"""Maximum number of planes of a frame that PyAV can read.

PyAV expects an end marker after the planes. If there are more planes, FFmpeg's list has no space for this marker.
"""

# Number of seconds to decode beyond the limit, so that the cut does not affect the resampling filter.
_MARGIN_S = 1.0
_UNSTATED_S = 30.0
"""Assumed length in seconds of a clip whose container states none."""
_PADDING_S = 0.2
"""Maximum length in seconds of the silence that encoders of lossy formats add, for example to complete a block."""

Samples = NDArray[np.float32]
"""Samples of one channel, float32 [samples], mostly within [-1, 1]."""


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """The samples of a clip at the rate of a model, which may not be decoded yet."""

    num_samples: int
    decode: Callable[[], Samples]
    """Function that returns the samples."""


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """A clip whose container has been read and checked against the limits. The samples are not decoded yet."""

    rate: int
    """Sampling rate in Hz in the container. The decoder may report another rate."""
    data: bytes
    max_source_samples: int
    """Maximum number of samples per channel to decode. Decoded samples are kept as float32 until they are resampled."""
    max_pixels: int
    """Maximum number of pixels of an embedded cover picture."""
    stated_s: float
    """Length in seconds according to the container. 0 if the container states none. It may be wrong."""
    padding_s: float
    """Maximum length in seconds of the silence that the encoder may have added."""
    declared_s: float
    """Length in seconds that the file must have if it is complete, or 0 if this is unknown."""
    num_in_packets: int | None
    """Number of samples per channel to decode, counted from the packets. None if they were not counted."""

    @classmethod
    def open(cls, data: bytes, *, counts: bool = True) -> EncodedAudio:
        """Read the container of `data` without decoding it. `counts` says whether to count the samples of its packets.

        Raises:
            MediaError: The data cannot be read as audio.
            LimitExceeded: The clip exceeds a limit.

        """
        limits = caps()
        unreadable = MediaError(
            f"the {len(data)} bytes cannot be read as audio (supported formats: {', '.join(CONTAINERS)})"
        )
        with reading(lambda: unreadable), open_container(data, CONTAINERS, limits.max_video_pixels) as container:
            stream, num_channels = _stream_of(container)
            rate, padding_s = stream.rate, 0.0 if stream.codec_context.codec.lossless else _PADDING_S
            declared_s = declared_length_s(container, stream, data)
            durations = [container.duration and container.duration / av.time_base]
            durations += [stream.duration and stream.time_base and float(stream.duration * stream.time_base)]
            _check_rate(rate)
            if not 1 <= num_channels <= MAX_CHANNELS:
                raise LimitExceeded(f"the audio clip has {num_channels} channels; the limit is {MAX_CHANNELS}")
            if (stated := max(filter(None, durations), default=0.0)) > limits.max_audio_seconds:
                length = length_text(stated, limits.max_audio_seconds)
                raise LimitExceeded(f"the audio clip lasts {length}; the limit is {limits.max_audio_seconds:g} s")
            most, max_pixels, number = limits.max_audio_samples, limits.max_video_pixels, None
            if counts and not decodes_to_count():
                packets = packets_of(container, stream, len(data))
                number = num_decoded(packets, container.format.name, stream, num_channels, most)
        return cls(rate, data, most, max_pixels, stated, padding_s, declared_s, number)

    def clip(self, rate: int, max_samples: int) -> Clip:
        """Return the clip at `rate` Hz. It is decoded now if its packets were not counted or have too few samples.

        Raises:
            MediaError, LimitExceeded: In the same cases as `decode`. If the clip is not decoded yet, `Clip.decode`
                raises some of these errors, and Miscounted if it finds another number of samples.

        """
        num_source = self.num_in_packets
        if num_source is None or is_truncated(num_source / self.rate, self.declared_s):
            samples = self.decode(rate, max_samples)
            return Clip(len(samples), lambda: samples)
        self._check_length(num_source, self.rate, rate, max_samples)
        if num_source > self.max_source_samples:
            raise self._too_many_samples()
        num_samples = min(math.ceil(num_source * rate / self.rate), max_samples)

        def decode() -> Samples:
            samples = self.decode(rate, max_samples)
            if len(samples) != num_samples:
                raise Miscounted(
                    f"{len(samples)} samples at {rate} Hz could be decoded from the audio clip, but its packets "
                    f"indicate {num_samples}"
                )
            return samples

        return Clip(num_samples, decode)

    def decode(self, rate: int, max_samples: int) -> Samples:
        """Return the samples at `rate` Hz. The clip is not decoded beyond `max_samples`, apart from a margin.

        Raises:
            MediaError: The clip is broken or truncated.
            LimitExceeded: The clip has more than `max_samples`, apart from padding of a lossy format, or more than
                `max_source_samples` must be decoded.

        """
        pieces: list[Samples] = []
        num_samples, own_rate = 0, self.rate
        with reading(lambda: MediaError(f"the audio clip is broken: only {num_samples} samples could be decoded")):
            for frame in self._frames():
                if not pieces:
                    own_rate = _check_rate(frame.sample_rate)
                elif frame.sample_rate != own_rate:
                    raise _changed_rate(own_rate, frame.sample_rate)
                pieces.append(_mono(frame))
                num_samples += len(pieces[-1])
                if num_samples > self.max_source_samples:
                    raise self._too_many_samples()
                if num_samples >= _num_source_samples(max_samples, own_rate, rate):
                    break
        if not num_samples:
            raise MediaError("the audio clip has no samples")
        self._check_length(num_samples, own_rate, rate, max_samples)
        self._require_whole(num_samples / own_rate)
        return _resample(np.concatenate(pieces), own_rate, rate, max_samples)

    def speech(self, rate: int) -> NDArray[np.int16]:
        """Return all samples at `rate` Hz as int16. Resampling in pieces keeps the memory of long speech small.

        Raises:
            MediaError: The clip is broken or truncated.
            LimitExceeded: The clip has more than `max_source_samples` at `rate` Hz.

        """
        pieces: list[NDArray[np.int16]] = []
        num_source = num_samples = own_rate = 0
        resampler: soxr.ResampleStream | None = None
        with reading(lambda: MediaError(f"the audio clip is broken: only {num_source} samples could be decoded")):
            for frame in self._frames():
                if not own_rate:
                    own_rate = _check_rate(frame.sample_rate)
                    resampler = soxr.ResampleStream(own_rate, rate, 1, quality="HQ") if own_rate != rate else None
                elif frame.sample_rate != own_rate:
                    raise _changed_rate(own_rate, frame.sample_rate)
                samples = _checked(_mono(frame))
                num_source += len(samples)
                pieces.append(_int16(samples if resampler is None else resampler.resample_chunk(samples)))
                num_samples += len(pieces[-1])
                if num_samples > self.max_source_samples:
                    raise self._too_many_samples()
        if not num_source:
            raise MediaError("the audio clip has no samples")
        self._require_whole(num_source / own_rate)
        if resampler is not None:
            pieces.append(_int16(resampler.resample_chunk(np.empty(0, np.float32), last=True)))
        return np.concatenate(pieces)

    def stated_samples(self, rate: int) -> int:
        """Return the number of samples at `rate` Hz according to the container, with a margin of 1 s.

        If the container states no length, 30 s are assumed.
        """
        return min(math.ceil((self.stated_s or _UNSTATED_S) * rate + _MARGIN_S * rate), self.max_source_samples)

    def _too_many_samples(self) -> LimitExceeded:
        return LimitExceeded(f"the audio clip has more samples than the limit of {self.max_source_samples}")

    def _check_length(self, num_source: int, own_rate: int, rate: int, max_samples: int) -> None:
        """Raise LimitExceeded if a clip of `num_source` samples is too long, apart from padding of a lossy format.

        The other arguments are its rate, and those of `decode`.
        """
        if num_source > math.ceil(max_samples * own_rate / rate) + self.padding_s * own_rate:
            raise _too_long(max(self.stated_s, num_source / own_rate), max_samples / rate)

    def _require_whole(self, length_s: float) -> None:
        """Raise MediaError if the clip lacks its end."""
        if is_truncated(length_s, self.declared_s):
            raise MediaError(
                f"the audio clip is truncated: its header declares {self.declared_s:.1f} s, but it has {length_s:.1f} s"
            )

    def _frames(self) -> Iterator[av.AudioFrame]:
        interleaver = av.AudioResampler("flt")
        with open_container(self.data, CONTAINERS, self.max_pixels) as container:
            for frame in frames_of(container, _stream_of(container)[0], len(self.data), _PASSED_OVER):
                if not frame.samples:
                    continue
                if frame.format.is_planar and frame.layout.nb_channels > _MAX_PLANES:
                    yield from interleaver.resample(frame)
                else:
                    yield frame


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """Samples that the caller supplies, with the same interface as an EncodedAudio."""

    samples: Samples
    rate: int | None
    """Sampling rate in Hz. None means the sampling rate of the model."""

    def clip(self, rate: int, max_samples: int) -> Clip:
        """Return the clip at `rate` Hz. Raise LimitExceeded if it has more than `max_samples`."""
        samples = self.decode(rate, max_samples)
        return Clip(len(samples), lambda: samples)

    def decode(self, rate: int, max_samples: int) -> Samples:
        """Return the samples at `rate` Hz. Raise LimitExceeded if there are more than `max_samples`."""
        own_rate = self.rate or rate
        if len(self.samples) > math.ceil(max_samples * own_rate / rate):
            raise _too_long(len(self.samples) / own_rate, max_samples / rate)
        return _resample(self.samples, own_rate, rate, max_samples)


def open_audio(data: Data, rate: int | None = None, *, counts: bool = True) -> EncodedAudio | DecodedAudio:
    """Read the header of a clip. Call `clip` on the result to learn its length, and `decode` to decode the samples.

    Args:
        data: An encoded clip, or samples of one channel.
        rate: Sampling rate of the samples in Hz. None means the sampling rate of the model. Not allowed for an encoded
            clip.
        counts: Whether to count the samples of an encoded clip from its packets, which `clip` then need not decode.

    Raises:
        InputError: `rate` is given for an encoded clip.
        MediaError: The data cannot be read as audio.
        LimitExceeded: The clip exceeds a limit.

    """
    assert not isinstance(data, (tuple, DocumentPage)), "frames are a video's, and pages are images"
    if not isinstance(data, bytes):
        return DecodedAudio(data, rate)
    if rate is not None:
        raise InputError(f"sampling_rate is {rate}, but an encoded clip has its own rate; leave sampling_rate out")
    return EncodedAudio.open(data, counts=counts)


def num_audio_tracks(data: bytes) -> int:
    """Return the number of audio tracks that FFmpeg finds in a video, or 0 if the data cannot be read."""
    with (
        suppress(MediaError),
        reading(lambda: MediaError("unreadable")),
        open_container(data, CONTAINERS, caps().max_video_pixels) as container,
    ):
        return len(container.streams.audio)
    return 0


def _stream_of(container: InputContainer) -> tuple[AudioStream, int]:
    """Return the audio stream that players choose, and its number of channels.

    This function replaces the channel layout with a layout without an order. If PyAV reads a layout with a custom
    order, as in some CAF, AIFF and MOV files, it frees a list that belongs to FFmpeg. For each frame, it would free the
    list again.

    Raises:
        MediaError: There is no supported audio stream.

    """
    if container.streams.best("audio") is None and any(_states_no_rate(one) for one in container.streams.audio):
        raise MediaError("the audio stream of the file has no sampling rate")
    stream: AudioStream = best_stream(container, "audio")
    check_codec(stream.codec_context, "the audio stream")
    if num_channels := stream.codec_context.channels:  # this frees the list; the next line replaces the layout
        stream.codec_context.layout = f"{num_channels} channels"
    return stream, num_channels


def _states_no_rate(stream: AudioStream) -> bool:
    """Return whether a stream does not state its sampling rate. FFmpeg does not choose such a stream as the best."""
    return stream.codec_context is not None and not stream.codec_context.sample_rate


def _check_rate(rate: int) -> int:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise LimitExceeded(
            f"the audio clip has a sampling rate of {rate} Hz; it must be from {MIN_RATE} to {MAX_RATE}"
        )
    return rate


def _too_long(length_s: float, limit_s: float) -> LimitExceeded:
    return LimitExceeded(
        f"the audio clip lasts {length_text(length_s, limit_s)}; the limit of this model is {limit_s:g} s. Cut the "
        "clip into parts of at most this length"
    )


def _num_source_samples(max_samples: int, source_rate: int, rate: int) -> int:
    """Return the number of source samples that are needed to compute the first `max_samples` samples at `rate`."""
    return math.ceil(max_samples * source_rate / rate) + math.ceil(_MARGIN_S * source_rate)


def _mono(frame: av.AudioFrame) -> Samples:
    """Return float32 [samples]. Integers are scaled to [-1, 1), and channels are averaged."""
    array = frame.to_ndarray()
    channels = array if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels).T
    with np.errstate(over="ignore", invalid="ignore"):  # `_resample` rejects NaN and infinity
        scaled: Samples = channels.astype(np.float32)
        if array.dtype.kind == "u":
            scaled -= 128  # unsigned samples always have 8 bits
        if array.dtype.kind != "f":
            scaled *= np.float32(2.0 ** (1 - 8 * array.dtype.itemsize))
        mono: Samples = scaled[0] if len(scaled) == 1 else scaled.mean(axis=0)
    return mono


def _changed_rate(rate: int, other: int) -> MediaError:
    return MediaError(f"the audio clip changes its sampling rate from {rate} Hz to {other} Hz, which is not supported")


def _checked(samples: Samples) -> Samples:
    peak = np.abs(samples).max()
    if not peak <= MAX_AMPLITUDE:  # true for NaN, too
        raise MediaError(f"the audio clip has a sample of amplitude {peak}; the limit is {MAX_AMPLITUDE:g}")
    return samples


def _int16(samples: Samples) -> NDArray[np.int16]:
    whole: NDArray[np.int16] = np.clip(np.rint(samples * 2.0**15), -(2**15), 2**15 - 1).astype(np.int16)
    return whole


def _resample(samples: Samples, source_rate: int, rate: int, max_samples: int) -> Samples:
    _checked(samples)
    if source_rate != rate:
        samples = samples[: _num_source_samples(max_samples, source_rate, rate)]
        num_samples = math.ceil(len(samples) * rate / source_rate)
        samples = soxr.resample(samples, source_rate, rate, quality="HQ")
        samples = np.pad(samples, (0, max(0, num_samples - len(samples))))[:num_samples]
    return np.ascontiguousarray(samples[:max_samples])
