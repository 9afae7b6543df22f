"""Tests for standard streams that nobody reads, or that are closed."""

import fcntl
import os
import re
import subprocess
import sys

LINES = 60_000
FLOOD = f"""
import logging, os, sys
from mindie_mm import logs
from mindie_mm.processes.standard_streams import dropped_lines, stderr_without_waiting

with stderr_without_waiting():
    logs.configure(logs.LogSettings(), "api")
    for number in range({LINES}):
        os.write(2, b"%06d said by a library that knows no logger\\n" % number)
    print(dropped_lines() > 0, flush=True)
    sys.stdin.readline()
    print(dropped_lines(), flush=True)
    logging.getLogger("service").info("the last words")
    os.write(2, b"half a line")
os.write(2, b", and the other half")
"""
SPAWN = """
import asyncio, os, pathlib, sys
from mindie_mm import logs
from mindie_mm.processes.ipc import Child

async def main():
    child = await Child.start("tests.logging_worker")
    opened = [str(pathlib.Path(f"/proc/{child.pid}/fd/{number}").readlink()) for number in range(3)]
    said = await child.channel.recv()
    await child.close()
    pathlib.Path(sys.argv[1]).write_text(repr((said, opened)), encoding="utf-8")

kept = [os.open(sys.argv[1] + ".data", os.O_RDWR | os.O_CREAT) for _ in range(int(sys.argv[2]))]
asyncio.run(main())
"""


def test_unread_lines_wait_and_dropped_lines_are_counted():
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-c", FLOOD]
    with (
        os.fdopen(read, "rb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write, text=True) as process,
    ):
        os.close(write)
        assert process.stdout.readline() == "True\n", "no line must be dropped yet"
        kept = []
        for line in log:
            if b"were dropped" in line:
                break
            kept.append(line)
        num_dropped, _ = process.communicate("\n")
        last_words, torn = log.read().splitlines()
    assert process.returncode == 0
    assert kept == [b"%06d said by a library that knows no logger\n" % number for number in range(len(kept))]
    dropped = re.search(rb"WARNING .*: (\d+) lines of the log were dropped", line)
    assert int(dropped[1]) == int(num_dropped) == LINES - len(kept)
    assert last_words.endswith(b"the last words")
    assert torn == b"half a line, and the other half"


def test_workers_of_a_script_without_standard_streams_use_dev_null(tmp_path):
    """A file that the script opens may get the descriptor of a standard stream.

    Workers must not write into this file.
    """
    for kept in range(4):
        command = [
            "sh",
            "-c",
            'exec "$@" 0<&- 1<&- 2<&-',
            "sh",
            sys.executable,
            "-c",
            SPAWN,
            tmp_path / "said",
            str(kept),
        ]
        assert subprocess.run(command, check=False, timeout=60).returncode == 0
        assert (tmp_path / "said").read_text() == repr((b"logged", ["/dev/null"] * 3))
        (tmp_path / "said").unlink()
    assert (tmp_path / "said.data").read_bytes() == b""
