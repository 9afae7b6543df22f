"""Rows of a folder of media: its media files, or the rows of tables that describe them, as in `datasets`' imagefolder.

Such a table is metadata.jsonl, .csv or .parquet, in the folder or in any of its subfolders. The paths in the rows of a
table start at the folder of the table.
"""

from __future__ import annotations

import csv
import os
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from posixpath import normpath
from typing import Any, BinaryIO

import msgspec

from mindie_mm.batch.input.record import MEDIA_KEYS, UNREAD_KEYS
from mindie_mm.batch.input.remote import Entry, RemoteFile, refusal_of
from mindie_mm.batch.input.source import MEDIA_MARK, NOT_JSON
from mindie_mm.errors import InputError, os_errors_as
from mindie_mm.inputs import Kind, Media
from mindie_mm.inputs.checks import counted
from mindie_mm.media.endings import ending_of, kind_of

ROW_FILES = (".jsonl", ".ndjson", ".parquet", ".pq", ".tar")
"""Extensions of files of rows."""
BLANK = BOM_UTF8 + b" \t\n\r\v\f"
_LIST_MARK = b" \n"
"""First line of a list of media files, which tells the list from the rows of tables. Blank lines are not rows."""
_TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Names of tables. Only the first of them that a folder has is read."""
_NAMES = frozenset({"file_name", "file_names"})
_PATHS = MEDIA_KEYS | _NAMES
"""Keys of a row whose values are paths."""
_WITH_PATHS = (*_PATHS, "inputs", "messages", "prompt", "completion")
"""Keys of a row whose values may contain paths."""
_Object = dict[str, msgspec.Raw]
_DECODING = (*NOT_JSON, RecursionError, OverflowError)
_MOST_NAMED = 8
_NAMED = re.compile(r"(metadata)?\.[a-z0-9]{1,8}")
"""File name extensions that messages may show. Other extensions might contain terminal control sequences."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table that describes the media files of a folder."""

    name: str
    folder: Path | RemoteFile
    above: str
    """Path of its folder in the media folder, which is empty or ends with a slash."""

    @property
    def path(self) -> Path | RemoteFile:
        return self.folder / self.name


def write_folder(root: Path | RemoteFile, file: BinaryIO, template: str, limit: int | None) -> Counter[str]:
    """Write the rows of a media folder to an empty file: the rows of its tables, or one row per media file.

    Args:
        root: The folder.
        file: File to write, which is also read.
        template: Prompt for each media file. If it is given, tables are not read.
        limit: Maximum number of rows of tables, or None for all rows.

    Returns:
        The number of files that were left out, for each extension, or for the whole name if the file is a table. Files
        that no row of a table names are left out, too, unless the limit has been reached.

    Raises:
        InputError: The folder or a table cannot be read, or there is no row.

    """
    if isinstance(root, RemoteFile) and (refusal := refusal_of(root.url)):
        raise InputError(refusal)
    left_out, tables = Counter[str](), list[_Table]()
    file.write(_LIST_MARK)
    has_media = _write_list(root, file, template, left_out, tables)
    if tables and not template:
        file.seek(0)
        unnamed = {msgspec.json.decode(line, type=_Listed).id for line in file if not line.isspace()}
        file.seek(0)
        file.truncate()
        rows = chain.from_iterable(_placed_rows(table, unnamed) for table in tables)
        is_whole = True
        for number, row in enumerate(rows):
            if number == limit:
                is_whole = False
                break
            file.write(row)
        return left_out + Counter(map(ending_of, unnamed if is_whole else ()))
    left_out.update(table.name for table in tables)
    if not has_media:
        endings = [ending for ending in left_out if ending in ROW_FILES]
        advice = f". If these files contain rows, give their names: {root / f'*{endings[0]}'}" if endings else ""
        raise InputError(f"{root} has no file with a media extension; it has {left_out_summary(left_out)}{advice}")
    return left_out


