"""Malicious images, each as a function that returns the file's bytes.

Most files are small, but declare a huge size or unpack to a huge size.
"""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache

from PIL import Image

from tests.audio_samples import encode_audio, tone
from tests.media_samples import encode_video, encoded, moving_frames, photograph

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def small() -> Image.Image:
    return photograph("coffee.png", (64, 48))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *further: bytes, depth: int = 8, colours: int = 2, pixels: bytes = b"") -> bytes:
    """Return a PNG whose header declares this size. `further` are more chunks, and `pixels` may be too short."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    pixels = pixels or zlib.compress(bytes(10_000), 9)
    return SIGNATURE + header + b"".join(further) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def zeros(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes), 9)


def within_png(*further: bytes) -> bytes:
    """Return a valid PNG with additional chunks after its header."""
    data = encoded(small(), "PNG")
    return data[:33] + b"".join(further) + data[33:]


def riff(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_canvas(width: int, height: int, flags: int = 0, further: bytes = b"") -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes([flags, 0, 0, 0]) + size + further
    return b"RIFF" + struct.pack("<I", len(body)) + body


def lossless(width: int, height: int) -> bytes:
    bits = (width - 1) | (height - 1) << 14
    return riff(b"VP8L", b"\x2f" + struct.pack("<I", bits) + bytes(20))


def gif(width: int, height: int, frame: bytes = b"") -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame + b";"


def gif_frame(width: int, height: int) -> bytes:
    return b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"


def tiff(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """Return a TIFF with one directory. Each entry has a tag, a type, a count and a value."""
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + struct.pack("<I", following)


def tiff_of(width: int, height: int, *further: tuple[int, int, int, int], compression: int = 1) -> bytes:
    return tiff(
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, 1, 8),
        (259, 3, 1, compression),
        (262, 3, 1, 1),
        (273, 4, 1, 8),
        (277, 3, 1, 1),
        (278, 4, 1, height),
        (279, 4, 1, 100),
        *further,
    )


def bmp(width: int, height: int, bits: int = 24, compression: int = 0, pixels: bytes = b"") -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + info + pixels


def jpeg_of_size(width: int, height: int) -> bytes:
    """Return a JPEG that is valid except for the size in its frame header."""
    data = bytearray(encoded(small(), quality=80))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@cache
def _black() -> bytes:
    return encoded(Image.new("RGB", (8000, 8000)), progressive=True, quality=10)


def jpeg_scans(num_scans: int) -> bytes:
    """Return a progressive JPEG of 8000x8000 pixels in which the first 40 bytes of the first scan are repeated."""
    data = _black()
    start = data.index(b"\xff\xda")
    scan = data[start : data.index(b"\xff\xda", start + 2)]
    scan = scan[: scan.rfind(b"\xff\xc4")] if b"\xff\xc4" in scan else scan
    tiny = scan[:40]  # the decoder fills in the rest of the scan
    return data[:start] + tiny * num_scans + b"\xff\xd9"


def scans_behind(between: bytes, num_scans: int = 100) -> bytes:
    """Return the JPEG of `jpeg_scans`, with the bytes `between` inserted after the first scan."""
    data = jpeg_scans(num_scans)
    second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    return data[:second] + between + data[second:]


def refined(width: int, height: int, num_scans: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated. This scan takes a decoder the most time."""
    data = encoded(Image.new("RGB", (width, height), (90, 120, 200)), progressive=True, quality=50)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * num_scans + data[-2:]


def avif_of_size(width: int, height: int) -> bytes:
    """Return an AVIF that is valid except for the size in its size box."""
    data = encoded(small(), "AVIF")
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", width, height) + data[at + 8 :]


def avif_with(more: bytes) -> bytes:
    """Return a valid AVIF with additional boxes at the start of its tables."""
    data = encoded(small(), "AVIF")
    at = data.index(b"meta")
    (size,) = struct.unpack_from(">I", data, at - 4)
    return data[: at - 4] + struct.pack(">I", size + len(more)) + data[at : at + 8] + more + data[at + 8 :]


