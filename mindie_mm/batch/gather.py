"""Folders of media and standard input, written down as files of rows, so that any process can read any part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mindie_mm.batch.files import replacing
from mindie_mm.batch.source import MEDIA_MARK, SUFFIXES, suffix_of
from mindie_mm.errors import InputError

STDIN = "-"
_PIECE_BYTES = 1 << 20


def gathered_path(folder: Path, index: int) -> Path:
    """The file of rows, in the run's `folder`, of the input of that number."""
    return folder / f"input-{index:03d}.jsonl"


def is_gathered(given: str) -> bool:
    """Whether an input is no file of rows itself."""
    return given == STDIN or os.path.isdir(given)  # noqa: PTH112 - what cannot be looked at is no folder, and no error


def gather(inputs: Sequence[str], folder: Path, template: str, stdin: BinaryIO) -> None:
    """Writes down those `inputs` that are no files. InputError, StorageError."""
    for index, given in enumerate(inputs):
        if is_gathered(given):
            with replacing(gathered_path(folder, index)) as unfinished, unfinished.open("wb") as file:
                if given == STDIN:
                    file.writelines(_pieces(stdin))
                else:
                    _list(Path(given), file, template)


def drop_gathered(inputs: Sequence[str], folder: Path) -> None:
    """Removes what `gather` wrote, once the run is finished."""
    for index, given in enumerate(inputs):
        if is_gathered(given):
            gathered_path(folder, index).unlink(missing_ok=True)


def _pieces(stdin: BinaryIO) -> Iterator[bytes]:
    try:
        while piece := stdin.read(_PIECE_BYTES):
            yield piece
    except OSError as error:
        raise InputError(f"standard input cannot be read: {error.strerror}") from None


def _list(root: Path, file: BinaryIO, template: str) -> None:
    """A row a medium, by its name within the folder, in the order of names."""
    before, _, after = template.rpartition(MEDIA_MARK)
    encoder, found = msgspec.json.Encoder(), False
    for found_path in _media_files(os.fspath(root)):
        # Of a name that is not UTF-8 there is no JSON: as it is written here there is no such file, and its row fails.
        path = os.fsencode(found_path).decode(errors="backslashreplace")
        items: list[dict[str, Any]] = [{SUFFIXES[suffix_of(path)]: path}]
        items = [{"text": before}, *items] if before else items
        items += [{"text": after}] if after else []
        file.write(encoder.encode({"id": os.path.relpath(path, root), "inputs": items}) + b"\n")
        found = True
    if not found:
        raise InputError(f"{root} has no file that ends in {', '.join(SUFFIXES)}")


def _media_files(folder: str) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"{folder} cannot be listed: {error.strerror}") from None
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _media_files(entry.path)
        elif suffix_of(entry.name) in SUFFIXES and _is_file(entry):
            yield entry.path


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A link that leads nowhere is none, nor is one that cannot be followed, such as one to itself."""
    try:
        return entry.is_file()
    except OSError:
        return False
