"""Reading of media sources. The result is encoded bytes, or pixels or samples if the source is decoded already."""

from __future__ import annotations

import asyncio
import os
import select
import time
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL.TiffImagePlugin import TiffImageFile

from mindie_mm.errors import InputError, LimitExceeded, MediaError, naming
from mindie_mm.inputs import Media
from mindie_mm.media.audio.encoded_audio import Samples
from mindie_mm.media.document.pages import DocumentPage
from mindie_mm.media.document.tiff import DEPTH, image_of_tiff
from mindie_mm.media.fetch.urls import base64_size, base64_start, decode_base64, file_url_path, scheme_of
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.caps import caps
from mindie_mm.media.image.colours import pil_to_rgb
from mindie_mm.media.image.encoded_image import Data, Frames, Pixels
from mindie_mm.processes.tasks import beside
from mindie_mm.settings.config import MAX_SOURCE_BYTES
from mindie_mm.settings.paths import is_url

FETCH_TIMEOUT_S = 30.0
"""Maximum time in seconds to fetch a URL or to read a pipe."""

_MIN_BASE64_CHARS = 64
_PIECE_BYTES = 2**20
_NUM_CHANNELS = (1, 3)


def read_source(media: Media) -> Data:
    """Read the source of a media item.

    For a path, a URL or bare base64, the result is bytes. For a PIL image, an array or a tensor, it is pixels or
    samples. For a PIL image that may be only a part of its TIFF, it is the bytes of the file. For a video that is a
    list of frames, it is a tuple with one result per frame. For embeddings with a grid, it is a tuple of the contents
    of both files. URLs may be `data:`, `file:`, `http:` or `https:`. `http:` and `https:` URLs are fetched only from
    public addresses.

    Raises:
        InputError: An array has the wrong type or shape.
        MediaError: The source cannot be read.
        LimitExceeded: The source is too large.

    """
    source = media.source
    if isinstance(source, tuple):
        return _read_parts(media)
    if isinstance(source, str):
        return _read_text(source)
    if isinstance(source, bytes):
        return _capped(source)
    if media.kind == "image" and isinstance(source, TiffImageFile) and (data := _file_of(source)) is not None:
        return data
    return _samples(source) if media.kind == "audio" else _pixels(source, media.kind)


def source_path(media: Media) -> Path | None:
    """Return the path of a media item's file, or of the first file among its frames.

    Return None if the item has no file.
    """
    if isinstance(media.source, tuple):
        paths = (source_path(Media("image", frame)) for frame in media.source)
        return next((path for path in paths if path is not None), None)
    if not isinstance(media.source, str):
        return None
    scheme = _scheme(media.source)
    if scheme == "file":
        return Path(file_url_path(media.source))
    if scheme or (_bare_base64(media.source) is not None and not _is_file(media.source)):
        return None
    return Path(media.source)


def located(media: Media, folder: Path | str) -> Media:
    """Return `media` with relative paths resolved against `folder`, which may be a URL.

    Bare base64 is replaced by the decoded bytes. If a text could be base64 or a path, it is a path if the file exists
    in `folder`.

    Raises:
        InputError: A `file:` URL is malformed.

    """
    source = media.source
    if isinstance(source, tuple):
        frames = tuple(located(Media("image", frame), folder).source for frame in source)
        return msgspec.structs.replace(media, source=frames)
    if not isinstance(source, str) or source.startswith("/"):  # an absolute path, or a JPEG in base64
        return media
    scheme = _scheme(source)
    if scheme == "file":
        path = Path(file_url_path(source))
    elif scheme or is_url(source):
        return media
    elif (data := _bare_base64(source)) is not None and (isinstance(folder, str) or not _is_file(folder / source)):
        return msgspec.structs.replace(media, source=data)
    elif isinstance(folder, str):
        return msgspec.structs.replace(media, source=f"{folder}/{source.removeprefix('./')}")
    else:
        path = Path(source)
    return media if path.is_absolute() else msgspec.structs.replace(media, source=os.fspath(Path(folder) / path))


