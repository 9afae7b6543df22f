"""Digest that detects damage to a file of blocks.

The digest is computed from the digests of the blocks, so the writer need not read the file again. The hash function is
XXH3, which is as fast as reading the data from memory. BLAKE3 would take 5% of the processing time of a row. The digest
does not protect against deliberate changes, because an attacker could replace the digest, too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from mindie_mm.errors import SegmentMissing
from mindie_mm.shm.format.layout import DISK_PAGE, OFFSET, PUBLISHED, SIZE, STATE, WORDS_PER_ENTRY, ArenaHeader


def combined(head: bytes, blocks: Iterable[bytes]) -> str:
    """Return the digest of a file in hexadecimal.

    It is the XXH3-128 of the concatenation of the head of the file and the digests of its blocks.

    Args:
        head: All bytes of the file before the first block.
        blocks: XXH3-128 digests of the published blocks, in file order.

    """
    return xxh3_128_hexdigest(head + b"".join(blocks))


def digest_of(path: Path) -> str:
    """Compute the digest of a file from its contents. If the file is intact, the digest equals `DiskArena.digest`.

    Raises:
        SegmentMissing: The file is not a complete file of blocks, or is damaged.
        OSError: The file cannot be read.

    """
    with path.open("rb") as file:
        header = ArenaHeader.read(file.fileno(), os.fstat(file.fileno()), DISK_PAGE)
        with mmap.mmap(file.fileno(), header.file_bytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as data:
            with data[DISK_PAGE : header.releases_offset].cast("Q") as entries:
                blocks = []
                for at in range(0, len(entries), WORDS_PER_ENTRY):
                    offset, size = entries[at + OFFSET], entries[at + SIZE]
                    if offset + size > header.file_bytes:
                        raise SegmentMissing(f"block {at // WORDS_PER_ENTRY} is outside the file")
                    if entries[at + STATE] & 0xFF == PUBLISHED:
                        with data[offset : offset + size] as block:
                            blocks.append(xxh3_128_digest(block))
            return combined(data[: header.data_offset].tobytes(), blocks)
