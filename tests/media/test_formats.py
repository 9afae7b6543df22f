"""Tests that AVIF, JPEG 2000, icons and portable anymaps decode as in Pillow, within limits checked before decoding."""

import io
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard import boxes
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.settings.config import MediaCaps
from tests.attacks import images
from tests.media_samples import encoded, photograph

CASES = Path(__file__).parents[1] / "cases/media"
GREEN = (0, 128, 0)


def small() -> Image.Image:
    return photograph("chelsea.png", (90, 60))


def with_alpha() -> Image.Image:
    image = small()
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def by_pillow(data: bytes) -> np.ndarray:
    rgba = Image.open(io.BytesIO(data)).convert("RGBA")
    rgb = Image.new("RGB", rgba.size, GREEN)
    rgb.paste(rgba, mask=rgba.split()[3])
    return np.asarray(rgb)


FILES = {
    "AVIF": encoded(small(), "AVIF"),
    "AVIF with alpha": encoded(with_alpha(), "AVIF"),
    "AVIF in grey": encoded(small().convert("L"), "AVIF"),
    "AVIF with two frames": encoded(small(), "AVIF", save_all=True, append_images=[small().rotate(180)]),
    "JP2": encoded(small(), "JPEG2000"),
    "lossy JP2": encoded(small(), "JPEG2000", quality_layers=[20], irreversible=True),
    "JP2 in tiles": encoded(small(), "JPEG2000", tile_size=(32, 32)),
    "JP2 with alpha": encoded(with_alpha(), "JPEG2000"),
    "JP2 in grey with alpha": encoded(with_alpha().convert("LA"), "JPEG2000"),
    "JPEG 2000 without boxes": encoded(small(), "JPEG2000", no_jp2=True),
    "icon": encoded(with_alpha(), "ICO", sizes=[(16, 16), (48, 48)]),
    "icon of bitmaps": encoded(with_alpha(), "ICO", sizes=[(16, 16), (48, 48)], bitmap_format="bmp"),
    "icon with a palette": encoded(small().quantize(16), "ICO", sizes=[(48, 48)], bitmap_format="bmp"),
    "PPM": encoded(small(), "PPM"),
    "PGM": encoded(small().convert("L"), "PPM"),
    "PBM": encoded(small().convert("1"), "PPM"),
    "PPM of 10 bits": b"P6 3 2 1023 " + np.arange(18, dtype=">u2").repeat(1).tobytes().replace(b"\0\5", b"\3\xff"),
    "PGM of 100": b"P5\n# a comment\n3 2\n# another\r\n100\n" + bytes([0, 1, 50, 99, 100, 120]),
    "plain PBM": b"P1 3 2\n0 1#x\n0110",
    "plain PGM": b"P2 3 2 15\n0 1 # x\n2 15\n7 8",
    "plain PPM": b"P3\n2 1\n255\n255 0 1\n2 3 4\n",
    "PFM": b"Pf\n3 1\n-1.0\n" + np.float32([0, 100, 255]).tobytes(),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_equal_to_pillows(name):
    with under(MediaCaps(rgba_background_color=GREEN)):
        image = open_image(FILES[name])
    pixels = image.decode()
    assert pixels.shape == (image.height, image.width, 3)
    assert np.array_equal(pixels, by_pillow(FILES[name]))


def test_an_avif_matches_its_png():
    found, expected = (open_image((CASES / name).read_bytes()).decode() for name in ("red.avif", "red.png"))
    assert np.abs(found.mean((0, 1)) - expected.mean((0, 1))).max() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["AVIF", "JPEG2000"])
def test_the_exif_orientation_is_applied(orientation, file_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photograph("rocket.jpg", (50, 30)), file_format, exif=exif)
    is_turned = orientation >= 5 and file_format == "AVIF"  # Pillow does not read the EXIF data of JPEG 2000
    image = open_image(data)
    assert (image.height, image.width) == ((50, 30) if is_turned else (30, 50))
    assert image.decode().shape == (image.height, image.width, 3)


