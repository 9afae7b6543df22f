"""Hashes of media as in vLLM, under which its servers find media in their caches.

The format is that of `MultiModalHasher` in vLLM 0.32: blake3 of chunks that are preceded by their length, and
of values that are preceded by a tag.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from blake3 import blake3

from mindie_mm.inputs import Kind
from mindie_mm.media.guard.caps import VideoSample
from mindie_mm.settings.config import Colour

_NONE, _SEQUENCE, _MAPPING, _LEAF = b"\0", b"\1", b"\2", b"\3"
_SCOPES: Mapping[str, str] = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
"""Key of `mm_processor_kwargs` with the options of one kind."""


def media_hash(kind: Kind, content: Any, model_id: str, options: Mapping[str, Any]) -> str:
    """Return the hash of an item.

    Args:
        kind: Kind of the item.
        content: What identifies the item: its `uuid`, or `file_content`.
        model_id: Name of the model that vLLM serves, as in its option --model.
        options: Fields of the request with options of media, without empty ones. Keys in a scope of another kind do not
            enter the hash.

    Returns:
        64 hexadecimal digits.

    """
    factors = {name: own for name, given in options.items() if (own := _of_kind(kind, name, given))}
    digest = blake3()
    for name, value in sorted({kind: content, "model_id": model_id, **factors}.items()):
        for chunk in (*_framed(name.encode()), *_value(value)):
            digest.update(chunk)
    return digest.hexdigest()


def has_options(kind: Kind, options: Mapping[str, Any]) -> bool:
    """Return whether options enter the hashes of items of a kind. Otherwise the `uuid` of an item is its hash."""
    return any(_of_kind(kind, name, given) for name, given in options.items())


def video_metadata(sample: VideoSample) -> dict[str, Any]:
    """Return what vLLM's hash of a video covers in addition to its file."""
    return {
        "total_num_frames": sample.num_frames,
        "fps": sample.fps or 0.0,
        "duration": sample.num_frames / sample.fps if sample.fps else 0,
        "video_backend": "opencv",
        "frames_indices": sample.indices,
        "do_sample_frames": len(sample.indices) == sample.num_frames,
    }


class FileContent:
    """The content of a media file, as an item of a hash."""

    def __init__(self, kind: Kind, data: bytes, conversion: Colour | None = None) -> None:
        """Describe a file.

        Args:
            kind: Kind of the item.
            data: Bytes of the file.
            conversion: Background color for the conversion of an image to RGB. None if its file is RGB.

        """
        self._kind = kind
        self._data = data
        self._conversion = conversion

    def chunks(self) -> Iterator[bytes]:
        """Yield the chunks of the hash."""
        yield from _framed(self._kind.encode())
        if self._conversion is None:
            yield from _value(self._data)
        else:
            config = {"image_mode": "RGB", "rgba_background_color": self._conversion}
            yield from _value({"io_config": config, "data": self._data})


def _of_kind(kind: Kind, name: str, given: Any) -> Any:
    """Return the part of a field of the request that concerns items of a kind."""
    if not isinstance(given, Mapping):
        return given
    if name == "media_io_kwargs":
        return {kind: given[kind]} if given.get(kind) else {}
    scope = _SCOPES.get(kind)
    return {key: value for key, value in given.items() if key not in _SCOPES.values() or key == scope}


def _framed(chunk: bytes) -> tuple[bytes, bytes]:
    return len(chunk).to_bytes(8, "little"), chunk


def _value(value: Any) -> Iterator[bytes]:
    """Yield the chunks of a value of JSON, of bytes or of a file."""
    if value is None:
        yield _NONE
    elif isinstance(value, Mapping):
        yield _MAPPING
        yield len(value).to_bytes(8, "little")
        for name, part in value.items():
            yield from _framed(str(name).encode())
            yield from _value(part)
    elif isinstance(value, list | tuple):
        yield _SEQUENCE
        yield len(value).to_bytes(8, "little")
        for part in value:
            yield from _value(part)
    else:
        yield _LEAF
        if isinstance(value, FileContent):
            yield from value.chunks()
        else:
            yield from _framed(_leaf(value))


def _leaf(value: Any) -> bytes:
    """Return the bytes of a value as numpy stores it."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return struct.pack("<?", value)
    return struct.pack("<q" if isinstance(value, int) else "<d", value)
