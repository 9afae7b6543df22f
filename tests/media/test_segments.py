"""Tests that real files with many segments are accepted, and that small files that take hours to decode are refused."""

import struct
from functools import cache

import numpy as np
import pytest
from PIL import Image

from mindie_mm.errors import LimitExceeded
from mindie_mm.media.guard.segments import MAX_PARTS, MAX_SCAN_PIXELS, MAX_SCANS, check_parts, check_scans, jpeg_head
from mindie_mm.media.image.encoded_image import EncodedImage, open_image
from tests.attacks import images
from tests.media_samples import encoded, jpeg_variants, load_image, photograph

SOS = b"\xff\xda"


def turned(data: bytes, *entries: bytes) -> bytes:
    """Return a JPEG whose EXIF data contain `entries`, followed by orientation 6.

    Each entry has 12 bytes, and may point to the 60 bytes after the entries.
    """
    orientation = struct.pack("<HHII", 0x0112, 3, 1, 6)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 1 + len(entries)) + b"".join(entries) + orientation
    return images.behind_start(data, images.segment(0xE1, exif + bytes(64)))


def scans_in(noise: int, num_bytes: int) -> bytes:
    """Return random bytes with many scan markers, like the bytes of a film or of a raw image."""
    random = np.random.default_rng(noise).integers(0, 256, num_bytes, np.uint8).tobytes()
    return b"".join(random[at : at + 1000] + SOS for at in range(0, num_bytes, 1000))


def chunked_png(image: Image.Image, num_bytes: int) -> bytes:
    """Return a PNG whose pixel data are split into chunks of `num_bytes` bytes."""
    data = encoded(image, "PNG")
    head, pixels, place = data[:33], b"", 33
    while data[place + 4 : place + 8] != b"IEND":
        size = int.from_bytes(data[place : place + 4])
        pixels += data[place + 8 : place + 8 + size]
        place += 12 + size
    cut = [images.chunk(b"IDAT", pixels[at : at + num_bytes]) for at in range(0, len(pixels), num_bytes)]
    assert len(cut) > 20_000
    return head + b"".join(cut) + data[place:]


@cache
def good() -> dict[str, bytes]:
    image = photograph("coffee.png", (1500, 1000))  # 161 scans are allowed for this size
    jpeg, progressive = encoded(image, quality=92), encoded(image, progressive=True)
    pages = [photograph("chelsea.png", (90, 60)), photograph("rocket.jpg", (90, 60))]
    profile = np.random.default_rng(5).integers(0, 256, 3_000_000, np.uint8).tobytes()
    thumbnail = b"Exif\0\0II*\0\x08\0\0\0\0\0" + bytes(4) + encoded(image.resize((64, 48)), progressive=True)
    photoshop = images.segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\2hi" * 40)
    return {
        "several images": encoded(image, "MPO", save_all=True, append_images=pages),
        "a film behind it": jpeg + scans_in(1, 400_000),
        "a film behind a progressive one": progressive + scans_in(2, 400_000),
        "a gain map behind it": jpeg + progressive * 30,
        "a thumbnail": images.behind_start(jpeg, images.segment(0xE1, thumbnail)),
        "thumbnails of other programs": images.behind_start(progressive, images.segment(0xE2, scans_in(3, 50_000)) * 9),
        "a profile of 3 MB": encoded(image, icc_profile=profile),
        "many segments of Photoshop": images.behind_start(jpeg, photoshop * 200),
        "thousands of comments": images.behind_start(jpeg, images.segment(0xFE, b"a comment") * 5000),
        "restarts at every block": encoded(image, restart_marker_blocks=1),
        "restarts in many scans": encoded(image, progressive=True, restart_marker_blocks=1),
        "fill bytes": jpeg.replace(SOS, b"\xff\xff\xff" + SOS, 1),
        "zeros between segments": images.behind_start(jpeg, b"\xff\xfe\0\4hi" + bytes(300)),
        "exif in two segments": images.behind_start(
            turned(jpeg), images.segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
        ),
        "four colours": encoded(image.convert("CMYK"), progressive=True),
        "chunks of 4 bytes": chunked_png(image.resize((301, 203)), 4),
        "a gif of a long comment": images.gif_with(b"!\xfe" + (b"\xff" + bytes(255)) * 2000 + b"\0"),
        "a tiff of many strips": encoded(image.resize((10, 20_000)), "TIFF", tiffinfo={278: 1}),
        "a bigtiff": encoded(image, "TIFF", big_tiff=True),
        "a tiff of jpegs": encoded(image, "TIFF", compression="jpeg"),
    }


@pytest.mark.parametrize("name", good())
def test_valid_files_of_many_parts_decode_as_in_load_image(name):
    data = good()[name]
    assert np.array_equal(open_image(data).decode(), load_image(data))
    assert np.array_equal(EncodedImage.open(data).decode(), load_image(data))


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack("<HHII", 0x010F, 11, 2, 40),  # the camera's maker as two float32 numbers
        struct.pack("<HHII", 0x0110, 5, 1, 40),  # the camera's model as a fraction
        struct.pack("<HHII", 0x0106, 2, 30, 40),  # the color interpretation as text
    ],
)
def test_a_badly_typed_exif_entry_does_not_prevent_rotation(entry):
    image = photograph("rocket.jpg", (50, 30))
    plain, data = encoded(image), turned(encoded(image), entry)
    opened = open_image(data)
    assert (opened.width, opened.height) == (30, 50)
    assert np.array_equal(opened.decode(), np.rot90(open_image(plain).decode(), -1))


