"""Converts media folders, streams and compressed files to files of rows, which any process can read in parts."""

from __future__ import annotations

import mmap
import os
import re
import stat
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from typing import BinaryIO, cast

import msgspec

from mindie_mm.batch.input.files import replacing
from mindie_mm.batch.input.media_folder import BLANK, ROW_FILES, write_folder
from mindie_mm.batch.input.remote import RemoteFile, file_at
from mindie_mm.batch.input.sniff import no_json
from mindie_mm.batch.input.source import NOT_JSON
from mindie_mm.errors import InputError, os_errors_as
from mindie_mm.media.endings import ending_of
from mindie_mm.msgspec_errors import in_words
from mindie_mm.settings.paths import absolute, is_url, require_no_broken_url, require_url

Write = Callable[[BinaryIO, int | None], None]
"""Function that writes rows to a file, and a limit on their number."""

STDIN = "-"
ROWS, TABLE = "rows:", "table:"
"""Beginnings of the names of rows and data sets that a Python program gives. No path or URL of a run has them."""
_STDIN_PATHS = frozenset({"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
_DESCRIPTOR = re.compile(r"/(dev|proc/self)/fd/[0-9]+")
"""Paths that a shell passes for `<(...)`. Such a path is valid only in the process that the shell starts."""
_PIECE_BYTES = 1 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}
"""Names that pyarrow uses for the compression of files with these extensions."""
_PACKABLE = (".jsonl", ".ndjson", ".json", ".tar")
"""Extensions of files that may be compressed as a whole. Parquet files are compressed already."""


def gathered_path(folder: Path, index: int, given: str = STDIN) -> Path:
    """Return the path in the run's `folder` for the conversion of `given`, which is input number `index`."""
    if given.startswith(TABLE):
        return folder / f"input-{index:03d}.parquet"
    ending = ".tar" if is_packed(given) and ending_of(PurePath(given).stem) == ".tar" else ".jsonl"
    return folder / f"input-{index:03d}{ending}"


def input_named(given: str) -> str:
    """Return the name that a run records for an input: its absolute path, its URL, or `-` for standard input.

    The URL of a folder ends with a slash.

    Raises:
        InputError: `given` is empty, is a relative path and the working directory was removed, or is a URL with a
            secret or of a store that cannot be read.

    """
    if not given:
        raise InputError("an input is an empty string. Remove this input, or give the name of a file")
    if is_url(given):
        given = require_url("an input", given)
        if given.endswith("/") or ending_of(given) in (*ROW_FILES, ".json") or is_packed(given):
            return given
        with os_errors_as(InputError, f"{given} cannot be read"):
            return f"{given}/" if RemoteFile(given).is_folder() else given
    require_no_broken_url("an input", given)
    return STDIN if given == STDIN or given in _STDIN_PATHS else str(absolute(given))


def are_rows(given: str) -> bool:
    """Return whether an input is the name of rows that a Python program gives."""
    return given.startswith((ROWS, TABLE))


def is_stream(given: str) -> bool:
    """Return whether an input is standard input, a pipe or rows of a program, which can be read only once."""
    if given == STDIN or are_rows(given) or _DESCRIPTOR.fullmatch(given):
        return True
    if is_url(given):
        return False
    try:
        return stat.S_ISFIFO(Path(given).stat().st_mode)
    except (OSError, ValueError):  # a later step reports that the path cannot be read
        return False


def require_streams_once(inputs: Sequence[str]) -> None:
    """Raise InputError if standard input or a pipe occurs more than once."""
    for given in filter(is_stream, inputs):
        if (times := inputs.count(given)) > 1:
            raise InputError(f"{called(given)} is given {times} times; it can be read only once")


def is_folder(given: str) -> bool:
    """Return whether an input is a folder of media."""
    if is_url(given):
        return given.endswith("/")
    return not is_stream(given) and os.path.isdir(given)  # noqa: PTH112 - False for a path that cannot be read


def is_packed(given: str) -> bool:
    """Return whether an input is a compressed file of rows, according to its name."""
    return ending_of(given) in _CODECS and ending_of(PurePath(given).stem) in _PACKABLE


def is_gathered(given: str) -> bool:
    """Return whether an input must be converted to a file of rows."""
    return is_stream(given) or is_folder(given) or is_packed(given) or ending_of(given) == ".json"


def called(given: str) -> str:
    """Return the name that messages use for an input."""
    if are_rows(given):
        return f"the rows {given.partition(':')[2]!r}"
    return "standard input" if given == STDIN else given


def gather(
    inputs: Sequence[str],
    folder: Path,
    template: str,
    stdin: BinaryIO | None = None,
    limit: int | None = None,
    rows: Mapping[str, Write] | None = None,
) -> Counter[str]:
    """Convert all `inputs` that are not files of rows. Read at most `limit` rows of each stream of JSON lines.

    Args:
        inputs: Names of the inputs.
        folder: Folder of the run.
        template: Prompt for the media of folders.
        stdin: Standard input, by default that of this process.
        limit: Maximum number of rows per stream of JSON lines.
        rows: Functions that write the rows of a program, by name of the input.

    Returns:
        The number of files in media folders that were left out, for each extension, as `write_folder` counts them.

    Raises:
        InputError: An input cannot be read, or a folder contains no media.
        StorageError: The converted rows cannot be written.

    """
    left_out = Counter[str]()
    for index, given in enumerate(inputs):
        if is_gathered(given):
            path = gathered_path(folder, index, given)
            with replacing(path) as unfinished, unfinished.open("w+b") as file:
                if are_rows(given):
                    (rows or {})[given](file, limit)
                elif is_folder(given):
                    left_out += write_folder(file_at(given), file, template, limit)
                else:
                    file.writelines(_content(given, stdin, limit, folder))
    return left_out


def drop_gathered(inputs: Sequence[str], folder: Path) -> None:
    """Remove the files that `gather` wrote. Call this function when the run is finished."""
    for index, given in enumerate(inputs):
        if is_gathered(given):
            gathered_path(folder, index, given).unlink(missing_ok=True)


def _content(given: str, stdin: BinaryIO | None, limit: int | None, folder: Path) -> Iterator[bytes]:
    """Yield the content of the file of rows in `folder` that an input is converted to."""
    with _opened(given, stdin) as stream:
        ending = ending_of(PurePath(given).stem if is_packed(given) else given)
        if is_stream(given) or ending not in (".tar", ".json"):
            yield from _pieces(stream, given, limit)
        elif ending == ".tar":
            yield from _blocks(stream, given)
        else:
            yield from islice(_array_rows(stream, given, folder), limit)


def _array_rows(stream: BinaryIO, given: str, folder: Path) -> Iterator[bytes]:
    """Yield the elements of a JSON array as lines. A file that is not an array is yielded as it is.

    The array is mapped from a temporary file in `folder`, because an unpacked file may be larger than the memory.

    Raises:
        InputError: The array is not valid JSON.

    """
    with TemporaryFile(dir=folder) as whole:
        whole.writelines(_blocks(stream, given))
        whole.seek(0)
        begun = whole.read(_PIECE_BYTES)
        if begun.lstrip(BLANK)[:1] != b"[":  # `datasets` writes JSON lines under this extension
            yield begun
            yield from _blocks(whole, given)
            return
        whole.flush()
        data = memoryview(mmap.mmap(whole.fileno(), 0, prot=mmap.PROT_READ))
    try:
        start = len(BOM_UTF8) if begun.startswith(BOM_UTF8) else 0
        rows = msgspec.json.decode(data[start:], type=list[msgspec.Raw])
    except (*NOT_JSON, RecursionError) as error:
        why = no_json(bytes(data)) or (in_words(error) if isinstance(error, NOT_JSON) else "it is nested too deeply")
        raise InputError(f"{given} is not a JSON array of rows: {why}") from None
    for row in rows:
        yield msgspec.json.format(row, indent=-1) + b"\n"


@contextmanager
def _opened(given: str, stdin: BinaryIO | None) -> Iterator[BinaryIO]:
    """Open a stream or a compressed file, and yield its content, which is not compressed.

    Raises:
        InputError: The file cannot be opened.

    """
    if given == STDIN:
        yield sys.stdin.buffer if stdin is None else stdin
        return
    with os_errors_as(InputError, f"{given} cannot be read"):
        file = file_at(given).open("rb")
    with file:
        yield _unpacked(file, _CODECS[ending_of(given)]) if is_packed(given) else file


def _unpacked(file: BinaryIO, codec: str) -> BinaryIO:
    import pyarrow as pa  # imported late, because most inputs are not compressed

    return cast("BinaryIO", BufferedReader(pa.input_stream(file, compression=codec), _PIECE_BYTES))


def _blocks(stream: BinaryIO, given: str) -> Iterator[bytes]:
    with os_errors_as(InputError, f"{called(given)} cannot be read"):
        while piece := stream.read(_PIECE_BYTES):
            yield piece


def _pieces(stream: BinaryIO, given: str, limit: int | None) -> Iterator[bytes]:
    """Yield pieces of a stream until the stream ends or `limit` rows have been read. The stream may be endless."""
    rows, blank = 0, True
    with os_errors_as(InputError, f"{called(given)} cannot be read"):
        while rows != limit and (piece := stream.readline(_PIECE_BYTES)):
            yield piece
            blank = blank and not piece.strip(BLANK)
            if piece.endswith(b"\n"):
                rows, blank = rows + (not blank), True
