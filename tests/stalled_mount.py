"""The command mindie-mm with a simulated mount. If the name of a file begins with `stalled`, reading this file blocks.

To read such a file, the command first connects to the local port in the environment variable STALL_PORT. The read then
blocks in a system call until the test sends a byte or closes the connection.
"""

from __future__ import annotations

import io
import os
import socket

import service.request.media
from mindie_mm import cli


class MountedFile(io.FileIO):
    """A file that may be on the stalled mount."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the file, but wait for the test first if the name begins with `stalled`."""
        if "/stalled" in str(self.name):
            with socket.create_connection(("127.0.0.1", int(os.environ["STALL_PORT"]))) as test:
                test.recv(1)
        return super().read(-1 if size is None else size)


service.request.media.FileIO = MountedFile  # type: ignore[misc]
cli.main(prog_name="mindie-mm")
