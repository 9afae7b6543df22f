"""Rows that a Python program gives: an iterable, or a data set of the `datasets` library."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from numbers import Real
from typing import Any, BinaryIO
from uuid import UUID

import numpy as np
from PIL import Image

from mindie_mm.batch.input.gather import ROWS, TABLE
from mindie_mm.batch.input.record import MEDIA_KEYS, number_of
from mindie_mm.errors import InputError, LimitExceeded, MindieMMError, os_errors_as
from mindie_mm.inputs import KINDS, Media, type_of
from mindie_mm.inputs.items import DOCUMENT
from mindie_mm.inputs.options import parse_options
from mindie_mm.media.audio.encoded_audio import MAX_CHANNELS
from mindie_mm.media.guard.caps import under
from mindie_mm.media.source import read_source
from mindie_mm.settings.config import MAX_SOURCE_BYTES, MediaCaps

_FLOAT = 3
"""Number of the format of float samples in WAV files."""
_NAME = re.compile(r"\w[\w .-]{0,99}")
_KEYS = MEDIA_KEYS.union([DOCUMENT])
_AS_IS = (str, int, float, os.PathLike, type(None))
_NO_NUMBER = "Out of range float values"
"""Beginning of Python's message for NaN and infinities."""
_USE_NONE = "it has NaN or an infinity, which JSON does not have. Use None instead"
_ROWS_AT_ONCE = 100
"""Number of rows of a streamed data set in memory at a time. The `datasets` library uses this number for images."""


