"""Files in /dev/shm that get a name only when they are complete.

If the process dies before that, no file remains.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mindie_mm.errors import SharedMemoryError, os_errors_as
from mindie_mm.shm.format.layout import SHM_DIRECTORY, needing_proc
from mindie_mm.shm.memory.space import ShmSpace

_HOW_TO_GET_ROOM = (
    "reclaim the memory of dead processes (`mindie-mm shm gc`), request less memory, or enlarge /dev/shm: `mount -o "
    "remount,size=<bytes> /dev/shm`, --shm-size in Docker, or an emptyDir with medium Memory in Kubernetes"
)


def make_anonymous() -> int:
    """Create an unnamed empty file with mode 0600 and return its descriptor.

    Raises:
        SharedMemoryError: The file cannot be created.

    """
    try:
        return os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        why = (ShmSpace.now().why_no_file() or _HOW_TO_GET_ROOM) if full else None
        message = f"{error.strerror}: {why}" if why else error.strerror
        raise SharedMemoryError(f"cannot create a file in {SHM_DIRECTORY}: {message}") from error


def reserve(descriptor: int, nbytes: int, what: str) -> None:
    """Allocate all pages of a file, so that a later write does not raise SIGBUS because /dev/shm is full.

    Args:
        descriptor: The open file.
        nbytes: Size to allocate in bytes.
        what: Purpose of the file, for error messages.

    Raises:
        SharedMemoryError: There is not enough space, or the allocation fails for another reason.

    """
    space = ShmSpace.now()
    free = "no free space" if space.free_bytes is None else f"{space.free_bytes} of {space.total_bytes} bytes free"
    why = f"{SHM_DIRECTORY} has {free}, but {what} needs {nbytes}; {_HOW_TO_GET_ROOM}"
    if space.free_bytes is not None and nbytes > space.free_bytes:
        raise SharedMemoryError(why)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise SharedMemoryError(why) from error
        raise SharedMemoryError(f"{nbytes} bytes cannot be reserved for {what}: {error.strerror}") from error


def reopened(descriptor: int) -> int:
    """Open the same file again, and return a descriptor with its own open file description.

    Map a locked file through such a descriptor. A mapping keeps its open file description alive in every forked child,
    and a lock lasts as long as the description that it belongs to.

    Raises:
        SharedMemoryError: The file cannot be opened again, or /proc is not mounted.

    """
    with os_errors_as(SharedMemoryError, f"cannot reopen a file in {SHM_DIRECTORY}"), needing_proc():
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def give_name(descriptor: int, name: str) -> None:
    """Link the file into /dev/shm.

    Raises:
        FileExistsError: Another file has the name.
        OSError: The file cannot be linked.
        SharedMemoryError: /proc is not mounted.

    """
    with needing_proc():
        Path(f"/proc/self/fd/{descriptor}").stat()
    directory = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory descriptor, os.link calls linkat(AT_SYMLINK_FOLLOW), which follows the link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=directory)
    finally:
        os.close(directory)
