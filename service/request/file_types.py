"""Detects media formats by content. File names and content types are not trusted."""

from __future__ import annotations

from mindie_mm.errors import MediaError
from mindie_mm.media.fetch.urls import WHITE_SPACE, decode_base64

HEAD_BYTES = 48
"""Number of bytes at the start of a file that identify its format."""
_MAX_SUFFIX = len(".jpeg2000")
"""Maximum length of a file suffix with its dot."""

# Each entry has an offset, the bytes at this offset, and the extension.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "jpg"),
    (0, b"\x89PNG\r\n\x1a\n", "png"),
    (0, b"GIF8", "gif"),
    (8, b"WEBP", "webp"),
    (0, b"BM", "bmp"),
    (0, b"II*\x00", "tiff"),
    (0, b"MM\x00*", "tiff"),
    (4, b"ftypavif", "avif"),
    (4, b"ftypavis", "avif"),
    (4, b"jP  \r\n\x87\n", "jp2"),
    (0, b"\xff\x4f\xff\x51", "j2k"),
    (0, b"\0\0\1\0", "ico"),
    (4, b"ftypM4A", "m4a"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "mkv"),
    (8, b"AVI ", "avi"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "wmv"),
    (8, b"WAVE", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (0, b"\xff\xfa", "mp3"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
    (8, b"AIFF", "aiff"),
    (8, b"AIFC", "aiff"),
    (0, b"PK\x03\x04", "pt"),
    (8, b'{"', "safetensors"),
)


def extension(head: bytes) -> str | None:
    """Return the usual file extension for a file that starts with `head`, or None if its format is unknown."""
    return next((found for offset, magic, found in _MAGIC if head.startswith(magic, offset)), None)


def is_base64_media(text: str) -> bool:
    """Return whether `text` begins like base64 of a known format and has no file suffix.

    The rest of the text is not checked, so that invalid base64 gets an error about base64 and not about a missing file.
    """
    head_chars = HEAD_BYTES // 3 * 4
    begin = text[: 2 * head_chars].translate(dict.fromkeys(map(ord, WHITE_SPACE)))
    try:
        head = decode_base64(begin[:head_chars])
    except MediaError:
        return False
    return extension(head) is not None and "." not in text[-_MAX_SUFFIX:]
