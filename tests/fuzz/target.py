"""A target of fuzzing."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One reader of bytes."""

    seeds: tuple[bytes, ...]
    """Inputs that it accepts, to begin with."""
    check: Callable[[bytes], bool]
    """Whether the code accepts the input. AssertionError, or anything else that it raises, is a finding."""
    max_bytes: int = 2048
    """Of an input."""


def sealed(header: bytes) -> bytes:
    """A block's header with magic, size and check as they should be."""
    size = len(header)
    return struct.pack("<4sII", b"MMB1", zlib.crc32(header[12:], size), size) + header[12:]


def sealed_arena(page: bytes) -> bytes:
    """An arena's header with its check as it should be."""
    return page[:112] + struct.pack("<I", zlib.crc32(page[:112])) + page[116:]