def _read_parts(media: Media) -> Frames:
    frames: list[bytes | Pixels] = []
    num_bytes = 0
    for index, source in enumerate(media.source):
        with naming(media.part_name(index)):
            frame = read_source(Media("image", source))
        assert not isinstance(frame, (tuple, DocumentPage)), "a frame is not a list"
        frames.append(frame)
        num_bytes += len(frame) if isinstance(frame, bytes) else 0
        if num_bytes > MAX_SOURCE_BYTES:
            files = "files of the embeddings" if media.is_embeddings else "video's frames"
            raise LimitExceeded(f"the {files} have more bytes than the limit of {MAX_SOURCE_BYTES}")
    return tuple(frames)


def _read_text(source: str) -> bytes:
    scheme = _scheme(source)
    if scheme == "data":
        start = base64_start(source)
        _check_size(base64_size(source, start))
        return _capped(decode_base64(source, start))
    if scheme in {"http", "https"}:
        return _fetch(source)
    if scheme == "file":
        return _read_file(Path(file_url_path(source)))
    if is_url(source):
        raise MediaError(f"{_shortened(source)} cannot be read, because its scheme is not supported here")
    if (data := _bare_base64(source)) is not None and not _is_file(source):
        return _capped(data)
    return _read_file(Path(source))


def _fetch(url: str) -> bytes:
    """Fetch a URL with the same restrictions as in the service."""
    from mindie_mm.media.fetch.http import (
        fetch,  # imported late, because importing an HTTP client is slow and most callers pass files
    )

    # The caller may be inside an event loop, for example in a notebook.
    return beside(
        lambda: asyncio.run(fetch(url, max_bytes=MAX_SOURCE_BYTES, timeout_s=FETCH_TIMEOUT_S)),
        cancellation.check,
        cancellation.CHECK_S,
    )


def _read_file(path: Path) -> bytes:
    try:
        if not path.is_file():
            return _capped(_read_pipe(path))
        with BufferedReader(FileIO(path)) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_SOURCE_BYTES:
                raise LimitExceeded(f"{path} has {size} bytes; the limit is {MAX_SOURCE_BYTES}")
            data = file.read(size or MAX_SOURCE_BYTES + 1)  # `read` allocates a buffer of the requested size
    except FileNotFoundError:
        raise MediaError(f"there is no file {_shortened(str(path))}") from None
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a valid path"
        raise MediaError(f"{_shortened(str(path))} cannot be read: {reason}") from None
    return _capped(data)


def _read_pipe(path: Path) -> bytes:
    """Read a pipe or a device up to its end, or until the data exceed the limit.

    Raises:
        MediaError: The pipe does not end within `FETCH_TIMEOUT_S`.
        RequestAborted: The request was aborted.

    """
    deadline, data = time.monotonic() + FETCH_TIMEOUT_S, bytearray()
    # Without O_NONBLOCK, opening a pipe would wait until another process opens its other end.
    with FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        waiting = select.poll()
        waiting.register(file, select.POLLIN)
        while len(data) <= MAX_SOURCE_BYTES:
            cancellation.check()
            left_s = max(0.0, deadline - time.monotonic())
            if not waiting.poll(min(left_s, cancellation.CHECK_S) * 1000):
                if not left_s:
                    raise MediaError(
                        f"{_shortened(str(path))} is a pipe or a device that did not end within {FETCH_TIMEOUT_S:g} s"
                    )
                continue
            piece = file.read(_PIECE_BYTES)
            if piece == b"":
                break
            data += piece or b""  # `piece` is None if another reader took the data
    return bytes(data)


