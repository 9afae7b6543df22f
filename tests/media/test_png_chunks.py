"""Tests for chunks of a PNG: texts and profiles of any size do not prevent decoding, and the orientation is found."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard.segments import MAX_PARTS
from mindie_mm.media.image import png_chunks
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.media.image.png_chunks import with_tidy_chunks
from tests.attacks.images import chunk
from tests.media_samples import encoded, photograph

CASES = Path(__file__).parents[1] / "cases/media3"
PHOTO = photograph("chelsea.png", (90, 60))
PIXELS = np.asarray(PHOTO)
LONG = b"a workflow " * 150_000
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
RANDOM = np.random.default_rng(0).integers(0, 256, 1_400_000, np.uint8).tobytes()


def with_chunks(*chunks: bytes, at_end: bool = False) -> bytes:
    """Return a PNG with further chunks after its header, or before its end."""
    png = encoded(PHOTO, "PNG")
    place = len(png) - 12 if at_end else 33
    return png[:place] + b"".join(chunks) + png[place:]


CHUNKS = {
    "tEXt": chunk(b"tEXt", b"workflow\0" + LONG),
    "zTXt": chunk(b"zTXt", b"workflow\0\0" + zlib.compress(LONG)),
    "iTXt": chunk(b"iTXt", b"workflow\0\0\0\0\0" + LONG),
    "compressed iTXt": chunk(b"iTXt", b"workflow\0\1\0\0\0" + zlib.compress(LONG)),
    "iCCP": chunk(b"iCCP", b"profile\0\0" + zlib.compress(RANDOM)),
    "eXIf": chunk(b"eXIf", b"II*\0\x08\0\0\0\0\0\0\0\0\0" + RANDOM),
    "broken zTXt": chunk(b"zTXt", b"workflow\0\0not zlib"),
}


def test_the_case_equals_the_plain_image():
    plain, long = (open_image((CASES / name).read_bytes()).decode() for name in ("plain.png", "long_text.png"))
    assert np.array_equal(long, plain)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", [*CHUNKS, "70 MB of texts"])
def test_a_png_with_a_long_text_is_read(name, at_end):
    """libpng, browsers and OpenCV read these files."""
    texts = CHUNKS.get(name) or chunk(b"tEXt", b"workflow\0" + bytes(7 * 10**6)) * 10
    assert np.array_equal(open_image(with_chunks(texts, at_end=at_end)).decode(), PIXELS)


def test_an_icon_may_contain_a_png_with_a_long_text():
    png = with_chunks(CHUNKS["zTXt"])
    icon = b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 90, 60, 0, 0, 1, 32, len(png), 22) + png
    assert np.array_equal(open_image(icon).decode(), PIXELS)


@pytest.mark.parametrize("padding", [0, 1_500_000])
@pytest.mark.parametrize("form", ["plain", "compressed", "zTXt"])
def test_the_orientation_in_a_text_is_applied(form, padding):
    xmp = XMP + b" " * padding
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = b"Raw profile type exif\0\0" + zlib.compress(
        b"\nexif\n%8d\n" % 99 + exif.tobytes().hex().encode() + b"\n" * padding
    )
    texts = {
        "plain": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        "compressed": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
        "zTXt": chunk(b"zTXt", raw),
    }
    image = open_image(with_chunks(texts[form], CHUNKS["zTXt"]))
    assert (image.height, image.width) == (90, 60)
    assert np.array_equal(image.decode(), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("keyword", [b"XML:com.adobe.xmp", b"Raw profile type exif"])
@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
def test_texts_with_the_orientation_are_limited_together(kind, keyword):
    """Twenty texts of 1.2 MB together would need gigabytes of memory if they were decompressed."""
    head = keyword + (b"\0\0" if kind == b"zTXt" else b"\0\1\0\0\0")
    small = chunk(kind, head + zlib.compress(bytes(png_chunks.MAX_TEXT_BYTES // 20)))
    assert b"zTXt" not in with_tidy_chunks(with_chunks(*[small] * 20))
    for texts in ([small] * 21, [chunk(kind, head + zlib.compress(bytes(60_000_000)))] * 20):
        tracemalloc.start()
        with pytest.raises(LimitExceeded, match=f"more bytes than the limit of {png_chunks.MAX_TEXT_BYTES} when"):
            open_image(with_chunks(*texts))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * png_chunks.MAX_TEXT_BYTES + 3 * len(with_chunks(*texts))


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("tEXt", 1000),
        ("tEXt", 30_000_000),
        ("iTXt", 30_000_000),
        ("compressed iTXt", png_chunks.MAX_TEXT_BYTES - len(XMP)),
    ],
)
def test_of_xmp_only_the_orientation_is_kept(form, size):
    xmp = b" " * size + XMP
    content = {
        "tEXt": b"XML:com.adobe.xmp\0" + xmp,
        "iTXt": b"XML:com.adobe.xmp\0\0\0en\0name\0" + xmp,
        "compressed iTXt": b"XML:com.adobe.xmp\0\1\0en\0name\0" + zlib.compress(xmp),
    }
    png = with_chunks(chunk(form[-4:].encode(), content[form]))
    assert len(with_tidy_chunks(png)) < len(encoded(PHOTO, "PNG")) + 100
    assert np.array_equal(open_image(png).decode(), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("start", range(5040, 5090, 3))
def test_an_orientation_between_two_pieces_is_found(start):
    """Without compression, the text is searched in pieces of the size of the input."""
    xmp = bytes(start) + XMP + bytes(9000)
    png = with_chunks(chunk(b"zTXt", b"XML:com.adobe.xmp\0\0" + zlib.compress(xmp, 0)))
    assert open_image(png).height == 90


def test_the_last_of_several_texts_counts():
    upright = chunk(b"tEXt", b"XML:com.adobe.xmp\0none")
    turned = chunk(b"tEXt", b"XML:com.adobe.xmp\0" + XMP)
    assert open_image(with_chunks(upright, turned)).height == 90
    assert open_image(with_chunks(turned, upright)).height == 60


EXIF = Image.Exif()
EXIF[0x0112] = 8
TURNS = {
    "eXIf": chunk(b"eXIf", EXIF.tobytes()[6:]),
    "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
    "upright XMP": chunk(b"tEXt", b"XML:com.adobe.xmp\0none"),
}
NEXT_FRAME = chunk(b"fcTL", struct.pack(">5L2H2B", 1, 90, 60, 0, 0, 1, 10, 0, 0))


@pytest.mark.parametrize("is_animated", [False, True])
@pytest.mark.parametrize("front", [(), *([name] for name in TURNS)], ids=str)
@pytest.mark.parametrize(
    "behind", [*([name] for name in TURNS), ["XMP", "upright XMP"], ["XMP", "eXIf"], ["eXIf", "XMP"]], ids=str
)
@pytest.mark.parametrize("after_next", [False, True])
def test_an_orientation_behind_the_pixels_is_found_where_pillow_finds_it(is_animated, front, behind, after_next):
    early, late = ([TURNS[name] for name in names] for names in (front, behind))
    png = with_chunks(*early, *([chunk(b"acTL", struct.pack(">2L", 2, 0))] if is_animated else []))
    frame = [NEXT_FRAME] if is_animated else []
    png = png[:-12] + b"".join([*frame, *late] if after_next else [*late, *frame]) + png[-12:]
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(png)))
    image = open_image(png)
    assert (image.width, image.height) == expected.size
    assert np.array_equal(image.decode(), np.asarray(expected))


def test_an_orientation_behind_the_pixels_needs_no_check_sum():
    """Pillow compares the check sums only of the chunks in front of the pixels."""
    png = with_chunks(TURNS["eXIf"][:-4] + b"bad!", at_end=True)
    assert np.array_equal(open_image(png).decode(), np.rot90(PIXELS))


def test_an_error_states_the_size_of_the_file():
    broken = with_chunks(CHUNKS["tEXt"])[:-4000].replace(b"IHDR", b"IHDX")
    with pytest.raises(MediaError, match=f"the {len(broken)} bytes cannot be read"):
        open_image(broken)


def test_pillow_keeps_its_limit():
    """The limit is a global variable of Pillow, which the program that uses this package may rely on."""
    open_image(with_chunks(CHUNKS["zTXt"]))
    assert PngImagePlugin.MAX_TEXT_CHUNK == 2**20
    with pytest.raises(ValueError, match="MAX_TEXT_CHUNK"):
        Image.open(io.BytesIO(with_chunks(CHUNKS["zTXt"])))


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP", "TIFF"])
def test_a_large_profile_in_another_format_does_not_change_the_pixels(file_format):
    settings = {"lossless": True} if file_format == "WEBP" else {}
    plain, profiled = (encoded(PHOTO, file_format, **extra, **settings) for extra in ({}, {"icc_profile": RANDOM}))
    assert len(profiled) > len(plain) + 10**6
    assert np.array_equal(open_image(profiled).decode(), open_image(plain).decode())


def test_many_texts_are_refused_before_they_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = with_chunks(chunk(b"tEXt", b"a\0") * (MAX_PARTS + 1))
    monkeypatch.setattr(png_chunks, "_chunks", None)
    with pytest.raises(LimitExceeded, match="or more chunks"):
        with_tidy_chunks(texts)


def test_texts_behind_the_end_are_not_read() -> None:
    png = with_tidy_chunks(encoded(PHOTO, "PNG")) + chunk(b"tEXt", b"a\0")
    assert with_tidy_chunks(png) == png
