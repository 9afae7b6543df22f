"""Valid and malicious media files of every format, codec and container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from mindie_mm.media.image.encoded_image import FORMATS
from tests.attacks import clips, images
from tests.audio_samples import encode_audio, encode_with_ffmpeg, speech, tone
from tests.media.test_audio import LOSSLESS
from tests.media.test_films import FORMATS_WITH_ALPHA, animate, encode_rgba, moving_square
from tests.media.test_formats import FILES
from tests.media_samples import encode_video, encoded, jpeg_variants, moving_frames, photograph

Sample = tuple[str, str, bytes]
"""Kind, name and contents of a media file."""
CASES = Path(__file__).parents[1] / "cases"
_TIFF_COMPRESSIONS = ("tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits", "jpeg", "zstd", "lzma")
_MODES = ("L", "P", "1", "CMYK", "YCbCr", "LAB", "F", "RGBA")
_VIDEOS = (
    *(("mp4", "libx264"), ("mp4", "mpeg4"), ("mp4", "libx265"), ("mp4", "libsvtav1"), ("matroska", "libx264")),
    *(("matroska", "ffv1"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("avi", "mjpeg")),
    *(("avi", "msmpeg4"), ("avi", "cinepak"), ("avi", "rawvideo"), ("mpegts", "libx264"), ("mpegts", "mpeg2video")),
    *(("mpeg", "mpeg2video"), ("flv", "flv"), ("asf", "wmv2"), ("gif", "gif"), ("mov", "qtrle"), ("ivf", "libvpx")),
)
_LOSSY = (("MP3", "MPEG_LAYER_III"), ("OGG", "VORBIS"), ("OGG", "OPUS"))
_AUDIO = (
    *(
        ("mp4", "aac"),
        ("adts", "aac"),
        ("ipod", "alac"),
        ("mov", "pcm_s16le"),
        ("webm", "libopus"),
        ("au", "pcm_mulaw"),
    ),
    *(("matroska", "libmp3lame"), ("matroska", "eac3"), ("asf", "wmav2"), ("mpegts", "mp2"), ("mpegts", "ac3")),
    *(("mpeg", "mp2"), ("flv", "libmp3lame"), ("avi", "pcm_s16le")),
)
_KINDS_OF_CASES = {".png": "image", ".avif": "image", ".wav": "audio", ".flac": "audio", ".amr": "audio"}
_ATTACKS = (images.OF_FORMATS, images.BROKEN, images.HARMLESS, images.OTHER_FORMATS)


def samples() -> list[Sample]:
    return [*_images(), *_videos(), *_clips(), *_hostile()]


def _images() -> Iterator[Sample]:
    photo = photograph()
    for name, data in [*FILES.items(), *jpeg_variants()]:
        yield "image", name, data
    yield "image", "HEIC", (CASES / "media3/photo.heic").read_bytes()
    for name in (name for name in FORMATS if name != "HEIC"):
        yield "image", f"large {name}", encoded(photo.resize((1400, 900)) if name != "ICO" else photo, name)
    yield "image", "WEBP of two frames", encoded(photo, "WEBP", save_all=True, append_images=[photo.rotate(180)])
    for compression in _TIFF_COMPRESSIONS:
        yield "image", f"TIFF by {compression}", encoded(photo, "TIFF", compression=compression)
    yield "image", "TIFF by group4", encoded(photo.convert("1"), "TIFF", compression="group4")
    for mode in _MODES:
        yield (
            "image",
            f"TIFF in {mode}",
            encoded((photo.convert("L") if mode == "F" else photo).convert(mode), "TIFF"),
        )
    deep = Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64))
    for name in ("PNG", "TIFF"):
        yield "image", f"deep {name}", encoded(deep, name)


def _videos() -> Iterator[Sample]:
    for container, codec in _VIDEOS:
        yield "video", f"{codec} in {container}", encode_video(moving_frames(12), container=container, codec=codec)
    for container, codec, pixel_format in FORMATS_WITH_ALPHA:
        yield (
            "video",
            f"{pixel_format} of {codec} in {container}",
            encode_rgba(moving_square(), container, codec, pixel_format),
        )
    for name in ("PNG", "WEBP"):
        yield "video", f"animated {name}", animate(moving_square(), name, duration=100)
    large = np.stack([np.asarray(photograph(size=(1280, 720)).rotate(angle)) for angle in range(4)])
    for codec in ("libx264", "libx265", "libvpx-vp9", "libsvtav1"):
        yield "video", f"large {codec}", encode_video(large, container="matroska", codec=codec)
    tracks = clips.matroska_track(1, b"V_VP8") + clips.matroska_track(2, b"S_TEXT/UTF8", kind=17)
    yield "video", "VP8 with subtitles", clips.matroska(tracks, [(1, frame) for frame in clips.vp8()])
    for path in sorted([*CASES.glob("media/*"), *CASES.glob("films/*")]):
        kind = "video" if path.name == "animation.png" else _KINDS_OF_CASES.get(path.suffix, "video")
        yield kind, path.name, path.read_bytes()


def _clips() -> Iterator[Sample]:
    yield "audio", "speech", speech()
    for form, subtype in [*LOSSLESS, *_LOSSY]:
        yield "audio", f"{subtype} in {form}", encode_audio(tone(1.3, 48_000, channels=2), 48_000, form, subtype)
    for container, codec in _AUDIO:
        yield "audio", f"{codec} in {container}", encode_with_ffmpeg(tone(1.5, 48_000), 48_000, container, codec)
    yield "audio", "half a minute", encode_audio(tone(30, 44_100), 44_100)


def _hostile() -> Iterator[Sample]:
    for attacks in _ATTACKS:
        for name, attack in attacks.items():
            yield "image", name, (attack[0] if isinstance(attack, tuple) else attack)()
    for name, make in clips.BROKEN_VIDEOS.items():
        yield "video", name, make()
    for name, make in clips.BROKEN_AUDIO.items():
        yield "audio", name, make()
