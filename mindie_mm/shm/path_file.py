r"""The path file of a request: one line for each block that was ever allocated for it.

    mindie_mm-1f2a 17 1234567\n        file, block, generation

A line without its newline was cut short and names nothing.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded, SharedMemoryError
from mindie_mm.shm.layout import file_name
from mindie_mm.shm.reader import release_block
from mindie_mm.shm.ref import Ref
from mindie_mm.shm.words import MAX_BLOCK, MAX_GENERATION

PATH_FILE_NAME = "shm_name.txt"
MAX_BYTES = 16 << 20
_LINE = re.compile(rb"mindie_mm-([0-9a-f]{4}) (0|[1-9][0-9]{0,4}) ([1-9][0-9]{0,7})\n")


def record(path_file: Path, ref: Ref) -> None:
    """Appends the reference's line in one write. SharedMemoryError if the file cannot be written."""
    line = f"{file_name(ref.arena)} {ref.block} {ref.generation}\n".encode()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path_file, flags, 0o600)
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SharedMemoryError(f"path file {path_file} cannot be written: {error.strerror}") from error
    if written != len(line):
        raise SharedMemoryError(f"path file {path_file}: {written} of {len(line)} bytes were written")


def read(path_file: Path) -> tuple[list[Ref], list[int]]:
    """The references in a path file, and the numbers (from 1) of the lines that hold none.

    A missing file names nothing. InputError if the path is no regular file, LimitExceeded above 16 MiB.
    """
    try:
        with open(path_file, "rb", opener=_open_to_read) as file:
            data = file.read(MAX_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except OSError as error:
        raise InputError(f"path file {path_file} cannot be read: {error.strerror}") from error
    if data is None:
        raise InputError(f"path file {path_file} cannot be read: it is no regular file")
    if len(data) > MAX_BYTES:
        raise LimitExceeded(f"path file {path_file} has more than {MAX_BYTES} bytes")
    refs, damaged = [], []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        ref = _parse(line)
        if ref is None:
            damaged.append(number)
        else:
            refs.append(ref)
    return refs, damaged


def _open_to_read(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _parse(line: bytes) -> Ref | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    arena, block, generation = int(match[1], 16), int(match[2]), int(match[3])
    return Ref(arena, block, generation) if block <= MAX_BLOCK and generation <= MAX_GENERATION else None


def release(path_file: Path) -> int:
    """Frees every block that the file names; the number of blocks that this call freed.

    Idempotent, from any process; a missing file, a missing arena and a block freed before count nothing. Lines that
    are no reference are skipped, and when all others are freed CorruptReference names them; SharedMemoryError if an
    arena could not be mapped, likewise once the others are done.
    """
    refs, damaged = read(path_file)
    freed, troubles = 0, []
    for ref in refs:
        try:
            freed += release_block(ref)
        except SharedMemoryError as error:
            troubles.append(error)
    if troubles:
        raise SharedMemoryError(
            f"path file {path_file}: {len(troubles)} of {len(refs)} blocks could not be released: {troubles[0]}"
        ) from troubles[0]
    if damaged:
        numbers = ", ".join(str(number) for number in damaged[:10])
        raise CorruptReference(
            f"path file {path_file}: {len(damaged)} lines are no reference (line {numbers}); the other {len(refs)} "
            "were released"
        )
    return freed