@pytest.mark.parametrize(("most", "shift"), [(65535, 8), (4095, 4)])
def test_deep_grey_is_scaled(most, shift):
    values = np.linspace(0, most, 64 * 64).astype(np.uint16).reshape(64, 64)
    expected = np.repeat((values >> shift).astype(np.uint8)[..., None], 3, axis=2)
    anymap = b"P5 64 64 65535\n" + values.astype(">u2").tobytes()
    plain = b"P2 64 64 65535\n" + b" ".join(b"%d" % value for value in values.flat)
    for data in (encoded(Image.fromarray(values), "JPEG2000"), anymap, plain):
        assert np.array_equal(open_image(data).decode(), expected)
    stated = b"P5 64 64 4095\n" + (values >> (0 if most == 4095 else 4)).astype(">u2").tobytes()
    assert np.abs(open_image(stated).decode().astype(int) - expected).max() <= 1


@pytest.mark.parametrize("name", FILES)
def test_caps_are_checked_before_decoding(name):
    image = open_image(FILES[name])
    pixels = image.height * image.width
    message = f"{image.width}x{image.height} = {pixels} pixels; the limit is {pixels - 1}" if pixels > 1 else ""
    with under(MediaCaps(max_image_pixels=pixels - 1)), pytest.raises(LimitExceeded, match=message):
        open_image(FILES[name])
    with under(MediaCaps(max_request_pixels=pixels - 1)), pytest.raises(LimitExceeded, match="the request's images"):
        open_image(FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused(name):
    data = FILES[name]
    for cut in (len(data) // 2, 12, 5):
        with pytest.raises(MediaError, match=r"truncated|cannot be read as an image"):
            open_image(data[:cut]).decode()


@pytest.mark.parametrize(
    "data",
    [
        b"P6 2 2 255 ",
        b"P5 2 2 0 abcd",
        b"P5 2 2 65536 abcdefgh",
        b"P5 0 2 255 ",
        b"P5 -2 2 255 abcd",
        b"P2 2 1 255 1 x",
        b"P2 2 1 255 1 -1",
        b"P2 2 1 255 1_0 1",
        b"P2 2 1 255       ",
        b"P2 2 1 255 1 " + b"9" * 30,
        b"P2 2 1 255 1 " + b"9" * 5000,
        b"P2 2 1 255 1",
        b"P1 2 1 0 2",
        b"P4 9 2 ab",
        b"Pf 2 1 x abcdefgh",
        b"P7\nWIDTH 1\nHEIGHT 1\nDEPTH 1\nMAXVAL 255\nENDHDR\na",
        b"P0CMYK 1 1 255 abcd",
        b"PyRGBA 1 1 255 abcd",
        b"P6 2 2",
        b"P6 99999999999 1 255 a",
        b"\0\0\1\0",
        b"\0\0\1\0\0\0",
        b"\0\0\1\0\1\0" + bytes(16),
        b"\0\0\1\0\1\0" + bytes(12) + struct.pack("<I", 22) + struct.pack("<Iii", 40, -8, 16),
        b"\xff\x4f\xff\x51",
        b"\xff\x4f\xff\x51\0\x29" + bytes(39),
        boxes.JP2_START,
        boxes.JP2_START + struct.pack(">I4s", 8, b"jp2c"),
        b"\0\0\0\x14ftypavif" + bytes(8),
    ],
)  # fmt: skip
def test_broken_files_are_refused(data):
    with pytest.raises(MediaError, match=r"portable anymap|cannot be read as an image"):
        open_image(data).decode()


def test_an_icon_is_the_largest_image_with_the_fewest_colours_as_in_pillow():
    first, second = (encoded(Image.new("RGB", (48, 48), colour), "PNG") for colour in ("red", "blue"))
    entries = [(48, 32, first), (48, 24, second), (16, 8, first)]
    start, head, body = 6 + 16 * len(entries), b"", b""
    for side, bits, data in entries:
        head += struct.pack("<BBBBHHII", side, side, 0, 0, 1, bits, len(data), start + len(body))
        body += data
    icon = b"\0\0\1\0\3\0" + head + body
    found = open_image(icon).decode()
    assert np.array_equal(found, by_pillow(icon))
    assert found[0, 0].tolist() == [0, 0, 255]


def test_the_error_mentions_a_pillow_limit_that_the_program_has_set(monkeypatch):
    data = encoded(photograph(size=(80, 60)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(LimitExceeded, match=re.escape("PIL.Image.MAX_IMAGE_PIXELS is 1000")):
        open_image(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(data).decode().shape == (60, 80, 3)


def test_decompression_bombs_are_refused_before_decoding():
    for name, make in images.BOMBS.items():
        with pytest.raises(LimitExceeded, match="pixels"):
            open_image(make())
        assert name
