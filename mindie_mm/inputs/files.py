"""Files in content parts of chat messages, in OpenAI's form: `{"file": {"file_data": ..., "filename": ...}}`.

A text file becomes text that begins with the file's name. A PDF or TIFF becomes a document, whose pages the model
receives as images. The type of a file is detected by its content, because clients state wrong types or none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pybase64

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs.checks import require_dict, require_unicode, type_of
from mindie_mm.inputs.items import Media, MediaOptions, Text
from mindie_mm.inputs.text_file import stated_charset, text_of_file
from mindie_mm.inputs.unknown_keys import pass_over

MAX_TEXT_FILE_BYTES = 2**23
"""Maximum size of a text file in bytes. So much text does not fit into the context of any model."""
_PDF = b"%PDF-"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""Beginnings of TIFFs and BigTIFFs in both byte orders."""
_PDF_HEAD_BYTES = 1024
"""Number of bytes at the start of a file in which to search for `%PDF-`. Some programs write other bytes before it."""
_MAX_NAME = 255
_MAX_DATA_HEAD = 256
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,63}):")
_NO_DATA = "send the content of the file in file_data, as data:<type>;base64,<data>"
_SPACE = re.compile(r"\s+", re.ASCII)


def parse_file(file: Any, options: MediaOptions, where: str, *, strict: bool) -> Text | Media:
    """Parse the value of a part's key `file`.

    Args:
        file: The value.
        options: Options of the pages of a document.
        where: Name of the value in error messages.
        strict: Whether to refuse unknown keys.

    Raises:
        InputError: The request does not contain the file's content, or the file is empty or is no text, PDF or TIFF.
        LimitExceeded: The name or the text is too long.

    """
    require_dict(file, where)
    given: Mapping[str, Any] = {key: value for key, value in file.items() if value is not None}
    if "file_id" in given:  # the service replaces ids that it knows
        raise InputError(
            f"{where}.file_id is not supported here; it must be the id of a file of /v1/files, in a chat or a "
            f"response, and the service must be started with --files-path. Otherwise, {_NO_DATA}"
        )
    for key in ("file_url", "url"):
        if key in given:
            raise InputError(f"{where}.{key} is not supported, because this service does not fetch files; {_NO_DATA}")
    unknown = (key for key in given if key not in {"file_data", "filename", "format", "mime_type"})
    pass_over(unknown, where, "a file may have the keys file_data and filename", strict=strict, foreign=())
    if not isinstance(data := given.get("file_data"), str):
        raise InputError(f"{where}.file_data is {type_of(data)}; it must be a string: {_NO_DATA}")
    name = _name(given.get("filename"), where)
    start = _start(data, f"{where}.file_data")
    head = _decoded(data[start : start + 2 * _PDF_HEAD_BYTES], f"{where}.file_data", is_head=True)[:_PDF_HEAD_BYTES]
    if _PDF in head or head.startswith(TIFF_STARTS):
        return Media("image", data, options, is_document=True)
    if len(data) - start > MAX_TEXT_FILE_BYTES * 4 // 3 + 4:
        raise LimitExceeded(f"{where} is larger than the limit of {MAX_TEXT_FILE_BYTES} bytes for text files")
    charset = stated_charset(data[: max(0, start - 1)]) or stated_charset(f"{given.get('mime_type', '')}")
    text = text_of_file(_decoded(data[start:], f"{where}.file_data"), charset, where)
    if not text.strip():
        raise InputError(f"{where} is empty")
    return Text(f"File {name}:\n{text}\n" if name else f"{text}\n")


def _name(name: Any, where: str) -> str:
    if name is not None and not isinstance(name, str):
        raise InputError(f"{where}.filename is {type_of(name)}; it must be a string")
    if len(name := name or "") > _MAX_NAME:
        raise LimitExceeded(f"{where}.filename has {len(name)} characters; the limit is {_MAX_NAME}")
    return " ".join(require_unicode(name, f"{where}.filename").split())


def _start(data: str, where: str) -> int:
    """Return the index at which the base64 begins. Raise InputError if `data` is a URL without base64."""
    if (match := _SCHEME.match(data)) is None:
        return 0
    if match[1].lower() != "data":
        raise InputError(f"{where} is a URL with the scheme {match[1][:16]!r}; {_NO_DATA}")
    stop = data.find(",", 0, _MAX_DATA_HEAD)
    if not data[: max(0, stop)].lower().endswith(";base64"):
        raise InputError(f"{where} is a data: URL that is not of the form data:<type>;base64,<data>")
    return stop + 1


def _decoded(encoded: str, where: str, *, is_head: bool = False) -> bytes:
    """Decode base64, or the beginning of base64. White space is ignored. Raise InputError if it is not valid."""
    text = _SPACE.sub("", encoded)
    try:
        return pybase64.b64decode(text[: len(text) // 4 * 4] if is_head else text, validate=True)
    except ValueError:
        raise InputError(f"{where} is not valid base64; {_NO_DATA}") from None
