"""A limit on the program lists of MPEG transport streams, checked before FFmpeg compares the programs with each other.

FFmpeg limits neither the number of programs nor the number of changes. 300 kB of lists can take seven minutes. Packets
of 188 bytes follow ISO/IEC 13818-1, 2.4.3. BDAV puts four bytes of time before each packet (192 bytes), and DVB puts
parity after it (204 bytes).
"""

from __future__ import annotations

import re

from mindie_mm.errors import LimitExceeded

MAX_LISTS = 32
"""Maximum number of packets that list other programs than the previous list. Each packet lists at most 46.

Captures that were joined have a few such packets, or two at each joint if they have 43 programs or more.
"""

_PACKET_BYTES = 188
_STRIDES = (_PACKET_BYTES, 192, 204)
_HEAD_BYTES = 4
_ANYWHERE = 1
_LIST = re.compile(rb"G[\x00\x20\x40\x60\x80\xa0\xc0\xe0]\x00")
"""Beginning of a packet that lists programs, whatever flags are set."""


def whole_packets(data: bytes) -> bytes:
    """Return the packets of a transport stream without the bytes between them.

    The data are returned unchanged if the distance between packets is not constant.

    Raises:
        LimitExceeded: The list of programs changes more than `MAX_LISTS` times.

    """
    stride, start = _order(data)
    listed, num_lists = b"", 0
    for found in _LIST.finditer(data):
        place = found.start()
        if (place - start) % stride == 0:
            before, listed = listed, data[place + _HEAD_BYTES : place + _PACKET_BYTES]
            num_lists += listed != before
            if num_lists > MAX_LISTS:
                raise LimitExceeded(
                    f"the container repeats its program list more often than the limit of {MAX_LISTS} times"
                )
    if stride == _ANYWHERE or (stride, start) == (_PACKET_BYTES, 0):
        return data
    return b"".join(data[place : place + _PACKET_BYTES] for place in range(start, len(data), stride))


def _order(data: bytes) -> tuple[int, int]:
    """Return the distance between packets and the offset of the first packet, in bytes.

    The result is 1 and 0 if FFmpeg must search for each packet.
    """
    for stride in _STRIDES:
        for start in range(stride):
            if _all_begin(data[start : start + 64 * stride : stride]) and _all_begin(data[start::stride]):
                return stride, start
    return _ANYWHERE, 0


def _all_begin(firsts: bytes) -> bool:
    return firsts.count(b"G") == len(firsts) > 0