def rows_named(rows: Any, name: str) -> str:
    """Return the name that a run records for rows.

    Raises:
        InputError: `rows` are not rows, or the name has other characters than letters, digits, spaces, ".", "_" and
            "-".

    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"name={name!r} must have 1 to 100 characters, which are letters, digits, spaces, '.', '_' or '-', "
            "and begin with a letter or a digit"
        )
    if hasattr(rows, "columns"):  # of a table of pandas, polars or Arrow, whose elements are columns
        raise InputError(f"inputs is {type_of(rows)}. Write this table to a Parquet file, and give its path")
    if isinstance(rows, Mapping | bytes) or not isinstance(rows, Iterable):
        raise InputError(
            f"inputs is {type_of(rows)}; it must be a path, a list of paths, an iterable of rows, or one split of a "
            "data set"
        )
    return f"{TABLE if _is_table(rows) else ROWS}{name}"


def write_rows(rows: Any, media: MediaCaps, file: BinaryIO, limit: int | None) -> None:
    """Write rows as JSON lines, or a data set of the `datasets` library as Parquet, as its `to_parquet` does.

    Args:
        rows: Iterable of rows. At most `limit` rows of an iterable are read.
        media: Limits on media, which also have the background color of transparent images.
        file: File to write.
        limit: Number of rows, or None for all rows.

    Raises:
        InputError: The rows cannot be read, or a row has a value that JSON does not have.

    """
    if not _is_table(rows):
        file.writelines(_lines(rows, media, limit))
    elif hasattr(rows, "__len__"):
        rows.to_parquet(file)
    else:
        _write_batches(rows if limit is None else rows.take(limit), file)


def _is_table(rows: Any) -> bool:
    """Return whether `rows` are a data set whose media are read as they are stored.

    A data set with a transform of its own is read as an iterable, because its rows are not stored.
    """
    library = sys.modules.get("datasets")
    kinds = tuple(filter(None, (getattr(library, name, None) for name in ("Dataset", "IterableDataset"))))
    return isinstance(rows, kinds) and getattr(rows, "format", {}).get("type") != "custom"


def _write_batches(rows: Any, file: BinaryIO) -> None:
    """Write a streamed data set batch by batch, because its `to_parquet` holds all rows in memory."""
    import pyarrow.parquet as pq  # imported late, because other rows do not need it

    with os_errors_as(InputError, "inputs cannot be read"):
        batches = iter(rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE))
        first = next(batches, None)
    if first is None:
        raise InputError("inputs is a data set without rows")
    with pq.ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for batch in batches:
            writer.write_table(batch)


def _lines(rows: Iterable[Any], media: MediaCaps, limit: int | None) -> Iterator[bytes]:
    with os_errors_as(InputError, "inputs cannot be read"):
        for number, row in enumerate(rows):
            if number == limit:
                return
            if not isinstance(row, Mapping | list | tuple):
                raise InputError(f"row {number} is {type_of(row)}; it must be a dict or a list of items")
            try:
                yield _line(row, media) + b"\n"
            except MindieMMError as error:
                raise InputError(f"row {number}: {error}") from error


def _line(row: Any, media: MediaCaps) -> bytes:
    """Return a row as one line of JSON. Values that JSON cannot represent are converted."""
    try:
        if not _has_clip(row, ""):
            return json.dumps(row, allow_nan=False).encode()
    except TypeError:
        pass
    except (ValueError, RecursionError) as error:
        if str(error).startswith(_NO_NUMBER):
            raise InputError(_USE_NONE) from None
        raise InputError("it contains itself, or is nested too deeply") from None
    try:
        with under(media, limits_request_pixels=False):
            return json.dumps(_encodable(row, ""), default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last for tensors with gradients
        why = _USE_NONE if str(error).startswith(_NO_NUMBER) else f"it cannot be written as JSON: {error}"
        raise InputError(why) from None


def _encodable(value: Any, key: str) -> Any:
    """Return a value of a row with `data:` URLs instead of the media under `_KEYS`."""
    if "audio" in key and key in _KEYS and (clip := _clip(value)) is not None:
        value = _wave(*clip)
    if isinstance(value, Mapping):
        if key in _KEYS and value and value.keys() <= {"bytes", "path"}:  # as the `datasets` library stores media
            return _encodable(value.get("bytes") or value.get("path"), key)
        if hasattr(value.get("audio"), "__array__") and "sampling_rate" in value:
            rest = {name: one for name, one in value.items() if name != "sampling_rate"}
            return _encodable({**rest, "audio": (value["audio"], value["sampling_rate"])}, key)
        # Options beside the URL of an image are values under the key of the image.
        inner = {name: name if name in _KEYS or key not in _KEYS else key for name in value}
        return {name: _encodable(one, inner[name]) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one, key) for one in value]
    if key not in _KEYS or isinstance(value, _AS_IS):
        return value
    return _media(value, next((kind for kind in KINDS if kind in key), KINDS[0]))


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent, such as a date or an array, to one that it can."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Decimal):
        return number_of(value)
    if isinstance(value, date | UUID):
        return str(value)
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # of numpy or torch
        return value.tolist()
    raise InputError(f"it has a value {type_of(value)}, which JSON does not have. Convert this value, or leave it out")


def _media(value: Any, kind: Any) -> str | list[str]:
    """Return media as a `data:` URL, or the frames of a video as a list of URLs. Pixels are written as PNG."""
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes | bytearray | memoryview):
        return _url(bytes(value))
    if not hasattr(value, "__array__") and not hasattr(value, "getexif"):
        raise InputError(f"the {kind} is {type_of(value)}; it must be a path, bytes, a PIL image, an array or a URL")
    if kind == "audio":
        raise InputError("the audio is an array without a rate; give it as (samples, sampling_rate)")
    is_film = kind == "video" and getattr(value, "ndim", 0) == 4
    data: Any = read_source(Media(kind if is_film else "image", value))
    if isinstance(data, bytes):
        return _url(data)
    return [_png(frame) for frame in data] if is_film else _png(data)


def _has_clip(value: Any, key: str) -> bool:
    """Return whether a value of a row contains an audio clip in memory, which has to become a WAV file."""
    if "audio" in key and key in _KEYS and _clip(value) is not None:
        return True
    if isinstance(value, Mapping):
        return any(_has_clip(one, name) for name, one in value.items())
    return isinstance(value, list | tuple) and any(_has_clip(one, key) for one in value)


def _clip(value: Any) -> tuple[Any, Any] | None:
    """Return the samples and the rate of an audio clip in memory, or None if `value` is not such a clip.

    A clip has the form of vLLM, of the `datasets` library before version 4, or of torchcodec, which later ones use.
    """
    if hasattr(value, "get_all_samples"):
        value = value.get_all_samples()
        return value.data, value.sample_rate
    if isinstance(value, Mapping):
        return (value["array"], value["sampling_rate"]) if {"array", "sampling_rate"} <= value.keys() else None
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real)
    return value if is_pair else None


def _wave(samples: Any, rate: Any) -> str:
    """Return samples as the `data:` URL of a WAV file, whose samples are float32.

    Args:
        samples: Floats [samples] or [channels, samples].
        rate: Sampling rate in Hz.

    Raises:
        InputError: The samples or the rate are not valid.

    """
    array = np.asarray(samples)
    channels = array.shape[0] if array.ndim == 2 else 1
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or not array.size or channels > MAX_CHANNELS:
        raise InputError(
            f"audio samples have dtype {array.dtype} and shape {array.shape}; they must be float values of shape "
            f"[samples] or [channels, samples], with at most {MAX_CHANNELS} channels"
        )
    if 4 * array.size > MAX_SOURCE_BYTES:
        raise LimitExceeded(f"audio samples have {4 * array.size} bytes as float32; the limit is {MAX_SOURCE_BYTES}")
    hertz = parse_options("audio", {"sampling_rate": rate}, "the audio", strict=True).sampling_rate or 0
    data = array.T.astype("<f4").tobytes()
    layout = struct.pack("<HHIIHH", _FLOAT, channels, hertz, 4 * channels * hertz, 4 * channels, 32)
    chunks = b"".join(
        name + struct.pack("<I", len(chunk)) + chunk for name, chunk in ((b"fmt ", layout), (b"data", data))
    )
    return _url(b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks)


def _png(pixels: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return _url(file.getvalue())


def _url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"
