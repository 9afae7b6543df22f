"""A limit on the program lists of MPEG transport streams, checked before FFmpeg compares the programs with each other.

FFmpeg limits neither the number of programs nor the number of changes. For 300 kB of lists, it can take seven minutes.
Packets have 188 bytes, as in ISO/IEC 13818-1, 2.4.3. With the time code that BDAV puts before a packet, they have 192
bytes. With the parity bytes that DVB puts after a packet, they have 204 bytes.
"""

from __future__ import annotations

import re

from mindie_mm.errors import LimitExceeded

MAX_LISTS = 32
"""Maximum number of changes of the program list. Each packet lists at most 46 programs.

Joined recordings have a few changes: two at each joint if they have 43 programs or more.
"""

_PACKET_BYTES = 188
_STRIDES = (_PACKET_BYTES, 192, 204)
_HEAD_BYTES = 4
_ANYWHERE = 1
_LIST = re.compile(rb"G[\x00\x20\x40\x60\x80\xa0\xc0\xe0]\x00")
"""Beginning of a packet that lists programs, with any combination of flags."""


def whole_packets(data: bytes) -> bytes:
    """Return the packets of a transport stream without the bytes between them.

    If the distance between packets is not constant, return the data unchanged.

    Raises:
        LimitExceeded: The list of programs changes more than `MAX_LISTS` times.

    """
    stride, start = _order(data)
    listed, num_lists = b"", 0
    for match in _LIST.finditer(data):
        place = match.start()
        if (place - start) % stride == 0:
            before, listed = listed, data[place + _HEAD_BYTES : place + _PACKET_BYTES]
            num_lists += listed != before
            if num_lists > MAX_LISTS:
                raise LimitExceeded(
                    f"the container changes its program list more often than the limit of {MAX_LISTS} times"
                )
    if stride == _ANYWHERE or (stride, start) == (_PACKET_BYTES, 0):
        return data
    return b"".join(data[place : place + _PACKET_BYTES] for place in range(start, len(data), stride))


def _order(data: bytes) -> tuple[int, int]:
    """Return the distance between packets and the offset of the first packet, in bytes.

    If the distance is not constant, so that FFmpeg must search for each packet, return 1 and 0.
    """
    for stride in _STRIDES:
        for start in range(stride):
            if _all_begin(data[start : start + 64 * stride : stride]) and _all_begin(data[start::stride]):
                return stride, start
    return _ANYWHERE, 0


def _all_begin(firsts: bytes) -> bool:
    return firsts.count(b"G") == len(firsts) > 0
