"""Detects common mistakes in files of rows and in single rows."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from typing import Any, BinaryIO

import msgspec

_PARQUET = b"PAR1"
"""Magic bytes at the beginning and the end of a Parquet file."""
_MAGICS = {
    b"\x1f\x8b": "compressed with gzip. Unpack it with zcat",
    b"\x28\xb5\x2f\xfd": "compressed with zstd. Unpack it with zstdcat",
    b"\xfd7zXZ\0": "compressed with xz. Unpack it with xzcat",
    b"BZh": "compressed with bzip2. Unpack it with bzcat",
    b"PK\x03\x04": "a zip archive. Unpack it",
    _PARQUET: "a Parquet file. Save it under a name that ends in .parquet",
}
_PIECE_BYTES = 1 << 20
_TAR_MAGIC = slice(257, 262)
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def packing(data: bytes) -> str | None:
    """Return the compression or archive format that the first bytes of a file show, with advice, or None."""
    return next((message for magic, message in _MAGICS.items() if data.startswith(magic)), None)


def no_lines(head: bytes) -> str | None:
    """Return the format of a file, with advice, if the file does not begin like JSON lines. Otherwise, return None."""
    if head[_TAR_MAGIC] == b"ustar":
        return "a tar file. Save it under a name that ends in .tar"
    first, newline, _ = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")
    if newline and first.strip() in (b"[", b"{"):
        return "JSON that spans several lines. Write one row per line: jq -c '.[]' for an array, jq -c . for an object"
    return _no_text(head)


def _no_text(head: bytes) -> str | None:
    if packed := packing(head):
        return packed
    if head.startswith((BOM_UTF32_LE, BOM_UTF32_BE)) or head[:4].count(0) == 3:
        return "text in UTF-32. Convert it to UTF-8: iconv -f UTF-32 -t UTF-8"
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or head[:2].count(0) == 1:
        return "text in UTF-16, as PowerShell's > writes it. Convert it to UTF-8: iconv -f UTF-16 -t UTF-8"
    row, carriage_return, more = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")[0].partition(b"\r")
    if carriage_return and more.strip() and _is_json(row):
        return "text with CR line endings. Convert them to LF: tr '\\r' '\\n'"
    return None


def no_json(text: str | bytes) -> str | None:
    """Describe the mistake in a row's JSON, such as a NaN from Python's `json.dumps`. Return None if none is found."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    if content := _no_text(data):
        return f"it is {content}"
    constants = list[str]()
    try:
        value = json.loads(data.decode(), parse_constant=constants.append)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8. Convert the text, for example with iconv -f LATIN1 -t UTF-8"
    except (ValueError, RecursionError):
        return None
    if constants:
        return f"it has {constants[0]}, which JSON does not allow. Write null instead"
    if half := _HALF_PAIR.search(json.dumps(value, ensure_ascii=False)):
        return f"it has \\u{ord(half[0]):04x}, half of a surrogate pair. The text may have been cut inside an emoji"
    return None


def are_tables(file: BinaryIO, metadata: Any) -> bool:
    """Return whether a file with this Parquet metadata consists of several concatenated Parquet files.

    A reader would combine the footer of the last file with the data of the first file. If the two happen to match, the
    rows of all other files are lost without an error.

    Raises:
        OSError: The file cannot be read.

    """
    file.seek(_data_stop(metadata))
    before = b""
    while piece := file.read(_PIECE_BYTES):  # in a single file, only indexes and the footer follow
        if _PARQUET + _PARQUET in before + piece:
            return True
        before = piece[-2 * len(_PARQUET) :]
    return False


def _data_stop(metadata: Any) -> int:
    """Return the offset at which the column data of the last row group ends, if the file is a single Parquet file."""
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
