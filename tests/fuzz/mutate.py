"""A seeded mutator of integers, bits and byte ranges. It is used with and without coverage guidance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_WIDTHS = (1, 2, 4, 8)
_EDGES = (0, 1, 2, 3, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 4097, 65535, 65536)
_HIGH = (1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 63) - 1, (1 << 64) - 1)


def mutated(data: bytes, draw: Random, others: Sequence[bytes], max_bytes: int) -> bytes:
    """Return `data` with one to six changes, cut to `max_bytes`. Some changes insert parts of `others`."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        _change(changed, draw, others)
    return bytes(changed[:max_bytes])


def _change(data: bytearray, draw: Random, others: Sequence[bytes]) -> None:
    kind = draw.random()
    at = int(draw.random() * len(data))
    if not data or kind < 0.08:
        data[at:at] = draw.randbytes(1 + int(draw.random() * 8))
    elif kind < 0.35:
        data[at] ^= 1 << int(draw.random() * 8)
    elif kind < 0.50:
        data[at] = int(draw.random() * 256)
    elif kind < 0.75:
        _change_integer(data, at, draw)
    elif kind < 0.82:
        del data[at : at + 1 + int(draw.random() * 16)]
    elif kind < 0.87:
        del data[at:]
    else:
        other = draw.choice(others)
        start = int(draw.random() * len(other))
        piece = other[start : start + 1 + int(draw.random() * 24)]
        # Most parts overwrite bytes, so that fields at fixed offsets keep their meaning.
        data[at : at + (len(piece) if kind < 0.95 else 0)] = piece


def _change_integer(data: bytearray, at: int, draw: Random) -> None:
    width = draw.choice(_WIDTHS)
    at -= at % width
    value = int.from_bytes(data[at : at + width], "little")
    how = draw.random()
    if how < 0.35:
        value = draw.choice(_EDGES)
    elif how < 0.5:
        value = draw.choice(_HIGH) - draw.choice((0, 0, 1, 64, 4096))
    elif how < 0.8:
        value += draw.choice((-4096, -64, -8, -1, 1, 8, 64, 4096))
    else:
        value = (value << 1) if how < 0.9 else (value >> 1)
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