def jpeg_2000_of_size(
    width: int,
    height: int,
    *,
    jp2: bool = True,
    in_box: bool = True,
    in_codestream: bool = True,
    components: int = 3,
) -> bytes:
    """Return a JPEG 2000 that is valid except for the size or the number of components in its headers."""
    data = bytearray(encoded(small(), "JPEG2000", no_jp2=not jp2))
    if jp2 and in_box:
        struct.pack_into(">II", data, data.index(b"ihdr") + 4, height, width)
    start = data.index(b"\xff\x4f\xff\x51")
    if in_codestream:
        struct.pack_into(">II", data, start + 8, width, height)
    struct.pack_into(">H", data, start + 40, components)
    return bytes(data)


def jp2_with(boxes: bytes, inner: bytes = b"") -> bytes:
    """Return a valid JP2 with additional boxes before and inside its header."""
    data = encoded(small(), "JPEG2000")
    at = data.index(b"jp2h") - 4
    (size,) = struct.unpack_from(">I", data, at)
    header = struct.pack(">I", size + len(inner)) + b"jp2h" + inner + data[at + 8 : at + size]
    return data[:at] + boxes + header + data[at + size :]


def icon(*images: tuple[int, int, bytes]) -> bytes:
    """Return an icon that contains `images`.

    Each image has the width and height of its directory entry, where 0 means 256, and its data.
    """
    head, body, start = struct.pack("<HHH", 0, 1, len(images)), b"", 6 + 16 * len(images)
    for width, height, image in images:
        head += struct.pack("<BBBBHHII", width, height, 0, 0, 1, 32, len(image), start + len(body))
        body += image
    return head + body


def behind_start(data: bytes, more: bytes) -> bytes:
    """Return the JPEG `data` with the segments `more` inserted after its start marker."""
    return data[:2] + more + data[2:]


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def gif_with(blocks: bytes) -> bytes:
    """Return a valid GIF with additional blocks before its frame."""
    data = encoded(small(), "GIF")
    start = 13 + (3 << (data[10] & 7) + 1)
    return data[:start] + blocks + data[start:]


def bigtiff(num_entries: int) -> bytes:
    return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, num_entries) + struct.pack("<HHQQ", 256, 4, 1, 8) * num_entries


def tiff_strips(num_strips: int) -> bytes:
    """Return a TIFF in which each row is a strip."""
    whole = tiff(
        *((256, 4, 1, 8), (257, 4, 1, num_strips), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)),
        *((273, 4, num_strips, 200), (277, 3, 1, 1), (278, 4, 1, 1), (279, 4, num_strips, 200)),
    )
    return whole.ljust(200, b"\0") + bytes(4 * num_strips)


def jpeg_in_tiff(num_scans: int, num_strips: int) -> bytes:
    """Return a TIFF whose strips all share one progressive JPEG of 2000x2000 pixels."""
    gray = encoded(Image.new("L", (2000, 2000), 128), progressive=True, quality=50)
    strip = gray[:-2] + gray[gray.rindex(b"\xff\xda") : -2] * num_scans + gray[-2:]
    places, counts, start = 200, 200 + 4 * num_strips, 200 + 8 * num_strips
    whole = tiff(
        *((256, 4, 1, 2000), (257, 4, 1, 2000 * num_strips), (258, 3, 1, 8), (259, 3, 1, 7), (262, 3, 1, 1)),
        *((273, 4, num_strips, places), (277, 3, 1, 1), (278, 4, 1, 2000), (279, 4, num_strips, counts)),
    )
    lists = struct.pack(f"<{num_strips}I", *[start] * num_strips)
    return whole.ljust(200, b"\0") + lists + struct.pack(f"<{num_strips}I", *[len(strip)] * num_strips) + strip


def of_several(data: bytes) -> bytes:
    """Return the JPEG `data` with an EXIF block and an index of two images, so that Pillow reads it as an MPO."""
    entries = struct.pack("<LLLHH", 0, len(data), 0, 0, 0) * 2
    index = struct.pack("<HHHLLHHLL", 2, 0xB001, 4, 1, 2, 0xB002, 7, len(entries), 38) + bytes(4)
    blocks = (
        (b"\xff\xe1", b"Exif\0\0II*\0\x08\0\0\0" + bytes(6)),
        (b"\xff\xe2", b"MPF\0II*\0\x08\0\0\0" + index + entries),
    )
    head = b"".join(kind + struct.pack(">H", len(block) + 2) + block for kind, block in blocks)
    return data[:2] + head + data[2:]