def test_a_rotated_image_with_valid_exif_equals_load_image():
    data = turned(encoded(photograph("rocket.jpg", (50, 30))), struct.pack("<HHII", 0x010F, 2, 4, 0x004D4D4D))
    assert np.array_equal(open_image(data).decode(), load_image(data))


@pytest.mark.parametrize("size", [(12000, 14900), (64, 48), (4000, 3000)])
def test_progressive_photographs_of_any_size_pass(size):
    """Encoders write at most 18 scans: libjpeg writes 10, other encoders up to 14, and up to 18 for four colors."""
    check_scans((SOS + b"\0\x08") * 18, *size)


def test_the_limit_of_scans_depends_on_the_size():
    for width, height, most in ((12000, 14900, MAX_SCANS), (2000, 2000, 63), (1000, 1000, 237), (64, 48, 18724)):
        check_scans(SOS * most, width, height)
        with pytest.raises(
            LimitExceeded, match=f"of {width}x{height} pixels has {most + 1} scans; the limit is {most}"
        ):
            check_scans(b"odd" + SOS * (most + 1), width, height)


@pytest.mark.parametrize("data", [b"", b"\xff", SOS, b"x" + SOS, SOS * 3 + b"\xff", b"\xff" * 5 + b"\xda" * 5])
def test_scan_markers_count_at_even_and_odd_offsets(data):
    with pytest.raises(LimitExceeded, match=f"has {20 + data.count(SOS) + 1} scans"):
        check_scans(SOS * 21 + data, 10_000, 10_000)
    with pytest.raises(LimitExceeded, match=f"has {20 + data.count(SOS) + 1} scans"):
        check_scans(data + b"xx" + SOS * 21, 10_000, 10_000)


def test_scans_after_the_end_count_without_up_to_end():
    data = encoded(photograph(size=(40, 20))) + SOS * MAX_SCANS
    check_scans(data, 5000, 5000, up_to_end=True)
    with pytest.raises(LimitExceeded, match=f"has {MAX_SCANS + 1} scans"):
        check_scans(data, 5000, 5000)


@pytest.mark.parametrize("odd", [b"\xff\2", b"\xff\xbf", b"\xff\xf0", b"\xff\xc8", b"\xff\xd8"])
def test_every_scan_counts_after_a_marker_that_libjpeg_rejects(odd):
    data = encoded(photograph(size=(40, 20)))
    with pytest.raises(LimitExceeded, match=f"has {MAX_SCANS + 1} scans"):
        check_scans(data[:-2] + odd + data[-2:] + SOS * MAX_SCANS, 5000, 5000, up_to_end=True)


@pytest.mark.parametrize("name", [*images.SCANS, *images.PARTS])
def test_too_many_scans_or_parts_are_refused_before_decoding(name):
    """tests/attacks also checks the time and the memory that the refusal takes."""
    data = (images.SCANS | images.PARTS)[name]()
    message = r"has \d+ scans; the limit is \d+" if name in images.SCANS else rf"or more .*; the limit is {MAX_PARTS}"
    with pytest.raises(LimitExceeded, match=message):
        open_image(data)


@pytest.mark.parametrize("size", [(16, 16), (200, 200), (2000, 2000)])
def test_as_many_scans_as_the_limit_are_decoded(size):
    most = MAX_SCAN_PIXELS // ((size[0] + 64) * (size[1] + 64))
    assert open_image(images.refined(*size, most - 20)).decode().shape == (size[1], size[0], 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: images.behind_start(encoded(images.small()), b"\xff\xfe\0\2" * 11_000_000),
        lambda: images.behind_start(encoded(images.small()), b"\xff\0" * 22_000_000),
        lambda: images.behind_start(encoded(images.small()), b"\xff" * 44_000_000),
        lambda: b"\xff\xd8\xff\xe0\0\2" + bytes(44_000_000),
        lambda: images.within_png(images.chunk(b"abCd", b"") * 4_000_000),
        lambda: images.gif_with(b"!\xff" + b"\1\1" * 22_000_000),
    ],
    ids=["segments", "stuffed", "fill", "nothing", "chunks", "sub-blocks"],
)
def test_megabytes_of_parts_are_refused(make):
    with pytest.raises(LimitExceeded, match="the limit is"):
        check_parts(make())


def test_the_head_of_a_jpeg_ends_at_its_first_scan():
    for _, data in jpeg_variants():
        assert data.startswith(SOS, jpeg_head(data))
    assert jpeg_head(b"\xff\xd8\xff\xe0\0\4hi") == 8


@pytest.mark.parametrize("at", range(4, 60))
def test_truncated_files_of_every_format_pass_the_count(at):
    """The count accepts truncated files, because the decoder refuses broken files."""
    for file_format in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"):
        check_parts(encoded(images.small(), file_format)[:at])