def _file_of(image: TiffImageFile) -> bytes | None:
    """Return the file of an image that Pillow opened, if the file may have other images.

    Return None if the caller has chosen an image after the first one, or has loaded or changed the pixels of the only
    image.

    Raises:
        MediaError: The file has several pages or slices, or it is closed.

    """
    if image.tell() or not (image.is_animated or image.tag_v2.get(DEPTH, 1) != 1):
        return None
    try:
        file = image._fp  # noqa: SLF001 - after loading, `fp` is None although the file is open
        place = file.tell()
        file.seek(0)
        data = file.read(MAX_SOURCE_BYTES + 1)
        file.seek(place)
    except (OSError, ValueError, AttributeError):
        raise MediaError(
            "the PIL image comes from a TIFF with several images, whose file is closed; pass the path of the file, or "
            "image.copy() to use only this image"
        ) from None
    image_of_tiff(_capped(data))
    return data if image.tile else None


def _pixels(source: Any, kind: str) -> Pixels:
    array = _array(source)
    given, is_video = array, kind == "video"
    # A video of shape [height, width, 3] is a mistake: one image.
    if array.ndim == 2 + is_video and not (is_video and array.shape[-1] in _NUM_CHANNELS):
        array = array[..., None]
    if array.ndim == 3 + is_video and array.shape[-1] not in _NUM_CHANNELS and array.shape[-3] in _NUM_CHANNELS:
        array = np.moveaxis(array, -3, -1)
    is_image = array.ndim == 3 + is_video and array.shape[-1] in _NUM_CHANNELS and 0 not in array.shape
    if not is_image or (array.dtype != np.uint8 and array.dtype.kind != "f"):
        shapes = "[frames, height, width, 3], [frames, 3, height, width] or [frames, height, width]"
        shapes = shapes if is_video else "[height, width, 3], [3, height, width] or [height, width]"
        raise InputError(
            f"{kind} pixels have dtype {given.dtype} and shape {given.shape}; they must be uint8 values, or floats "
            f"from 0 to 1, of shape {shapes}"
        )
    array = _from_floats(array, kind) if array.dtype.kind == "f" else array
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:-1], 3)))


def _from_floats(array: NDArray[Any], kind: str) -> Pixels:
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # also if one of them is NaN
        raise InputError(
            f"{kind} pixels are floats from {low:g} to {high:g}; floats must be from 0 to 1. Pass pixels that are not "
            "normalized, or uint8 values"
        )
    return np.rint(array * np.float32(255)).astype(np.uint8)


def _samples(source: Any) -> Samples:
    array = _array(source)
    if array.dtype.kind != "f" or array.ndim != 1 or not len(array):
        raise InputError(
            f"audio samples have dtype {array.dtype} and shape {array.shape}; they must be float values of shape "
            "[samples]"
        )
    return np.ascontiguousarray(array, np.float32)


def _array(source: Any) -> NDArray[Any]:
    """Return a PIL image, array or tensor as a numpy array. Raise MediaError if it cannot be read."""
    try:
        return np.asarray(pil_to_rgb(source, caps().rgba_background_color) if hasattr(source, "getexif") else source)
    except MemoryError:
        raise
    except Exception as error:  # an object of the caller may raise any exception
        why = _shortened(f"{type(error).__name__}: {error}")
        raise MediaError(f"the {type(source).__name__} cannot be read: {why}") from error


def _scheme(source: str) -> str:
    """Return "data", "file", "http" or "https", or an empty string for a path."""
    scheme = scheme_of(source)
    return scheme if scheme in {"data", "file", "http", "https"} else ""


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def _bare_base64(text: str) -> bytes | None:
    """Decode bare base64, which clients of MindIE send. Return None for any other text, and for short texts."""
    if len(text) < _MIN_BASE64_CHARS:
        return None
    try:
        return decode_base64(text)
    except MediaError:
        return None


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_SOURCE_BYTES:
        raise LimitExceeded(f"the source has {num_bytes} bytes; the limit is {MAX_SOURCE_BYTES}")


def _capped(data: bytes) -> bytes:
    _check_size(len(data))
    if not data:
        raise MediaError("the source is empty")
    return data


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
