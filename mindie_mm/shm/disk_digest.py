"""What names the bytes of a file of blocks: computed block by block, so that its writer need not read it again."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from mindie_mm.errors import SegmentMissing
from mindie_mm.shm.layout import OFFSET, PAGE, PUBLISHED, SIZE, STATE, WORDS_PER_ENTRY, ArenaHeader

DIGEST_BYTES = 16


def combined(head: bytes, blocks: Iterable[bytes]) -> str:
    """BLAKE3, 128 bits in hexadecimal, of the pages before the blocks and of each block's own digest, in order."""
    return blake3(head + b"".join(blocks)).hexdigest(DIGEST_BYTES)


def digest_of(path: Path) -> str:
    """As `DiskArena.digest`, of the file as it is now. SegmentMissing where it is none, OSError."""
    with path.open("rb") as file:
        header = ArenaHeader.read(file.fileno(), os.fstat(file.fileno()))
        with mmap.mmap(file.fileno(), header.file_bytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as data:
            with data[PAGE : header.releases_offset].cast("Q") as entries:
                blocks = []
                for at in range(0, len(entries), WORDS_PER_ENTRY):
                    offset, size = entries[at + OFFSET], entries[at + SIZE]
                    if offset + size > header.file_bytes:
                        raise SegmentMissing(f"{path}: block {at // WORDS_PER_ENTRY} is outside the file")
                    if entries[at + STATE] & 0xFF == PUBLISHED:
                        with data[offset : offset + size] as block:
                            blocks.append(blake3(block).digest(DIGEST_BYTES))
            return combined(data[: header.data_offset].tobytes(), blocks)
