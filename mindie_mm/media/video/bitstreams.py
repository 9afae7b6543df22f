"""Inspection of video packets without decoding. H.264 syntax elements have the names that ITU-T H.264 uses."""

from __future__ import annotations

from collections.abc import Iterator

_IDR, _SPS = 5, 7
_AVCC = 1
"""First byte of the extradata in formats like MP4, in which a length precedes each NAL unit instead of a start code."""
_START_CODE = b"\0\0\1"
_MAX_UNITS = 64
"""Maximum number of NAL units of a packet to inspect. The first slice of the picture is one of them."""
_MOST_UNITS = 2**10
"""Maximum number of NAL units in a packet. A packet with more units does not count as complete."""
_VP8_START, _JPEG_START = b"\x9d\x01\x2a", b"\xff\xd8"
_PICTURE_CODES = {"mpeg4": b"\0\0\1\xb6", "mpeg1video": b"\0\0\1\0", "mpeg2video": b"\0\0\1\0"}
"""Start code of a picture, by codec."""
_EXTENSION = b"\0\0\1\xb5"
"""Start code of an extension of MPEG-2."""
_LEAST_VOP = 12
"""Minimum number of bytes of a picture of MPEG-4 part 2 that is certainly coded.

A picture that is not coded, which repeats the last one, has a header of 7 bytes.
"""
_CODING_EXTENSION, _WHOLE_FRAME = 8, 3
"""MPEG-2's extension_start_code_identifier of a picture, and its picture_structure if the picture is not a field."""
_SPS_BYTES = 128
"""Number of bytes of a sequence parameter set to search for frame_mbs_only_flag.

The flag could be after these bytes only if there were 12 full scaling lists before it. No real encoder writes so many.
"""
_WITH_CHROMA = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})
"""Values of profile_idc that mean that a sequence parameter set contains a chroma format and scaling lists."""


def is_whole(packet: memoryview, codec: str, extradata: bytes | None) -> bool:
    """Return whether a packet of `codec` looks complete.

    In a broken download, zeros or other data may replace parts of a packet. For H.264 and HEVC in MP4 and Matroska, the
    lengths of the NAL units must add up to the size of the packet. For other codecs, only the beginning of the packet
    is checked.
    """
    if codec in ("h264", "hevc"):
        width = _length_bytes(codec, extradata)
        return not width or _adds_up(packet, width)
    if codec == "vp8":  # only key frames have a start code
        return bool(packet[0] & 1) or bytes(packet[3:6]) == _VP8_START
    if codec == "vp9":
        return packet[0] >> 6 == 2
    if codec in ("av1", "libdav1d"):
        return 0 < packet[0] >> 3 < 16
    return codec != "mjpeg" or bytes(packet[:2]) == _JPEG_START


def is_one_picture(packet: memoryview, codec: str) -> bool:
    """Return whether a packet of MPEG-1, MPEG-2 or MPEG-4 part 2 has exactly one coded picture, which is no field.

    A packet of DivX may contain two pictures, followed by a packet with a picture that is not coded. Packets of other
    codecs pass.
    """
    if (code := _PICTURE_CODES.get(codec)) is None:
        return True
    data = bytes(packet)
    if data.count(code) != 1:
        return False
    start = data.find(code)
    if codec == "mpeg4":
        return len(data) - start >= _LEAST_VOP
    if codec == "mpeg1video":
        return True
    head = data[data.find(_EXTENSION, start) :][4:7]
    return len(head) == 3 and head[0] >> 4 == _CODING_EXTENSION and head[2] & 3 == _WHOLE_FRAME


def is_idr(packet: memoryview, extradata: bytes | None) -> bool:
    """Return whether the picture in a packet is an IDR picture. Later pictures never refer to pictures before it.

    Other keyframes are recovery points. After such a keyframe, the first pictures may be incorrect.
    """
    return any(packet[at] & 31 == _IDR for at in _units(packet, extradata))


