r"""The path file of a request. It has one line for each block or segment that was ever allocated for the request.

    mindie_mm-1f2a 17 1234567\n        name of the arena's file, block, generation
    psm_8c9d4828\n                     name of a segment in MindIE's wire format

A line without a newline is incomplete, and does not refer to a block or segment.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded, SharedMemoryError
from mindie_mm.processes import faults
from mindie_mm.settings.paths import require_path
from mindie_mm.shm.format.mindie_words import is_segment_name
from mindie_mm.shm.format.words import MAX_BLOCK, MAX_GENERATION, Ref
from mindie_mm.shm.segment import unlink_segment
from mindie_mm.shm.view import free_block

PATH_FILE_NAME = "shm_name.txt"
MAX_BYTES = 16 << 20

# A path file larger than this is full. The margin up to MAX_BYTES is for processes that append lines at the same time.
_FULL_BYTES = MAX_BYTES - (64 << 10)

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LINE = re.compile(rb"mindie_mm-([0-9a-f]{4}) (0|[1-9][0-9]{0,4}) ([1-9][0-9]{0,7})\n")


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a path file."""

    refs: list[Ref]
    """References to blocks, in file order."""
    segments: list[str]
    """Names of segments in MindIE's wire format, in file order."""
    damaged: list[int]
    """Line numbers of the invalid lines. The first line of a file is line 1."""

    @property
    def damage(self) -> str:
        """Description of the invalid lines, for an error message."""
        numbers = ", ".join(map(str, self.damaged[:10]))
        return f"{len(self.damaged)} lines are not references (line {numbers})"


def record(path_file: bytes, arena: int, block: int, generation: int) -> None:
    """Append the line of a block in a single write.

    Raises:
        InputError: The path file is not a regular file of this user.
        LimitExceeded: The path file is full.
        SharedMemoryError: The path file cannot be written to.

    """
    _append(path_file, b"mindie_mm-%04x %d %d\n" % (arena, block, generation))


@contextmanager
def recorded(path_file: Path, segment: str) -> Iterator[None]:
    """Append the line of a segment, and remove it again if the body of the `with` statement raises.

    The body links the segment under its name. A segment with a name therefore always has a line, and no line refers to
    a segment that another program created under the same name.

    Raises:
        InputError: In the same cases as `record`.
        LimitExceeded: In the same cases as `record`.
        SharedMemoryError: In the same cases as `record`.

    """
    line = f"{segment}\n".encode()
    _append(os.fsencode(path_file), line)
    try:
        yield
    except BaseException:
        _take_back(path_file, line)
        raise


def _append(path_file: bytes, line: bytes) -> None:
    name = os.fsdecode(path_file)
    try:
        descriptor = os.open(path_file, _APPEND, 0o600)
        faults.point("before-record")
        try:
            if (size := _require_own(name, descriptor)) > _FULL_BYTES:
                raise LimitExceeded(
                    f"path file {name} has {size} bytes; the limit is {_FULL_BYTES}. Release and remove the file"
                )
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SharedMemoryError(f"path file {name} cannot be written: {error.strerror}") from error
    faults.point("after-record")
    if written != len(line):
        raise SharedMemoryError(f"path file {name}: only {written} of {len(line)} bytes were written")


def _take_back(path_file: Path, line: bytes) -> None:
    """Remove the last line of the file if it equals `line`."""
    with open(path_file, "r+b", 0, opener=_open_no_link) as file:
        start = file.seek(0, os.SEEK_END) - len(line)
        if start >= 0 and os.pread(file.fileno(), len(line), start) == line:
            file.truncate(start)


def _require_own(path_file: str | Path, descriptor: int) -> int:
    """Return the size of the file in bytes. Raise InputError unless it is a regular file of this user.

    In a folder that other users can write to, another user could create a path file that lists blocks of this user. If
    this process released that file, it would free these blocks.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"path file {path_file} is not a regular file")
    if status.st_uid != os.geteuid():
        raise InputError(
            f"path file {path_file} belongs to user {status.st_uid}; this process runs as user {os.geteuid()} "
            "and uses only path files of its own user"
        )
    return status.st_size


def read_contents(path_file: str | Path) -> Contents:
    """Read a path file. A missing file counts as empty.

    Raises:
        InputError: The file is not a regular file of this user, or cannot be read.
        LimitExceeded: The file is larger than 16 MiB.

    """
    require_path(path_file)  # `open` would take an integer as a descriptor
    try:
        with open(path_file, "rb", opener=_open_no_link) as file:
            _require_own(path_file, file.fileno())
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Contents([], [], [])
    except OSError as error:
        raise InputError(f"path file {path_file} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise LimitExceeded(f"path file {path_file} has more bytes than the limit of {MAX_BYTES}")
    contents = Contents([], [], [])
    for number, line in enumerate(io.BytesIO(data), start=1):  # BytesIO splits lines only at 0x0A
        if (ref := _parse(line)) is not None:
            contents.refs.append(ref)
        elif is_segment_name(line[:-1].decode("latin-1")) and line.endswith(b"\n"):
            contents.segments.append(line[:-1].decode())
        else:
            contents.damaged.append(number)
    return contents


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _parse(line: bytes) -> Ref | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    arena, block, generation = int(match[1], 16), int(match[2]), int(match[3])
    return Ref(arena, block, generation) if block <= MAX_BLOCK and generation <= MAX_GENERATION else None


def release(path_file: str | Path) -> int:
    """Free every block and segment in a path file.

    Any process may call this function. The call is idempotent: it ignores a missing file, missing arenas and segments,
    and blocks that have been freed before. The lines stay in the file. Remove the file afterwards. Otherwise the next
    call processes all lines again.

    Args:
        path_file: The path file.

    Returns:
        Number of blocks and segments that this call freed.

    Raises:
        InputError: The file is not a regular file of this user, or cannot be read.
        LimitExceeded: The file is larger than 16 MiB.
        CorruptReference: The file has invalid lines. All blocks and segments in valid lines have been freed.
        SharedMemoryError: An arena cannot be mapped, or a segment cannot be removed. All other blocks and segments
            have been freed.

    """
    contents = read_contents(path_file)
    freed, troubles = 0, []
    frees = [partial(free_block, ref) for ref in contents.refs]
    frees += [partial(unlink_segment, name) for name in contents.segments]
    for free in frees:
        try:
            freed += free()
            faults.point("mid-free")
        except SharedMemoryError as error:
            troubles.append(error)
    if troubles:
        raise SharedMemoryError(
            f"path file {path_file}: {len(troubles)} of {len(frees)} references could not be released: {troubles[0]}"
        ) from troubles[0]
    if contents.damaged:
        raise CorruptReference(
            f"path file {path_file}: {contents.damage}; the other {len(frees)} references were released"
        )
    return freed
