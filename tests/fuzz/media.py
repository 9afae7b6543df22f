"""Fuzzing targets that decode images, videos, audio clips and embeddings of every supported format."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from PIL import Image
from safetensors.torch import save

from mindie_mm.errors import InputError
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.embeddings import read_embeddings
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.media.video.encoded_video import EncodedVideo
from mindie_mm.settings.config import MediaCaps
from tests.audio_samples import encode_audio, encode_with_ffmpeg, tone
from tests.fuzz.target import Target
from tests.media_samples import encode_video, encoded, jpeg_variants, moving_frames
from tests.transport_samples import spaced

_MAX_BYTES = 2**16
_RATE = 16_000
_CAPS = MediaCaps(max_image_pixels=2**20, max_video_pixels=2**20)
_VIDEOS = (
    ("mp4", "libx264", {"bf": "2", "g": "4"}),
    ("mp4", "libx265", {"x265-params": "log-level=none"}),
    ("mp4", "mpeg4", {}),
    ("mov", "mjpeg", {}),
    ("matroska", "ffv1", {}),
    ("webm", "libvpx", {"token-parts": "2"}),
    ("webm", "libvpx-vp9", {"row-mt": "1"}),
    ("avi", "mpeg4", {"bf": "2"}),
    ("asf", "wmv2", {}),
    ("flv", "flv", {}),
    ("gif", "gif", {}),
    ("ivf", "libvpx", {}),
    ("mov", "qtrle", {}),
    ("avi", "cinepak", {}),
    ("mpegts", "mpeg2video", {}),
    ("mpegts", "libx264", {}),
    ("mpeg", "mpeg1video", {}),
)
_AUDIO = (
    ("WAV", "PCM_16", 1),
    ("W64", "FLOAT", 2),
    ("AIFF", "PCM_24", 1),
    ("CAF", "PCM_16", 1),
    ("FLAC", "PCM_16", 8),
    ("MP3", "MPEG_LAYER_III", 2),
    ("OGG", "VORBIS", 9),
    ("OGG", "OPUS", 8),
)
_FFMPEG_AUDIO = (
    ("adts", "aac"),
    ("ipod", "aac"),
    ("ipod", "alac"),
    ("asf", "wmav2"),
    ("matroska", "ac3"),
)


_SURROUND = (("caf", "pcm_s16be"), ("aiff", "pcm_s16be"), ("mov", "pcm_s16le"), ("ipod", "aac"))


@contextmanager
def images() -> Iterator[Target]:
    """Yield a target that decodes images with `open_image`. An input is a file."""
    image = Image.fromarray(moving_frames(1, 50, 40)[0])
    seeds = [data for _, data in jpeg_variants() if len(data) < _MAX_BYTES // 4]
    seeds += [encoded(image, file_format) for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")]
    seeds += [encoded(image.convert("P"), "PNG"), encoded(image.convert("I;16"), "PNG")]
    seeds += [
        encoded(image, "TIFF", compression=kind) for kind in ("tiff_lzw", "jpeg", "packbits", "tiff_adobe_deflate")
    ]
    yield Target(tuple(seeds), _reads(lambda data: open_image(data).decode()), _MAX_BYTES)


@contextmanager
def videos() -> Iterator[Target]:
    """Yield a target that decodes the first, middle and last frame with `EncodedVideo`. An input is a file."""
    frames = moving_frames(6, 64, 48)
    seeds = [encode_video(frames, 25, container, codec, options) for container, codec, options in _VIDEOS]
    yield Target((*seeds, spaced(seeds[-2], b"\0\0\0\1")), _reads(_sample), _MAX_BYTES)


def _sample(data: bytes) -> None:
    video = EncodedVideo.open(data)
    indices = sorted({0, video.num_frames // 2, video.num_frames - 1})
    video.count(indices)
    assert len(list(video.decode(indices))) == len(indices)


@contextmanager
def clips() -> Iterator[Target]:
    """Yield a target that decodes audio clips with `open_audio`. An input is a file."""
    seeds = [encode_audio(tone(0.1, 48_000, 200, channels), 48_000, *kind) for *kind, channels in _AUDIO]
    seeds += [encode_with_ffmpeg(tone(0.2, 48_000), 48_000, *kind) for kind in _FFMPEG_AUDIO]
    seeds += [encode_with_ffmpeg(tone(0.1, 48_000, 200, 8), 48_000, *kind, "7.1") for kind in _SURROUND]
    yield Target(tuple(seeds), _reads(lambda data: open_audio(data).decode(_RATE, 30 * _RATE)), _MAX_BYTES)


@contextmanager
def embeddings() -> Iterator[Target]:
    """Yield a target that reads files of embeddings with `read_embeddings`. An input is a file."""
    seeds = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensor = torch.arange(24, dtype=dtype).reshape(1, 4, 6)
        for value in (tensor, tensor[:, ::2], torch.nn.Parameter(tensor[0]), tensor.to_sparse()):
            torch.save(value, file := io.BytesIO())
            seeds.append(file.getvalue())
        seeds += [save({"": tensor}), save({"features": tensor[0]})]
    yield Target(tuple(seeds), _reads(read_embeddings), _MAX_BYTES)


def _reads(read: Callable[[bytes], object]) -> Callable[[bytes], bool]:
    def check(data: bytes) -> bool:
        try:
            with under(_CAPS):
                read(data)
        except (InputError, MemoryError):  # for some damaged files, FFmpeg reports ENOMEM
            return False
        return True

    return check
