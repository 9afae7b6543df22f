"""Packets of MPEG transport streams, as in ISO/IEC 13818-1."""

from __future__ import annotations

PACKET_BYTES = 188
EMPTY = b"G\x1f\xff\x10".ljust(PACKET_BYTES, b"\0")
"""A null packet."""
MAX_LISTED = 42
"""Maximum number of programs in a program list (PAT) that fits into one packet."""


def lists(num_packets: int) -> bytes:
    """Return `num_packets` packets that list programs from number 1 on, `MAX_LISTED` programs in each packet."""
    return b"".join(listed(range(at * MAX_LISTED + 1, (at + 1) * MAX_LISTED + 1)) for at in range(num_packets))


def listed(programs: range) -> bytes:
    """Return a packet that lists `programs`."""
    body = b"".join((at % 65536).to_bytes(2) + (0xE000 | 32 + at % 8000).to_bytes(2) for at in programs)
    section = b"\0" + (0xB000 | len(body) + 9).to_bytes(2) + b"\0\1\xc1\0\0" + body
    return (b"G\x40\0\x10\0" + section + _check(section)).ljust(PACKET_BYTES, b"\xff")


def begun(num_streams: int) -> bytes:
    """Return packets that start `num_streams` streams that no program list contains."""
    start = b"\0\0\1\xe0\0\0\x80\0\0".ljust(PACKET_BYTES - 4, b"\0")
    return b"".join(b"G" + (0x4200 + at).to_bytes(2) + b"\x10" + start for at in range(num_streams))


def spaced(stream: bytes, before: bytes = b"", behind: bytes = b"") -> bytes:
    """Return `stream` with `before` in front of each packet and `behind` after each packet."""
    starts = range(0, len(stream), PACKET_BYTES)
    return b"".join(before + stream[start : start + PACKET_BYTES] + behind for start in starts)


def _check(data: bytes) -> bytes:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte << 24
        for _ in range(8):
            register = (register << 1 ^ 0x04C11DB7 * (register >> 31)) & 0xFFFFFFFF
    return register.to_bytes(4)