def with_exif(data: bytes) -> bytes:
    """Return a JPEG with the EXIF block `data`."""
    whole = encoded(small())
    block = b"Exif\0\0" + data
    return whole[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + whole[2:]


def saved(file_format: str) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        small().convert("P" if file_format == "PCX" else "RGB").save(file, file_format)
        return file.getvalue()

    return make


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(10**6))
    return file.getvalue()


def _laughs() -> bytes:
    entities = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    return f'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY l0 "lol">{entities}]><svg>&l9;</svg>'.encode()


BOMBS: dict[str, Callable[[], bytes]] = {
    "png 50000x50000": lambda: png(50_000, 50_000),
    "png of the largest size": lambda: png(2**31 - 1, 2**31 - 1),
    "png of one row of 2**31": lambda: png(2**31 - 1, 1),
    "png 1 bit 60000x60000": lambda: png(60_000, 60_000, depth=1, colours=0),
    "png 16 bits 14000x14000": lambda: png(14_000, 14_000, depth=16, colours=6),
    "png whose pixels unpack to 100 times too much": lambda: png(64, 1_000_000_000, pixels=zeros(20_000_000)),
    "webp canvas 16384x16384": lambda: webp_canvas(16_384, 16_384),
    "webp canvas 2**24x100": lambda: webp_canvas(2**24, 100),
    "webp lossless 16384x16384": lambda: lossless(16_384, 16_384),
    "gif 65535x65535": lambda: gif(65_535, 65_535, gif_frame(65_535, 65_535)),
    "gif whose frame is larger than its screen": lambda: gif(1, 1, gif_frame(65_535, 65_535)),
    "tiff 100000x100000": lambda: tiff_of(100_000, 100_000),
    "tiff of the largest size": lambda: tiff_of(2**32 - 1, 2**32 - 1),
    "tiff deflated 60000x60000": lambda: tiff_of(60_000, 60_000, compression=8),
    "bmp 2**31 wide": lambda: bmp(2**31 - 1, 2**31 - 1),
    "bmp upside down": lambda: bmp(2**31 - 1, -(2**31)),
    "bmp runs 30000x30000": lambda: bmp(30_000, 30_000, 8, 1, b"\xff\0" * 1000),
    "jpeg 65535x65535": lambda: jpeg_of_size(65_535, 65_535),
    "jpeg 20000x10000": lambda: jpeg_of_size(20_000, 10_000),
    "avif 16000x16000": lambda: avif_of_size(16_000, 16_000),
    "icon of a png 50000x50000": lambda: icon((0, 0, png(50_000, 50_000))),
    "icon whose entry understates its png": lambda: icon((16, 16, png(50_000, 50_000))),
    "pixmap 50000x50000": lambda: b"P6 50000 50000 255\n",
    "bitmap with the largest possible size": lambda: b"P4 9999999999 9999999999\n",
    "plain pixmap 50000x50000": lambda: b"P3 50000 50000 255\n1 2 3",
}
"""Images whose header declares too many pixels."""