def has_fields(packet: memoryview | None, extradata: bytes | None) -> bool:
    """Return whether pictures may be coded as two fields, possibly in separate packets.

    This function reads the parameter sets in `packet`, which is a keyframe, or in `extradata` if `packet` is None. A
    parameter set that cannot be read is assumed to allow fields.
    """
    if packet is not None:
        return any(_allows_fields(packet[at:]) for at in _units(packet, extradata) if packet[at] & 31 == _SPS)
    data = memoryview(extradata or b"")
    if not data or data[0] != _AVCC:
        return any(_allows_fields(data[at:]) for at in _units(data, extradata) if data[at] & 31 == _SPS)
    if len(data) < 8:
        return True
    at = 6
    for _ in range(data[5] & 31):
        if _allows_fields(data[at + 2 :]):
            return True
        at += 2 + int.from_bytes(data[at : at + 2])
    return False


def _length_bytes(codec: str, extradata: bytes | None) -> int:
    """Return the size in bytes of the length field of NAL units, or 0 if start codes separate the units."""
    place = 4 if codec == "h264" else 21
    if not extradata or extradata[0] != _AVCC or len(extradata) <= place:
        return 0
    return (extradata[place] & 3) + 1


def _adds_up(packet: memoryview, width: int) -> bool:
    at = 0
    for _ in range(_MOST_UNITS):
        length = int.from_bytes(packet[at : at + width])
        at += width + length
        if not length or at >= len(packet):
            return bool(length) and at == len(packet)
    return False


def _units(data: memoryview, extradata: bytes | None) -> Iterator[int]:
    """Yield the offsets of the first NAL units of `data`."""
    if width := _length_bytes("h264", extradata):
        at = 0
        for _ in range(_MAX_UNITS):
            if at + width >= len(data):
                return
            yield at + width
            at += width + int.from_bytes(data[at : at + width])
        return
    # The units before the slices are short. Searching the whole packet would require a copy of it.
    head = bytes(data[:4096])
    place = -1
    for _ in range(_MAX_UNITS):
        place = head.find(_START_CODE, place + 1)
        if not 0 <= place < len(head) - 3:
            return
        yield place + 3


def _allows_fields(unit: memoryview) -> bool:
    """Return whether frame_mbs_only_flag of a sequence parameter set is 0, or missing because the set is truncated."""
    bits = _Bits(bytes(unit[1 : 1 + _SPS_BYTES]).replace(b"\0\0\3", b"\0\0"))
    try:
        profile = bits.read(8)
        bits.read(16)  # constraint flags, level_idc
        bits.exp_golomb()  # seq_parameter_set_id
        if profile in _WITH_CHROMA:
            _skip_chroma(bits)
        bits.exp_golomb()  # log2_max_frame_num_minus4
        order = bits.exp_golomb()  # pic_order_cnt_type
        if order == 0:
            bits.exp_golomb()
        elif order == 1:
            bits.read(1)
            bits.exp_golomb()
            bits.exp_golomb()
            for _ in range(bits.exp_golomb()):
                bits.exp_golomb()
        bits.exp_golomb()  # max_num_ref_frames
        bits.read(1)
        bits.exp_golomb()  # pic_width_in_mbs_minus1
        bits.exp_golomb()  # pic_height_in_map_units_minus1
        return not bits.read(1)
    except EOFError:
        return True


def _skip_chroma(bits: _Bits) -> None:
    """Skip the chroma format and the scaling lists, which precede log2_max_frame_num_minus4 in high profiles."""
    chroma = bits.exp_golomb()
    if chroma == 3:
        bits.read(1)
    bits.exp_golomb()
    bits.exp_golomb()
    bits.read(1)
    if bits.read(1):  # seq_scaling_matrix_present_flag
        for place in range(12 if chroma == 3 else 8):
            if bits.read(1):
                last = following = 8
                for _ in range(16 if place < 6 else 64):
                    if following:
                        code = bits.exp_golomb()
                        following = (last + (code + 1 >> 1) * (1 if code & 1 else -1)) % 256
                    last = following or last


class _Bits:
    """Reader of bits, which starts with the most significant bit. It raises EOFError at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data)
        self._left = 8 * len(data)

    def read(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise EOFError
        return self._value >> self._left & (1 << count) - 1

    def exp_golomb(self) -> int:
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)
