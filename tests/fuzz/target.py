"""The type of fuzzing targets, and functions that write headers with valid checksums."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """Code that reads bytes: a function that checks one input, and valid inputs."""

    seeds: tuple[bytes, ...]
    """Valid inputs from which the fuzzer starts."""
    check: Callable[[bytes], bool]
    """Function that returns whether the code accepts an input. Every exception is a finding."""
    max_bytes: int = 2048
    """Largest size of an input in bytes."""


def sealed(header: bytes) -> bytes:
    """Return a block header with valid magic bytes, size and checksum."""
    size = len(header)
    return struct.pack("<4sII", b"MMB1", zlib.crc32(header[12:], size), size) + header[12:]


def sealed_arena(page: bytes) -> bytes:
    """Return an arena header with a valid checksum."""
    return page[:112] + struct.pack("<I", zlib.crc32(page[:112])) + page[116:]