OF_FORMATS: dict[str, tuple[Callable[[], bytes], str]] = {
    "jpeg 2000 of 60000x60000": (
        lambda: jpeg_2000_of_size(60_000, 60_000, jp2=False),
        "the limit of the format is 67108864",
    ),
    "jp2 of 60000x60000": (lambda: jpeg_2000_of_size(60_000, 60_000), "the limit of the format is 67108864"),
    "jp2 of 8193x8192": (lambda: jpeg_2000_of_size(8193, 8192), "the limit of the format is 67108864"),
    "jp2 whose codestream is larger than its box": (
        lambda: jpeg_2000_of_size(8000, 8000, in_box=False),
        "cannot be read as an image",
    ),
    "jp2 whose box is larger than its codestream": (
        lambda: jpeg_2000_of_size(13_000, 13_000, in_codestream=False),
        "cannot be read as an image",
    ),
    "jp2 of 16384 components": (lambda: jpeg_2000_of_size(64, 48, components=16_384), "cannot be read as an image"),
    "jp2 with many boxes": (lambda: jp2_with(b"\0\0\0\x08free" * 500_000), "boxes; the limit is 1000"),
    "jp2 with many boxes in its header": (
        lambda: jp2_with(b"", b"\0\0\0\x08free" * 500_000),
        "boxes; the limit is 1000",
    ),
    "avif with many items": (
        lambda: avif_with(b"\0\0\0\x15infe\2\0\0\0\0\1\0\0av01\0" * 50_000),
        "bytes of tables; the limit is 131072",
    ),
    "avif of 30000x30000": (lambda: avif_of_size(30_000, 30_000), "cannot be read as an image"),
    "icon with a bitmap of 30000x30000": (
        lambda: icon((0, 0, struct.pack("<IiiHHIIiiII", 40, 30_000, 60_000, 1, 1, 0, 0, 0, 0, 0, 0))),
        "the icon's bitmap has 30000x30000 pixels; the limit is 256x256",
    ),
    "icon of 65535 images": (lambda: icon(*[(16, 16, b"")] * 65_535), "cannot be read as an image"),
    "pixmap with a long comment": (lambda: b"P6 #" + b"a" * 2_000_000, "a portable anymap without a valid header"),
    "pixmap with many comments": (lambda: b"P6 " + b"#\n" * 1_000_000, "a portable anymap without a valid header"),
    "pixmap with many spaces": (lambda: b"P6" + b" " * 2_000_000, "a portable anymap without a valid header"),
    "plain pixmap with many comments": (
        lambda: b"P3 2000 2000 255 " + b"#\n" * 1_000_000,
        "comments; the limit is 1000",
    ),
    "plain pixmap with too few samples": (lambda: b"P3 9000 9000 255 1 2 3", "broken or truncated"),
}
"""Files that exceed a limit of their format, each with the expected error message."""

SCANS: dict[str, Callable[[], bytes]] = {
    "jpeg of a thousand scans": lambda: jpeg_scans(1000),
    "jpeg of a thousand scans, and of several images": lambda: of_several(jpeg_scans(1000)),
    "jpeg 2000x2000 of a thousand scans": lambda: refined(2000, 2000, 1000),
    "jpeg 16x16 of 200000 scans": lambda: refined(16, 16, 200_000),
    "jpeg scans behind a fill byte": lambda: scans_behind(b"\xff\xfe\0\4hi\xff"),
    "jpeg scans behind many fill bytes": lambda: scans_behind(b"\xff\xfe\0\4hi" + b"\xff" * 1000),
    "jpeg scans behind a restart": lambda: scans_behind(b"\xff\xfe\0\4hi\xff\xd0"),
    "jpeg scans behind a marker without a length": lambda: scans_behind(b"\xff\xfe\0\4hi\xff\1"),
    "jpeg scans behind a reserved marker": lambda: scans_behind(b"\xff\xfe\0\4hi\xff\2\xff\xff"),
    "jpeg scans behind nonsense": lambda: scans_behind(b"\xff\xfe\0\4hi, nonsense \xff\0"),
    "jpeg scans behind a segment of no bytes": lambda: scans_behind(b"\xff\xfe\0\0"),
}
"""JPEGs with so many scans that even a short file takes minutes to decode."""

PARTS: dict[str, Callable[[], bytes]] = {
    "jpeg of empty segments": lambda: behind_start(encoded(small()), b"\xff\xfe\0\2" * 300_000),
    "jpeg with exif, of empty segments": lambda: behind_start(_spanning(orientation=6), b"\xff\xfe\0\2" * 300_000),
    "jpeg of nothing between segments": lambda: behind_start(
        _spanning(orientation=6), b"\xff\xfe\0\2" + bytes(1_000_000)
    ),
    "jpeg of fill bytes": lambda: behind_start(_spanning(orientation=6), b"\xff" * 1_000_000),
    "jpeg of stuffed zeros": lambda: behind_start(_spanning(orientation=6), b"\xff\0" * 500_000),
    "jpeg of markers without a length": lambda: behind_start(_spanning(orientation=6), b"\xff\xf0" * 500_000),
    "jpeg of exif segments": lambda: behind_start(
        _spanning(orientation=6), segment(0xE1, b"Exif\0\0" + bytes(400)) * 2_000
    ),
    "jpeg of photoshop resources": lambda: behind_start(
        _spanning(orientation=6), segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000) * 30
    ),
    "jpeg of quantisation tables": lambda: behind_start(
        _spanning(orientation=6), segment(0xDB, (b"\0" + b"\1" * 64) * 1000) * 20
    ),
    "png of empty private chunks": lambda: within_png(chunk(b"abCd", b"") * 120_000),
    "png of empty pixel chunks": lambda: within_png(chunk(b"IDAT", b"") * 120_000),
    "png of chunks behind its pixels": lambda: encoded(small(), "PNG")[:-12] + chunk(b"abCd", b"") * 120_000,
    "gif of empty comments": lambda: gif_with(b"!\xfe\0" * 500_000),
    "gif of short blocks": lambda: gif_with(b"!\xff\x0bXMP DataXMP" + b"\1\1" * 500_000 + b"\0"),
    "gif of nothing between blocks": lambda: gif_with(bytes(1_000_000)),
    "bigtiff of entries": lambda: bigtiff(120_000),
    "tiff of strips": lambda: tiff_strips(500_000),
}
"""Files with so many parts that a decoder needs seconds before it reaches the first pixel."""