def is_list(path: Path) -> bool:
    """Return whether `write_folder` wrote one row per media file to `path`."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LIST_MARK)) == _LIST_MARK
    except FileNotFoundError:
        return False


def left_out_summary(left_out: Counter[str]) -> str:
    """Describe the skipped files and their most common extensions, such as "12 files (.txt 7, .dng 3, others 2)"."""
    total = left_out.total()
    named = Counter({ending: count for ending, count in left_out.items() if _NAMED.fullmatch(ending)})
    parts = named.most_common(_MOST_NAMED)
    if others := total - sum(count for _, count in parts):
        parts.append(("others", others))
    listed = ", ".join(f"{ending} {count}" for ending, count in parts)
    return counted(total, "file") + (f" ({listed})" if listed else "")


def unread_tables(left_out: Counter[str], template: str) -> str:
    """Return the reason why tables of media were left out, or nothing if all of them were read."""
    if not (names := [name for name in _TABLES if left_out[name]]):
        return ""
    if template:
        return f"{', '.join(names)}: not read, because --template is the prompt of all media files"
    return f"{', '.join(names)}: not read, because the same folder also has {_TABLES[0]} or {_TABLES[1]}"


class _Listed(msgspec.Struct):
    id: str


def _write_list(
    root: Path | RemoteFile, file: BinaryIO, template: str, left_out: Counter[str], tables: list[_Table]
) -> bool:
    """Write one row per media file, sorted by name, and return whether there is one.

    `_media_files` describes the arguments.

    A row of a file in a store has the file's version, so that the list differs if the file is replaced.
    """
    before, _, after = template.rpartition(MEDIA_MARK)
    encoder, has_media = msgspec.json.Encoder(), False
    for own, kind, version in _media_files(root, left_out, tables):
        name = _escaped(own)
        items: list[dict[str, Any]] = [{kind: f"./{name}"}]  # "./", so that no name is read as a URL or base64
        items = [{"text": before}, *items] if before else items
        items += [{"text": after}] if after else []
        file.write(encoder.encode({"id": name, "inputs": items} | ({"version": version} if version else {})) + b"\n")
        has_media = True
    return has_media


def _escaped(name: str) -> str:
    """Replace the bytes of a file name that are not UTF-8 by escapes, because JSON is UTF-8.

    The row then fails, because no file has the escaped name.
    """
    return os.fsencode(name).decode(errors="backslashreplace")


def _media_files(
    folder: Path | RemoteFile, left_out: Counter[str], tables: list[_Table], above: str = ""
) -> Iterator[tuple[str, Kind, str]]:
    """Yield the name, the kind and the version of the media files of a folder and its subfolders, sorted by name.

    Append the tables to `tables`, and count all other files in `left_out`, by extension. Names begin with `above`.
    Local files have an empty version.
    """
    with os_errors_as(InputError, f"{folder} cannot be listed"):
        entries = folder.entries() if isinstance(folder, RemoteFile) else _entries(folder)
    files = {name for name, is_folder, _ in entries if not is_folder}
    found = [name for name in _TABLES if name in files and _is_there(folder / name)]
    tables += [_Table(name, folder, above) for name in found[:1]]
    left_out.update(found[1:])
    for name, is_folder, version in entries:
        if is_folder:
            yield from _media_files(folder / name, left_out, tables, f"{above}{name}/")
        elif (kind := kind_of(name)) and _is_there(folder / name):
            yield above + name, kind, version
        elif name not in found:
            left_out[ending_of(name)] += 1


def _entries(folder: Path) -> list[Entry]:
    with os.scandir(folder) as found:
        return sorted(Entry(one.name, one.is_dir(follow_symlinks=False), "") for one in found)


def _is_there(path: Path | RemoteFile) -> bool:
    """Return whether a listed file can be read. A local one may be a broken link."""
    return isinstance(path, RemoteFile) or os.path.isfile(path)  # noqa: PTH113 - False for a path that cannot be read


def _placed_rows(table: _Table, unnamed: set[str]) -> Iterator[bytes]:
    """Yield the rows of a table as lines, with paths that start at the media folder.

    The names of the files that the rows name are removed from `unnamed`. Lines that are not JSON are yielded unchanged.
    """
    for line in _table_rows(table.path):
        try:
            text = line.strip(BLANK)
            row = {"inputs": msgspec.Raw(text)} if text[:1] == b"[" else msgspec.json.decode(text, type=_Object)
            row |= {
                key: msgspec.Raw(msgspec.json.encode(_placed(msgspec.json.decode(row[key]), key, table, unnamed)))
                for key in _WITH_PATHS
                if key in row
            }
            placed = msgspec.json.encode(row)
        except _DECODING:
            placed = line
        yield (placed if table.above else line).rstrip(b"\n") + b"\n"


def _placed(value: Any, key: str, table: _Table, unnamed: set[str]) -> Any:
    """Return the value of a key with paths that start at the media folder."""
    if isinstance(value, Mapping):
        # The path of a media item may be in an object, beside options.
        keys = {name: key if key in _PATHS and name in ("url", "path") else name for name in value}
        return {
            name: one if name in UNREAD_KEYS else _placed(one, keys[name], table, unnamed)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_placed(one, key, table, unnamed) for one in value]
    if key in ("inputs", "messages") and isinstance(value, str):  # JSON text
        return _placed(msgspec.json.decode(value), key, table, unnamed)
    if key not in _PATHS or not isinstance(value, str) or not (path := _relative(value, table.folder)):
        return value
    unnamed.discard(normpath(_escaped(table.above) + path))
    return _escaped(table.above) + path


def _relative(source: str, folder: Path | RemoteFile) -> str:
    """Return the path of a media item in a folder, or nothing if its source is not a relative path."""
    from mindie_mm.media.source import located  # imported late, because reading runs does not need torch

    begin = f"{folder}/"
    try:
        found = located(Media("image", source), folder.url if isinstance(folder, RemoteFile) else folder).source
    except InputError:
        return ""
    return found.removeprefix(begin) if isinstance(found, str) and found != source and found.startswith(begin) else ""


def _table_rows(path: Path | RemoteFile) -> Iterator[bytes]:
    """Yield the rows of a table of media files as JSON lines. All values of a .csv file are strings.

    Raises:
        InputError: The table cannot be read.

    """
    with os_errors_as(InputError, f"{path} cannot be read"):
        if ending_of(path.name) == ".jsonl":
            with path.open("rb") as file:
                yield from (line for line in file if line.strip(BLANK))
            return
        try:
            for row in _csv_rows(path) if ending_of(path.name) == ".csv" else _parquet_rows(path):
                yield msgspec.json.encode(row, enc_hook=str) + b"\n"
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None


def _csv_rows(path: Path | RemoteFile) -> Iterator[dict[str, str]]:
    # pyarrow's reader opens a pipe for signals, after which copies of this process that close it abort.
    with TextIOWrapper(path.open("rb"), encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        for row in rows:
            if None in row:
                raise csv.Error(f"line {rows.line_num} has more values than there are columns")
            yield row


def _parquet_rows(path: Path | RemoteFile) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # imported late, because most inputs are no folders
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"{path} cannot be read: {error}") from None
