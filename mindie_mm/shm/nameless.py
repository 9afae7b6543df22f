"""Files of /dev/shm that are complete before they have a name: a death until then leaves nothing."""

from __future__ import annotations

import errno
import os

from mindie_mm.errors import SharedMemoryError, os_errors_as
from mindie_mm.shm.layout import SHM_DIRECTORY
from mindie_mm.shm.space import ShmSpace

_HOW_TO_GET_ROOM = (
    "reclaim what the dead left (`mindie-mm shm gc`), make it smaller, or enlarge /dev/shm: `mount -o "
    "remount,size=<bytes> /dev/shm`, in Docker --shm-size, in Kubernetes an emptyDir of medium Memory mounted there"
)


def make_nameless() -> int:
    """The descriptor of a new, empty file of mode 0600."""
    with os_errors_as(SharedMemoryError, f"no file can be made in {SHM_DIRECTORY}"):
        return os.open(SHM_DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def reserve(descriptor: int, nbytes: int, what: str) -> None:
    """Every page now, so that a full /dev/shm is an error here and never a SIGBUS later; `what` is for the message."""
    space = ShmSpace.now()
    free, total = space.free_bytes, space.total_bytes
    why = f"{SHM_DIRECTORY} has {free} bytes free of {total}, {what} needs {nbytes}; {_HOW_TO_GET_ROOM}"
    if nbytes > free:
        raise SharedMemoryError(why)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise SharedMemoryError(why) from error
        raise SharedMemoryError(f"{nbytes} bytes cannot be reserved for {what}: {error.strerror}") from error


def reopened(descriptor: int) -> int:
    """Another open file description of the same file: a mapping keeps its own, and a lock on it, alive in each fork."""
    with os_errors_as(SharedMemoryError, f"a file of {SHM_DIRECTORY} cannot be opened again"):
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def give_name(descriptor: int, name: str) -> None:
    """Links the file into /dev/shm; OSError if it cannot have the name, FileExistsError if another has."""
    directory = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A directory descriptor makes this linkat(AT_SYMLINK_FOLLOW), which reaches the file behind /proc.
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=directory)
    finally:
        os.close(directory)