PACKED: dict[str, Callable[[], bytes]] = {
    "png zTXt of 64 MB": lambda: within_png(chunk(b"zTXt", b"x\0\0" + zeros(64_000_000))),
    "png 200 zTXt of 1 MB": lambda: within_png(*[chunk(b"zTXt", b"x\0\0" + zeros(1_000_000))] * 200),
    "png iTXt of 64 MB": lambda: within_png(chunk(b"iTXt", b"x\0\1\0\0\0" + zeros(64_000_000))),
    "png iCCP of 64 MB": lambda: within_png(chunk(b"iCCP", b"x\0\0" + zeros(64_000_000))),
}
"""Images with huge compressed metadata, which are not decompressed."""

INFLATED: dict[str, Callable[[], bytes]] = {
    "png 20 XMP of 60 MB": lambda: within_png(*[chunk(b"zTXt", b"XML:com.adobe.xmp\0\0" + zeros(60_000_000))] * 20),
    "png 100 EXIF of 1 MB": lambda: within_png(
        *[chunk(b"zTXt", b"Raw profile type exif\0\0" + zeros(1_000_000))] * 100
    ),
}
"""Images with compressed metadata that may contain the orientation, so that they have to be decompressed."""

BROKEN: dict[str, Callable[[], bytes]] = {
    "a tiff of 10 pages": lambda: encoded(small(), "TIFF", save_all=True, append_images=[small()] * 9),
    "png signature alone": lambda: SIGNATURE,
    "png 0x0": lambda: png(0, 0),
    "png cut in its pixels": lambda: encoded(small(), "PNG")[:3000],
    "png with no pixels": lambda: SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)),
    "png whose pixels are no zlib": lambda: png(8, 8, pixels=b"nonsense"),
    "png of too few pixels": lambda: png(2000, 2000, pixels=zeros(10)),
    "png with a wrong check": lambda: encoded(small(), "PNG").replace(b"IHDR\0\0\0\x40", b"IHDR\0\0\0\x41"),
    "png of depth 3": lambda: png(8, 8, depth=3),
    "png of colour type 9": lambda: png(8, 8, colours=9),
    "png chunk of 2**32 bytes": lambda: encoded(small(), "PNG")[:33] + b"\xff\xff\xff\xffIDATx",
    "png palette without colours": lambda: png(8, 8, chunk(b"PLTE", b""), colours=3, pixels=b"x"),
    "webp cut": lambda: encoded(small(), "WEBP")[:300],
    "webp without frames": lambda: webp_canvas(64, 64, flags=2, further=b"ANIM\6\0\0\0" + bytes(6)),
    "webp of nothing": lambda: riff(b"VP8 ", b""),
    "gif cut": lambda: encoded(small(), "GIF")[:1000],
    "gif without a frame": lambda: gif(8, 8),
    "gif of 0x0": lambda: gif(0, 0, gif_frame(0, 0)),
    "gif that is a script": lambda: b"GIF89a/*" + b"*/=0;alert(document.domain)//" * 20,
    "tiff cut": lambda: encoded(small(), "TIFF")[:500],
    "tiff directory that follows itself": lambda: tiff((256, 4, 1, 8), following=8),
    "tiff of 2**32 strips": lambda: tiff_of(64, 64, (273, 4, 2**32 - 1, 8)),
    "tiff entries outside the file": lambda: tiff((256, 4, 1000, 2**31), (257, 2, 2**31, 2**31)),
    "tiff of no width": lambda: tiff((257, 4, 1, 64)),
    "bmp cut": lambda: encoded(small(), "BMP")[:200],
    "bmp of no bits": lambda: bmp(8, 8, bits=0),
    "bmp of a wrong compression": lambda: bmp(8, 8, compression=77),
    "jpeg cut": lambda: encoded(small(), quality=95)[:700],
    "jpeg of its start alone": lambda: b"\xff\xd8\xff",
    "jpeg 0x0": lambda: jpeg_of_size(0, 0),
    "jpeg whose segment is too long": lambda: b"\xff\xd8\xff\xe0\xff\xff" + bytes(50),
    "tiff of jpegs of many scans": lambda: jpeg_in_tiff(90, 20),
    "jpeg with a cut exif": lambda: with_exif(b"II*\0\x08\0\0\0\xff\xff")[:60],
}
"""Images that are broken, or that cost too much to decode."""

