"""Tests for transparency, and grayscale samples with more than 8 bits, in all formats and modes that support them."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from mindie_mm.errors import InputError
from mindie_mm.inputs import Media
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.colours import pil_to_rgb
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.media.source import read_source
from mindie_mm.settings.config import MediaCaps
from tests.attacks.images import chunk, png
from tests.media_samples import encoded, photograph

CASES = Path(__file__).parents[1] / "cases/media"
WHITE, GREEN = (255, 255, 255), (0, 128, 0)


def graded() -> Image.Image:
    """Return an RGBA image with alpha values from 0 to 255."""
    image = photograph("chelsea.png", (90, 60))
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def cut_out() -> Image.Image:
    """Return an RGBA image in which each pixel is either opaque, or black and fully transparent."""
    image = Image.new("RGBA", (90, 60))
    image.paste(
        photograph("chelsea.png", (90, 60)),
        mask=Image.radial_gradient("L").resize(image.size).point(lambda v: 255 * (v < 128)),
    )
    return image


def composed(rgba: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    """Blend an image with the background, as `rgba_to_rgb` in vLLM and `to_rgb` in qwen-vl-utils do."""
    rgb = Image.new("RGB", rgba.size, background)
    rgb.paste(rgba, mask=rgba.split()[3])
    return np.asarray(rgb)


def decoded(data: bytes, background: tuple[int, int, int] = WHITE) -> np.ndarray:
    with under(MediaCaps(rgba_background_color=background)):
        image = open_image(data)
    return image.decode()  # the image was opened with the caps and keeps them


def of_colour(image: Image.Image, mode: str, colour: int | tuple[int, ...]) -> bytes:
    """Return a PNG of mode `mode` that declares `colour` transparent (tRNS). Transparent pixels have this color."""
    flat = Image.new(mode, image.size, colour)
    flat.paste(image.convert(mode), mask=image.getchannel("A"))
    return encoded(flat, "PNG", transparency=colour)


PALETTE = photograph("chelsea.png", (90, 60)).quantize(64)
FILES = {
    "PNG in RGBA": encoded(graded(), "PNG"),
    "PNG in LA": encoded(graded().convert("LA"), "PNG"),
    "PNG with a palette": encoded(PALETTE, "PNG", transparency=bytes(range(0, 256, 4))),
    "PNG with one transparent palette entry": encoded(PALETTE, "PNG", transparency=7),
    "PNG with a transparent grey": of_colour(cut_out(), "L", 3),
    "PNG with a transparent colour": of_colour(cut_out(), "RGB", (1, 2, 3)),
    "PNG with a transparent bit": of_colour(cut_out(), "1", 0),
    "APNG": encoded(graded(), "PNG", save_all=True, append_images=[graded().rotate(180)]),
    "WebP": encoded(graded(), "WEBP", lossless=True),
    "animated WebP": encoded(graded(), "WEBP", lossless=True, save_all=True, append_images=[graded().rotate(180)]),
    "GIF": encoded(cut_out(), "GIF"),
    "animated GIF": encoded(cut_out(), "GIF", save_all=True, append_images=[cut_out().rotate(180)]),
    "TIFF": encoded(graded(), "TIFF"),
    "TIFF in LA": encoded(graded().convert("LA"), "TIFF"),
}  # fmt: skip


@pytest.mark.parametrize("background", [WHITE, GREEN])
@pytest.mark.parametrize("name", FILES)
def test_transparent_pixels_show_the_background(name, background):
    rgba = Image.open(io.BytesIO(FILES[name])).convert("RGBA")
    assert rgba.getextrema()[3][0] < 16
    assert np.array_equal(decoded(FILES[name], background), composed(rgba, background))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA", "P"])
def test_transparent_pixels_of_pil_images_show_the_background(mode):
    rgba = cut_out() if mode in ("PA", "P") else graded()
    image = rgba.convert("LA").convert("La") if mode == "La" else rgba.convert(mode)
    if mode == "P":
        image.info["transparency"] = image.getpixel((0, 0))
    with under(MediaCaps(rgba_background_color=GREEN)):
        found = read_source(Media("image", image))
    assert np.array_equal(found, composed((image.convert("LA") if mode == "La" else image).convert("RGBA"), GREEN))


def test_black_on_transparent_becomes_black_on_white():
    found = decoded((CASES / "black_on_transparent.png").read_bytes())
    assert {*map(tuple, found.reshape(-1, 3))} == {(0, 0, 0), WHITE}


@pytest.mark.parametrize(("depth", "level"), [(1, 1), (2, 2), (4, 9), (8, 200), (16, 40_000)])
def test_the_transparent_grey_of_a_png_has_the_depth_of_the_file(depth, level):
    rows = b"".join(b"\0" + (level if x else 0).to_bytes(2)[2 - max(1, depth // 8) :] for x in (1, 0))
    if depth < 8:
        rows = b"".join(b"\0" + bytes([value << (8 - depth)]) for value in (level, 0))
    name = chunk(b"tRNS", struct.pack(">H", level))
    found = decoded(png(1, 2, name, depth=depth, colours=0, pixels=zlib.compress(rows)), GREEN)
    assert found.reshape(-1, 3).tolist() == [[*GREEN], [0, 0, 0]]


def test_the_transparent_colour_of_a_16_bit_png_is_matched():
    rows = b"\0" + struct.pack(">6H", 1000, 40_000, 65_000, 0, 0, 0)
    name = chunk(b"tRNS", struct.pack(">3H", 1000, 40_000, 65_000))
    found = decoded(png(2, 1, name, depth=16, colours=2, pixels=zlib.compress(rows)), GREEN)
    assert found.reshape(-1, 3).tolist() == [[*GREEN], [0, 0, 0]]


@pytest.mark.parametrize("colour", [(0, 0), (0, 0, 256), (0, -1, 0), "white", (0.5, 0, 0), None])
def test_a_background_that_is_not_three_bytes_is_refused(colour):
    message = r"rgba_background_color(=| is ).* must be a list of 3 elements, each an integer from 0 to 255"
    with pytest.raises(InputError, match=message):
        MediaCaps(rgba_background_color=colour)


def ramp(most: int, dtype: str = "uint16") -> np.ndarray:
    return np.linspace(0, most, 256 * 4).astype(dtype).reshape(4, 256)


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=2)


def deep_png(values: np.ndarray, significant_bits: int | None = None) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    stated = [] if significant_bits is None else [chunk(b"sBIT", bytes([significant_bits]))]
    return png(values.shape[1], len(values), *stated, depth=16, colours=0, pixels=zlib.compress(rows))


@pytest.mark.parametrize(
    ("most", "shift"), [(65535, 8), (40_000, 8), (16_383, 6), (4095, 4), (1023, 2), (255, 0), (100, 0)]
)
def test_16_bit_grey_is_scaled_by_its_largest_value(most, shift):
    values = ramp(most)
    big = values.astype(">u2")
    for data in (
        deep_png(values),
        encoded(Image.fromarray(values), "TIFF"),
        encoded(Image.frombytes("I;16B", (256, 4), big.tobytes()), "TIFF"),
        encoded(Image.fromarray(values.astype(np.int32)), "TIFF"),
    ):
        assert np.array_equal(decoded(data), grey(values >> shift))
    for image in (Image.fromarray(values), Image.fromarray(values.astype(np.int32))):
        assert np.array_equal(read_source(Media("image", image)), grey(values >> shift))


@pytest.mark.parametrize(
    ("bits", "most", "expected"),
    [
        (12, 4095, lambda v: v >> 4),
        (12, 900, lambda v: v >> 4),
        (12, 65_520, lambda v: v >> 8),
        (16, 4095, lambda v: v >> 8),
        (10, 1023, lambda v: v >> 2),
        (8, 200, lambda v: v),
        (1, 1, lambda v: v * 255),
        (4, 15, lambda v: v * 17),
        (0, 4095, lambda v: v >> 4),
        (17, 4095, lambda v: v >> 4),
    ],
)
def test_16_bit_grey_is_scaled_by_the_significant_bits_of_a_png(bits, most, expected):
    assert np.array_equal(decoded(deep_png(ramp(most), bits)), grey(expected(ramp(most))))


def test_12_bit_values_in_16_bits_are_scaled():
    data = (CASES / "twelve_bits_in_sixteen.png").read_bytes()
    values = np.asarray(Image.open(io.BytesIO(data)))
    assert values.max() == 4095
    assert np.array_equal(decoded(data), grey(values >> 4))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            ramp(1, "float32") * 0 + np.linspace(0, 1, 1024, dtype=np.float32).reshape(4, 256),
            lambda v: np.rint(v * 255),
        ),
        (ramp(255, "float32"), lambda v: v),
        (ramp(1000, "float32"), lambda v: np.rint(v.astype(np.float64) * 0.255)),
        (ramp(200, "float32") - 100, lambda v: np.rint((v.astype(np.float64) + 100) * 1.275)),
        (np.full((2, 2), np.float32(3e38)), lambda v: v * 0 + 255),
        (np.float32([[0, np.nan], [np.inf, 1]]), lambda v: np.array([[0, 0], [0, 255]])),
        (np.zeros((2, 2), np.float32), lambda v: v),
        (ramp(2**31 - 1, "float64").astype(np.int32), lambda v: v >> 23),
        (ramp(4000, "int32") - 1000, lambda v: (v + 1000) >> 4),
    ],
    ids=["fractions", "bytes", "above 255", "below 0", "huge", "not finite", "black", "32 bits", "integers below 0"],
)
def test_floats_and_32_bit_integers_are_scaled(values, expected):
    right = grey(expected(values))
    assert np.array_equal(decoded(encoded(Image.fromarray(values), "TIFF")), right)
    assert np.array_equal(np.asarray(pil_to_rgb(Image.fromarray(values), WHITE)), right)


MEDIA3 = CASES.with_name("media3")
OPAQUE = np.asarray(photograph("chelsea.png", (90, 60)))


def bitmap(alpha: int, *, mask: bool = True) -> bytes:
    """Return a BMP with 32 bits per pixel. Its header declares an alpha channel if `mask` is true."""
    photo = photograph("chelsea.png", (90, 60))
    photo.putalpha(alpha)
    pixels = np.asarray(photo)[::-1, :, [2, 1, 0, 3]].tobytes()
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) if mask else b""
    size = 40 + (68 if mask else 0)
    head = struct.pack("<IiiHHIIiiII", size, 90, 60, 1, 32, 3 if mask else 0, len(pixels), 0, 0, 0, 0)
    head += masks + bytes(size - 40 - len(masks))
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(pixels), 0, 0, 14 + len(head)) + head + pixels


def icon_of_bitmap(*, alpha: int, masked_rows: int) -> bytes:
    """Return an icon of 32x32 pixels with 32 bits. Its mask hides the first `masked_rows` rows."""
    photo = photograph("chelsea.png", (32, 32))
    photo.putalpha(alpha)
    pixels = np.asarray(photo)[::-1, :, [2, 1, 0, 3]].tobytes()
    mask = bytes(4 * (32 - masked_rows)) + b"\xff" * 4 * masked_rows
    head = struct.pack("<IiiHHIIiiII", 40, 32, 64, 1, 32, 0, len(pixels) + len(mask), 0, 0, 0, 0)
    data = head + pixels + mask
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 32, 32, 0, 0, 1, 32, len(data), 22) + data


def test_an_alpha_channel_that_is_0_everywhere_is_unused():
    """Windows and image viewers ignore such a channel. Pillow would return transparent pixels."""
    plain = decoded((MEDIA3 / "plain.png").read_bytes())
    assert np.array_equal(decoded((MEDIA3 / "unused_alpha.bmp").read_bytes()), plain)
    assert np.array_equal(read_source(Media("image", Image.open(MEDIA3 / "unused_alpha.bmp"))), plain)
    for data in (bitmap(0), bitmap(255), bitmap(0, mask=False), bitmap(128, mask=False)):
        assert np.array_equal(decoded(data), OPAQUE)
    assert abs(decoded(bitmap(128)).astype(int) - composed(np_image(OPAQUE, 128), WHITE)).max() <= 1


def np_image(rgb: np.ndarray, alpha: int) -> Image.Image:
    image = Image.fromarray(rgb)
    image.putalpha(alpha)
    return image


@pytest.mark.parametrize("masked_rows", [0, 10])
def test_the_mask_of_an_icon_replaces_an_unused_alpha_channel(masked_rows):
    photo = np.array(photograph("chelsea.png", (32, 32)))
    photo[:masked_rows] = WHITE
    assert np.array_equal(decoded(icon_of_bitmap(alpha=0, masked_rows=masked_rows)), photo)
    without_mask = icon_of_bitmap(alpha=0, masked_rows=0)
    size = len(without_mask) - 22 - 128
    cut = without_mask[:14] + struct.pack("<I", size) + without_mask[18 : 22 + size]
    assert np.array_equal(decoded(cut), np.asarray(photograph("chelsea.png", (32, 32))))


def test_a_fourth_channel_of_unknown_meaning_in_a_tiff_is_unused_if_it_is_0_everywhere():
    samples = np.dstack([OPAQUE, np.zeros(OPAQUE.shape[:2], np.uint8)])
    file = io.BytesIO()
    tifffile.imwrite(file, samples, photometric="rgb", extrasamples=["unassalpha"], metadata=None)
    declared = file.getvalue()
    assert (decoded(declared) == 255).all(), "the file says that the channel is alpha"
    undeclared = declared.replace(struct.pack("<HHI", 338, 3, 1), struct.pack("<HHI", 60000, 3, 1))
    assert np.array_equal(decoded(undeclared), OPAQUE)


def test_formats_that_always_declare_alpha_may_be_transparent_everywhere():
    for file_format in ("PNG", "WEBP"):
        assert (decoded(encoded(np_image(OPAQUE, 0), file_format)) == 255).all()
