"""What a file of rows, or a row, is that is not what it should be: the names of common mistakes."""

from __future__ import annotations

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from typing import Any, BinaryIO

import msgspec

_PARQUET = b"PAR1"
"""What a table begins with, and ends with."""
_MAGICS = {
    b"\x1f\x8b": "compressed by gzip: unpack it with zcat",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it with zstdcat",
    b"\xfd7zXZ\0": "compressed by xz: unpack it with xzcat",
    b"BZh": "compressed by bzip2: unpack it with bzcat",
    b"PK\x03\x04": "a zip archive: unpack it",
    _PARQUET: "a Parquet file: write it to a file whose name ends in .parquet",
}
_PIECE_BYTES = 1 << 20
_TAR_MAGIC = slice(257, 262)


def packing(data: bytes) -> str | None:
    """Return what a file is by its first bytes, and what to do about it; None if these name no packing."""
    return next((said for magic, said in _MAGICS.items() if data.startswith(magic)), None)


def no_lines(head: bytes) -> str | None:
    """Return what a text, that begins with `head`, is instead of JSON lines; None if nothing says so."""
    if head[_TAR_MAGIC] == b"ustar":
        return "a tar: write it to a file whose name ends in .tar"
    first, newline, _ = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")
    if newline and first.strip() in (b"[", b"{"):
        return "JSON over several lines; each is to be a row: jq -c '.[]' for an array of them, jq -c . for one"
    return _no_text(head)


def _no_text(head: bytes) -> str | None:
    if packed := packing(head):
        return packed
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or head[:2].count(0) == 1:
        return "text in UTF-16, as PowerShell's > writes it: JSON is UTF-8 (iconv -f UTF-16 -t UTF-8)"
    row, carriage_return, more = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")[0].partition(b"\r")
    if carriage_return and more.strip() and _is_json(row):
        return "lines that end in CR alone: a line of JSON ends in LF (tr '\\r' '\\n')"
    return None


def no_json(text: str | bytes) -> str | None:
    """Return what is known to be wrong with the JSON of a row, such as the NaN of Python's `json.dumps`."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    if found := _no_text(data):
        return f"it is {found}"
    constants = list[str]()
    try:
        json.loads(data.decode(), parse_constant=constants.append)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8 (iconv -f LATIN1 -t UTF-8, or whatever the text is in)"
    except (ValueError, RecursionError):
        return None
    return f"it has {constants[0]}, which JSON has no number for: write null" if constants else None


def are_tables(file: BinaryIO, metadata: Any) -> bool:
    """Whether a Parquet file of that metadata is several, one behind another.

    A reader finds the last one's footer, and the first one's data: where these do not fit it fails, where they do the
    others' rows would be lost. OSError.
    """
    file.seek(_data_stop(metadata))
    before = b""
    while piece := file.read(_PIECE_BYTES):  # of one file: indexes and the footer
        if _PARQUET + _PARQUET in before + piece:
            return True
        before = piece[-2 * len(_PARQUET) :]
    return False


def _data_stop(metadata: Any) -> int:
    """Where the columns of the last group of rows end, counted from the begin of the first table."""
    if not metadata.num_row_groups:
        return 0
    group = metadata.row_group(metadata.num_row_groups - 1)
    columns = [group.column(column) for column in range(group.num_columns)]
    return max(
        ((one.dictionary_page_offset or one.data_page_offset) + one.total_compressed_size for one in columns), default=0
    )


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