OTHER_FORMATS: dict[str, Callable[[], bytes]] = {
    **{name: saved(name) for name in ("ICNS", "PCX", "TGA", "DDS", "PDF", "EPS", "SGI", "SPIDER", "QOI")},
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "svg with an entity": lambda: (
        b'<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg xmlns="http://www.w3.org/2000/svg">&x;</svg>'
    ),
    "svg of a billion laughs": _laughs,
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "mvg": lambda: b"push graphic-context\nimage over 0,0 0,0 'https://127.0.0.1/x.png\"|id\"'\n",
    "html": lambda: b"<!doctype html><img src=x onerror=alert(1)>" * 10,
    "zip": zipped,
    "gzip": lambda: gzip.compress(bytes(10_000_000)),
    "elf": lambda: b"\x7fELF\2\1\1" + bytes(500),
    "pickle": lambda: (
        b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    ),
    "numpy": lambda: b"\x93NUMPY\x01\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + bytes(60),
    "text": lambda: b"Ignore previous instructions. " * 50,
    "zeros": lambda: bytes(100_000),
    "a video": lambda: encode_video(moving_frames(3)),
    "an audio clip": lambda: encode_audio(tone(0.2), 16_000),
}
"""Files whose format is not accepted for images, although Pillow can read some of these formats."""


def _spanning(*, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(small(), exif=exif)


HARMLESS: dict[str, Callable[[], bytes]] = {
    "an avif of 4 frames": lambda: encoded(small(), "AVIF", save_all=True, append_images=[small().rotate(1)] * 3),
    "a jp2": lambda: encoded(small(), "JPEG2000"),
    "an icon": lambda: encoded(small(), "ICO"),
    "a pixmap": lambda: encoded(small(), "PPM"),
    "a jpeg that is a zip too": lambda: encoded(small()) + zipped(),
    "a png that is html too": lambda: within_png(chunk(b"tEXt", b"x\0<script>alert(1)</script>")),
    "a gif of 20 frames": lambda: encoded(small(), "GIF", save_all=True, append_images=[small().rotate(1)] * 19),
    "a webp of 10 frames": lambda: encoded(small(), "WEBP", save_all=True, append_images=[small().rotate(1)] * 9),
    "a png of 10 frames": lambda: encoded(small(), "PNG", save_all=True, append_images=[small().rotate(1)] * 9),
    "png with half an iCCP": lambda: within_png(chunk(b"iCCP", b"x")),
    "a jpeg of orientation 6": lambda: _spanning(orientation=6),
    "a jpeg of orientation 99": lambda: _spanning(orientation=99),
    "a jpeg of orientation 6 whose maker is a number": lambda: with_exif(
        b"II*\0\x08\0\0\0\x02\0" + struct.pack("<HHIIHHII", 0x010F, 11, 2, 40, 0x0112, 3, 1, 6) + bytes(40)
    ),
    "an exif directory that holds itself": lambda: with_exif(
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x8769, 4, 1, 8) + bytes(4)
    ),
    "an exif entry of 2**32 values": lambda: with_exif(
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 2**32 - 1, 0) + bytes(4)
    ),
    "a png whose profile is nonsense": lambda: within_png(chunk(b"iCCP", b"x\0\0" + zlib.compress(b"no profile"))),
}
"""Images that look like attacks, but that must be answered at normal cost."""
