"""What an MPEG transport stream says of its programs, counted before FFmpeg compares them with each other.

It bounds neither them nor how often they change: 300 kB of lists took it seven minutes. Packets: ISO/IEC 13818-1,
2.4.3; with four bytes of time before each (192), BDAV; with parity behind each (204), DVB.
"""

from __future__ import annotations

import re

from mindie_mm.errors import LimitExceeded

MAX_LISTS = 32
"""Most packets that list other programs than the one before; each lists 46 at most. Captures that were joined have a
few, those of 43 programs or more two each time."""

_PACKET_BYTES = 188
_STRIDES = (_PACKET_BYTES, 192, 204)
_HEAD_BYTES = 4
_ANYWHERE = 1
_LIST = re.compile(rb"G[\x00\x20\x40\x60\x80\xa0\xc0\xe0]\x00")
"""What packets that list programs begin with, whatever is flagged of them."""


def whole_packets(data: bytes) -> bytes:
    """Packets of `data`, a transport stream, with nothing between them; as it is where they do not follow each other.

    LimitExceeded.
    """
    stride, start = _order(data)
    listed, num_lists = b"", 0
    for found in _LIST.finditer(data):
        place = found.start()
        if (place - start) % stride == 0:
            before, listed = listed, data[place + _HEAD_BYTES : place + _PACKET_BYTES]
            num_lists += listed != before
            if num_lists > MAX_LISTS:
                raise LimitExceeded(f"the container lists its programs anew more than {MAX_LISTS} times, the limit")
    if stride == _ANYWHERE or (stride, start) == (_PACKET_BYTES, 0):
        return data
    return b"".join(data[place : place + _PACKET_BYTES] for place in range(start, len(data), stride))


def _order(data: bytes) -> tuple[int, int]:
    """From one packet to the next, and where the first begins, in bytes; 1 and 0 if FFmpeg has to look for each."""
    for stride in _STRIDES:
        for start in range(stride):
            if _all_begin(data[start : start + 64 * stride : stride]) and _all_begin(data[start::stride]):
                return stride, start
    return _ANYWHERE, 0


def _all_begin(firsts: bytes) -> bool:
    return firsts.count(b"G") == len(firsts) > 0
