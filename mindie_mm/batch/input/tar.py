"""Reads the members and the rows of tars in WebDataset format."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import BinaryIO

from mindie_mm.batch.input.sniff import packing
from mindie_mm.errors import InputError
from mindie_mm.media.endings import ending_of, kind_of

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20


def key_of(name: str) -> str:
    """Return the key that the files of a row share. It consists of the folder and the file name up to the first dot."""
    base = base_of(name)
    return name.removesuffix(base) + base.partition(".")[0]


def base_of(name: str) -> str:
    """Return a file name without its folder."""
    return name.rpartition("/")[2]


def members(file: BinaryIO, name: str, start: int = 0) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar in order, from byte `start`. Error messages show `name`.

    Links, sparse files and names that begin with a dot are skipped. macOS, for example, adds a file `._4.jpg` before
    4.jpg. Concatenated tars (`cat a.tar b.tar`) are read to the end.

    Raises:
        InputError: The file is damaged, truncated or not a tar.

    """
    at: int | None = start
    try:
        while at is not None:
            file.seek(at)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every member
                    if member.isfile() and not member.issparse() and not base_of(member.name).startswith("."):
                        yield member
                at = _next_tar(name, file, tar.offset)
    except tarfile.TarError as error:
        file.seek(0)
        why = packing(file.read(_PIECE_BYTES)) or error
        raise InputError(f"{name} cannot be read as an uncompressed tar: {why}") from None


def _next_tar(name: str, file: BinaryIO, end: int) -> int | None:
    """Return the offset of the next concatenated tar, or None. `end` is where the members of the current tar end."""
    file.seek(end)
    mark = file.read(tarfile.BLOCKSIZE)
    if any(mark):  # tarfile treats a damaged header as the end of the tar
        raise InputError(f"{name} is damaged: there is no tar header at byte {end}")
    if not mark:
        raise InputError(
            f"{name} ends at byte {end} without the zero blocks that end a tar. The file may be truncated. If the "
            "file is complete, add the zero blocks with `truncate -s +1024`"
        )
    while piece := file.read(_PIECE_BYTES):
        if rest := piece.lstrip(b"\0"):
            return file.tell() - len(rest)
    return None


def row_starts(file: BinaryIO, name: str) -> list[int]:
    """Return the offset in bytes of each row of a tar, followed by the end of the last row.

    Raises:
        InputError: The files of a row are not contiguous, or the tar cannot be read.

    """
    starts, stop = list[int](), 0
    seen, split = set[str](), _DottedNames(name)
    last, names = "", list[str]()
    for member in members(file, name):
        if (key := key_of(member.name)) != last or not names:
            split.add(last, names)
            if (same := str(PurePosixPath(key))) in seen:  # `./0` and `0` are the same row
                raise InputError(
                    f"{name}: the files of row {key!r} are not contiguous: {member.name!r} comes after files of "
                    "another row. Pack the files in the order of their names: tar --sort=name -cf"
                )
            seen.add(same)
            starts.append(member.offset)
            last, names = key, []
        names.append(member.name)
        stop = member.offset_data + member.size
    split.add(last, names)
    split.warn()
    return [*starts, stop]


class _DottedNames:
    """Detects rows that may contain the files of several rows by mistake.

    The cause is file names with two dots, such as `cat 1.5x.png`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._example = ""

    def add(self, key: str, names: Collection[str]) -> None:
        """Check the file names of a row."""
        whole = {ending for name in names if (ending := name.removeprefix(key).lower()) in (".json", ".txt")}
        passed_over = [name for name in names if ending_of(name) == ".json" and ".json" not in whole]
        media = [name for name in names if kind_of(name)]
        numbered = key[-1:].isdigit() and all(name[len(key) + 1 :][:1].isdigit() for name in media)
        joined = media if len(media) > 1 and numbered and not whole else []
        if reason := passed_over or joined:
            self._count += 1
            why = "is ignored" if passed_over else "shares a row with other media"
            self._example = (
                self._example
                or f"{reason[0]!r} {why}, because the part of its name before the first dot, {key!r}, determines "
                "its row"
            )

    def warn(self) -> None:
        """Log a warning with the number of suspicious rows, if any."""
        if self._count:
            _log.warning(
                "%s: %s. This affects %d rows. If this is not intended, remove the dot from the file names",
                self._name,
                self._example,
                self._count,
            )
