"""HEIC files, made of HEVC frames that FFmpeg encodes."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from numpy.typing import NDArray

ALPHA = b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0"
FULL_BT_601 = b"nclx" + struct.pack(">HHHB", 1, 13, 6, 0x80)
_PARAMETER_SETS = range(32, 35)  # VPS, SPS and PPS
Property = tuple[bytes, bytes]


def box(kind: bytes, *content: bytes) -> bytes:
    data = b"".join(content)
    return struct.pack(">I4s", 8 + len(data), kind) + data


def full_box(kind: bytes, *content: bytes, version: int = 0, flags: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags), *content)


def hevc(pixels: NDArray[np.uint8]) -> tuple[bytes, bytes]:
    """Encode RGB or gray pixels. Return the decoder configuration (hvcC) and the frame."""
    encoder = cast("VideoCodecContext", av.CodecContext.create("libx265", "w"))
    encoder.height, encoder.width = pixels.shape[:2]
    encoder.pix_fmt = "yuvj444p" if pixels.ndim == 3 else "gray"
    encoder.time_base = Fraction(1)
    encoder.options = {"x265-params": "log-level=none:qp=4:range=full:repeat-headers=1:pools=none:frame-threads=1"}
    frame = av.VideoFrame.from_ndarray(pixels, "rgb24" if pixels.ndim == 3 else "gray")
    if pixels.ndim == 3:
        frame = frame.reformat(format="yuvj444p", dst_colorspace=5, dst_color_range=2)
    stream = b"".join(map(bytes, [*encoder.encode(frame), *encoder.encode(None)]))
    units = [unit for unit in re.split(rb"\x00\x00\x00?\x01", stream) if unit]
    sets = [unit for unit in units if unit[0] >> 1 in _PARAMETER_SETS]
    arrays = b"".join(struct.pack(">BHH", 0x80 | unit[0] >> 1, 1, len(unit)) + unit for unit in sets)
    setup = b"\1" + bytes(20) + b"\3" + bytes([len(sets)]) + arrays  # the last 3 says that lengths have 4 bytes
    slices = [unit for unit in units if unit[0] >> 1 not in _PARAMETER_SETS]
    return setup, b"".join(struct.pack(">I", len(unit)) + unit for unit in slices)


def size_of(height: int, width: int) -> Property:
    return b"ispe", struct.pack(">III", 0, width, height)


def coded(pixels: NDArray[np.uint8], *properties: Property) -> tuple[bytes, bytes, list[Property]]:
    """Return the type, the data and the properties of an item with `pixels`."""
    setup, data = hevc(pixels)
    return b"hvc1", data, [(b"hvcC", setup), size_of(*pixels.shape[:2]), (b"colr", FULL_BT_601), *properties]


def grid_head(rows: int, columns: int, height: int, width: int) -> bytes:
    return struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, width, height)


def heif(
    items: Sequence[tuple[bytes, bytes, list[Property]]],
    *,
    references: Sequence[tuple[bytes, int, Sequence[int]]] = (),
    brand: bytes = b"heic",
    in_idat: frozenset[int] = frozenset(),
) -> bytes:
    """Return a HEIF file. Items have ids from 1, and the first item is the primary one."""
    infos = [
        full_box(b"infe", struct.pack(">HH4s", i, 0, kind), b"\0", version=2) for i, (kind, _, _) in enumerate(items, 1)
    ]
    known = [entry for _, _, properties in items for entry in properties]
    ids = iter(range(1, len(known) + 1))
    ipma = [
        struct.pack(">HB", i, len(properties)) + bytes(0x80 | next(ids) for _ in properties)
        for i, (_, _, properties) in enumerate(items, 1)
    ]
    ipco = box(b"ipco", *(box(kind, content) for kind, content in known))
    iprp = box(b"iprp", ipco, full_box(b"ipma", struct.pack(">I", len(items)), *ipma))
    iref = full_box(
        b"iref",
        *(box(kind, struct.pack(f">HH{len(to)}H", source, len(to), *to)) for kind, source, to in references),
    )
    idat = b"".join(data for i, (_, data, _) in enumerate(items, 1) if i in in_idat)
    start = 0
    for _ in range(2):  # the offsets depend on the size of the boxes before the data
        place, inner, locations = start, 0, []
        for i, (_, data, _) in enumerate(items, 1):
            offset = inner if i in in_idat else place
            locations.append(struct.pack(">HHHHII", i, i in in_idat, 0, 1, offset, len(data)))
            place, inner = (place, inner + len(data)) if i in in_idat else (place + len(data), inner)
        iloc = full_box(b"iloc", b"\x44\0", struct.pack(">H", len(items)), *locations, version=1)
        meta = full_box(
            b"meta",
            full_box(b"hdlr", bytes(4), b"pict", bytes(13)),
            full_box(b"pitm", struct.pack(">H", 1)),
            iloc,
            full_box(b"iinf", struct.pack(">H", len(items)), *infos),
            iprp,
            iref,
            box(b"idat", idat),
        )
        head = box(b"ftyp", brand, bytes(4), b"mif1heic") + meta
        start = len(head) + 8
    return head + box(b"mdat", *(data for i, (_, data, _) in enumerate(items, 1) if i not in in_idat))


def tiled(tiles: Sequence[NDArray[np.uint8]], head: bytes, size: Property, *properties: Property) -> bytes:
    """Return a file with a grid of tiles."""
    items = [(b"grid", head, [size, *properties]), *map(coded, tiles)]
    targets = range(2, len(tiles) + 2)
    return heif(items, references=[(b"dimg", 1, targets)], in_idat=frozenset({1}))
