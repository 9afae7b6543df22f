"""Tars as WebDataset writes them: their members, and which of these are one row."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mindie_mm.batch.sniff import packing
from mindie_mm.errors import InputError
from mindie_mm.media.endings import ending_of, kind_of

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20


def key_of(name: str) -> str:
    """Return what the files of one row have in common: the name up to its first dot, with the folder."""
    base = base_of(name)
    return name.removesuffix(base) + base.partition(".")[0]


def base_of(name: str) -> str:
    """Return the name without its folder."""
    return name.rpartition("/")[2]


def members(path: Path, start: int = 0) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar from byte `start` on, in order.

    Links, sparse files and names that begin with a dot are left out: macOS packs a `._4.jpg` before each 4.jpg. A file
    of several tars, one behind another (`cat a.tar b.tar`), has the members of all of them. InputError for one that
    is damaged, was cut short, or is no tar.
    """
    with path.open("rb") as file:
        at: int | None = start
        try:
            while at is not None:
                file.seek(at)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        tar.members = []  # type: ignore[attr-defined]  # it would keep every one
                        if member.isfile() and not member.issparse() and not base_of(member.name).startswith("."):
                            yield member
                    at = _next_tar(path, file, tar.offset)
        except tarfile.TarError as error:
            file.seek(0)
            why = packing(file.read(_PIECE_BYTES)) or error
            raise InputError(f"{path} cannot be read as an uncompressed tar: {why}") from None


def _next_tar(path: Path, file: BinaryIO, end: int) -> int | None:
    """Return where a further tar begins behind the one whose members stop at `end`. InputError."""
    file.seek(end)
    mark = file.read(tarfile.BLOCKSIZE)
    if any(mark):  # tarfile takes a damaged header for the end
        raise InputError(f"{path} is damaged: at byte {end} is no header of a tar")
    if not mark:
        raise InputError(
            f"{path} ends at byte {end} without the zeros that end a tar: it may have been cut short. If it is whole, "
            f"`truncate -s +1024` adds them"
        )
    while piece := file.read(_PIECE_BYTES):
        if rest := piece.lstrip(b"\0"):
            return file.tell() - len(rest)
    return None


def row_starts(path: Path) -> list[int]:
    """Return at which byte each row begins, and where the last one stops.

    InputError as `members`, or where the files of one row do not lie one behind another.
    """
    starts, stop = list[int](), 0
    seen, split = set[str](), _DottedNames(path)
    last, names = "", list[str]()
    for member in members(path):
        if (key := key_of(member.name)) != last or not names:
            split.add(last, names)
            if (same := str(PurePosixPath(key))) in seen:  # `./0` is `0`
                raise InputError(
                    f"{path}: the files of row {key!r} do not lie one behind another: {member.name!r} comes after "
                    "another row's. Pack them in the order of their names: tar --sort=name -cf"
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
    """Rows whose files may have been meant as several: names such as `cat 1.5x.png` have a dot before their ending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._example = ""

    def add(self, key: str, names: Collection[str]) -> None:
        """Look at a row's files."""
        whole = {ending for name in names if (ending := name.removeprefix(key).lower()) in (".json", ".txt")}
        passed_over = [name for name in names if ending_of(name) == ".json" and ".json" not in whole]
        media = [name for name in names if kind_of(name)]
        numbered = key[-1:].isdigit() and all(name[len(key) + 1 :][:1].isdigit() for name in media)
        joined = media if len(media) > 1 and numbered and not whole else []
        if found := passed_over or joined:
            self._count += 1
            why = "is not looked at" if passed_over else "is of one row with others"
            self._example = (
                self._example or f"{found[0]!r} {why}, since its row is {key!r}, its name up to the first dot"
            )

    def warn(self) -> None:
        """Say how many there are, if any."""
        if self._count:
            _log.warning(
                "%s: %s. So it is with %d rows; where that is not meant, name the files without that dot",
                self._path,
                self._example,
                self._count,
            )
