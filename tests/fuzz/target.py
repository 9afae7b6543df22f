"""Fuzzing targets, and headers with valid checksums."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """Code that reads bytes, with seeds and a check."""

    seeds: tuple[bytes, ...]
    """Valid inputs to start from."""
    check: Callable[[bytes], bool]
    """Function that returns whether the code accepts an input. Any exception is a finding."""
    max_bytes: int = 2048
    """Largest size of an input."""


def sealed(header: bytes) -> bytes:
    """Return a block's header with valid magic, size and checksum."""
    size = len(header)
    return struct.pack("<4sII", b"MMB1", zlib.crc32(header[12:], size), size) + header[12:]


def sealed_arena(page: bytes) -> bytes:
    """Return an arena's header with a valid checksum."""
    return page[:112] + struct.pack("<I", zlib.crc32(page[:112])) + page[116:]
