"""Tests on simulated machines with pages of 4 KiB, and with pages of 64 KiB as on some aarch64 systems."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from mindie_mm.errors import SegmentMissing
from mindie_mm.shm import ArraySpec, DiskArena, mount
from mindie_mm.shm.disk_writer import digest_of

PAGES = (4096, 65536)
SPECS = {"pixels": ArraySpec((7, 1000), "uint8"), "grid": ArraySpec((3,), "int64")}

MACHINE = """
import errno, mmap, sys
from pathlib import Path

class Mmap(mmap.mmap):
    def __new__(cls, *args, offset=0, **options):
        if offset % mmap.PAGESIZE:
            raise OSError(errno.EINVAL, "Invalid argument")  # as the kernel of such a machine
        return super().__new__(cls, *args, offset=offset, **options)

mmap.PAGESIZE, mmap.mmap = int(sys.argv[1]), Mmap

from mindie_mm.shm import Arena, ArraySpec, DiskArena, Ref, attach, mount
from mindie_mm.shm.disk_writer import digest_of
"""

WRITER = """
specs = {"pixels": ArraySpec((7, 1000), "uint8"), "grid": ArraySpec((3,), "int64")}
with DiskArena.create(Path(sys.argv[2]), 7, 1 << 20) as file:
    for value in range(3):
        with file.allocate(specs) as block:
            block["pixels"][...] = value
            block["grid"][...] = 1, 2, value
            print(*block.publish(bytes([value]) * 32).to_words())
with Arena.create(1) as arena:
    print(arena.capacity_bytes)
"""

READER = """
with mount(Path(sys.argv[2])):
    for value, line in enumerate(sys.stdin):
        with attach(Ref.from_words(*map(int, line.split()))) as view:
            assert view["pixels"].shape == (7, 1000)
            assert (view["pixels"] == value).all()
            assert view["grid"].tolist() == [1, 2, value]
print(digest_of(Path(sys.argv[2])), value)
"""


def on_machine(page_bytes: int, script: str, path: Path, stdin: str = "") -> list[str]:
    """Run a script as if the machine's page size were `page_bytes`. Return the lines that it prints."""
    command = [sys.executable, "-c", MACHINE + script, str(page_bytes), str(path)]
    return subprocess.run(command, input=stdin, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_a_disk_file_is_the_same_for_every_page_size(tmp_path: Path) -> None:
    paths = {page_bytes: tmp_path / str(page_bytes) for page_bytes in PAGES}
    for page_bytes, path in paths.items():
        *words, in_shared_memory = on_machine(page_bytes, WRITER, path)
        assert int(in_shared_memory) == page_bytes
    small, large = (path.read_bytes() for path in paths.values())
    assert small == large
    for page_bytes, path in zip(reversed(PAGES), paths.values(), strict=True):
        assert on_machine(page_bytes, READER, path, "\n".join(words)) == [f"{digest_of(path)} 2"]


def test_a_disk_file_is_laid_out_in_pages_of_4096_bytes(tmp_path: Path) -> None:
    with DiskArena.create(tmp_path / "a", 7, 1 << 20, 64) as file, file.allocate(SPECS) as block:
        block["pixels"][...] = 1
        block.publish()
    data = (tmp_path / "a").read_bytes()
    assert struct.unpack_from("<3Q", data, 24) == (8192, 12288, 8192)
    assert len(data) == 12288 + 8192


def test_a_disk_file_of_another_page_size_is_refused(tmp_path: Path) -> None:
    """Earlier versions wrote files with 64 KiB pages on machines with such pages."""
    with DiskArena.create(tmp_path / "a", 7, 1 << 20, 64):
        pass
    body = bytearray((tmp_path / "a").read_bytes()[:112])
    struct.pack_into("<2Q", body, 24, 2 * 65536, 3 * 65536)
    (tmp_path / "a").write_bytes((body + struct.pack("<I", zlib.crc32(body))).ljust(3 * 65536, b"\0"))
    with pytest.raises(SegmentMissing, match="not laid out in pages of 4096 bytes"), mount(tmp_path / "a"):
        pass
