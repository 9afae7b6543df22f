"""Kinds of media by file name extension."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from mindie_mm.inputs import Kind

ENDINGS: Mapping[Kind, Mapping[str, str]] = {
    "image": {
        "JPEG": ".jpg .jpeg .jpe .jfif",
        "PNG": ".png .apng",
        "WEBP": ".webp",
        "GIF": ".gif",
        "BMP": ".bmp",
        "TIFF": ".tif .tiff",
        "AVIF": ".avif .avifs",
        "HEIC": ".heic .heif .hif",
        "JPEG2000": ".jp2 .j2k .jpc .jpf .jpx .j2c",
        "ICO": ".ico",
        "PPM": ".ppm .pgm .pbm .pnm .pfm",
    },
    "video": {
        "mov": ".mp4 .m4v .mov .qt .3gp .3g2 .f4v",
        "matroska": ".mkv .webm",
        "avi": ".avi",
        "asf": ".wmv .asf",
        "mpegts": ".ts .m2t .m2ts .mts",
        "flv": ".flv",
        "mpeg": ".mpg .mpeg .mpe .m2p .vob",
        "gif": "",
        "dv": ".dv .dif",
        "ogg": ".ogv",
        "ivf": ".ivf",
        "h264": ".h264 .264 .avc",
        "hevc": ".h265 .265 .hevc",
    },
    "audio": {
        "wav": ".wav",
        "flac": ".flac",
        "mp3": ".mp3 .mp2",
        "aac": ".aac .adts",
        "ogg": ".ogg .oga .opus",
        "mov": ".m4a .m4b",
        "matroska": ".mka .weba",
        "aiff": ".aiff .aif .aifc",
        "asf": ".wma",
        "caf": ".caf",
        "w64": ".w64",
        "au": ".au .snd",
        "nistsphere": ".sph",
        "amr": ".amr .awb",
    },
}
"""File name extensions of each supported image format (`FORMATS`) and of each video and audio container (`CONTAINERS`).

A `.gif`, `.apng` or `.webp` file counts as an image. A file with an extension such as `.mp4` or `.mkv` counts as a
video, even if it contains only audio. If a request passes an animated image as a video, its frames are read. If a
request passes a video as audio, its audio is read.
"""
_KINDS: Mapping[str, Kind] = {
    ending: kind for kind, formats in ENDINGS.items() for endings in formats.values() for ending in endings.split()
}


def ending_of(name: str) -> str:
    """Return the extension in lower case, such as `.jpg` for `a/b.c.JPG`, or an empty string."""
    return PurePath(name).suffix.lower()


def kind_of(name: str) -> Kind | None:
    """Return the kind of media that the extension of a file name indicates, or None for any other extension."""
    return _KINDS.get(ending_of(name))
