"""Tests for image decoding and resizing."""

import io
import struct
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard.caps import Work, under
from mindie_mm.media.image.colours import pil_to_rgb
from mindie_mm.media.image.encoded_image import EncodedImage, PlainJpeg, open_image, resize
from mindie_mm.settings.config import MediaCaps
from tests.media_samples import PHOTOGRAPHS, encoded, jpeg_variants, load_image, photograph


@pytest.mark.parametrize(("name", "data"), jpeg_variants(), ids=lambda value: value if isinstance(value, str) else "")
def test_jpegs_decode_as_pillow_decodes_them(name, data):
    image = open_image(data)
    pixels = image.decode()
    assert isinstance(image, PlainJpeg) == (name not in ("cmyk", "rotated", "subsampling 4:4:1"))
    assert np.array_equal(pixels, EncodedImage.open(data).decode())
    assert pixels.shape == (image.height, image.width, 3)
    assert np.array_equal(pixels, load_image(data))


def test_an_image_of_another_size_than_planned_is_refused_with_both_sizes():
    planned = replace(EncodedImage.open(encoded(photograph("coffee.png", (120, 80)), "PNG")), height=40)
    with pytest.raises(MediaError, match="states 120x40 pixels, but 120x80 pixels were decoded"):
        planned.decode()


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_lossless_formats_decode_as_in_load_image(name):
    for file_format, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("GIF", {})):
        data = encoded(photograph(name, (120, 80)), file_format, **options)
        assert np.array_equal(EncodedImage.open(data).decode(), load_image(data)), file_format


def awkward() -> dict[str, Image.Image]:
    image = photograph("chelsea.png", (90, 60))
    return {"palette": image.quantize(64), "gray": image.convert("L"), "bilevel": image.convert("1")}


@pytest.mark.parametrize("name", awkward())
def test_modes_become_rgb_as_in_load_image(name):
    data = encoded(awkward()[name], "PNG")
    assert np.array_equal(EncodedImage.open(data).decode(), load_image(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_to_size_and_pixels(orientation, file_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photograph("rocket.jpg", (50, 30)), file_format, exif=exif)
    image = open_image(data)
    assert (image.height, image.width) == ((50, 30) if orientation >= 5 else (30, 50))
    assert np.array_equal(image.decode(), load_image(data))


@pytest.mark.parametrize("file_format", ["JPEG", "WEBP", "TIFF"])
def test_an_orientation_in_xmp_is_applied(file_format):
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    settings = {"tiffinfo": {700: xmp}} if file_format == "TIFF" else {"xmp": xmp}
    data = encoded(photograph("rocket.jpg", (50, 30)), file_format, **settings)
    image = open_image(data)
    assert (image.height, image.width) == (50, 30)
    assert np.array_equal(image.decode(), load_image(data))


@pytest.mark.parametrize("cut", [2, 3, 4, 20, 200, 400])
def test_a_jpeg_cut_in_its_header_is_refused(cut):
    with pytest.raises(MediaError):
        open_image(encoded(photograph(size=(50, 30)))[:cut]).decode()


def test_an_array_is_returned_unchanged():
    pixels = np.asarray(photograph(size=(20, 10)))
    image = open_image(pixels)
    assert (image.height, image.width) == (10, 20)
    assert image.decode() is pixels


def test_the_pixel_cap_is_checked_from_the_header_alone():
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(LimitExceeded, match="178956970"):
        EncodedImage.open(bomb)
    image = photograph(size=(300, 200))
    for data in (encoded(image), encoded(image, "PNG"), np.asarray(image)):
        with (
            under(MediaCaps(max_image_pixels=59_999)),
            pytest.raises(LimitExceeded, match=r"300x200 = 60000 pixels; the limit is 59999"),
        ):
            open_image(data)


def test_the_pixels_of_a_request_are_counted_before_any_is_decoded():
    """Pixels are counted before the orientation is read, because a PNG must be decoded to find the orientation."""
    image = photograph(size=(300, 200))
    turned = Image.Exif()
    turned[0x0112] = 6
    cut = encoded(image, "PNG", exif=turned)[:-100]
    assert b"eXIf" in cut
    for data in (encoded(image), encoded(image, "PNG"), cut):
        with under(MediaCaps(max_request_pixels=179_999)):
            for _ in range(2):
                open_image(encoded(image, "WEBP"))
            with pytest.raises(
                LimitExceeded, match=r"images and frames have at least 180000 pixels .*; the limit is 179999"
            ):
                open_image(data)
        # The caps belong to another request, so counting starts again.
        with under(MediaCaps(max_request_pixels=180_000)):
            for _ in range(3):
                open_image(encoded(image))


def test_given_pixels_are_not_counted_as_decoded():
    with under(MediaCaps(max_request_pixels=1)):
        assert open_image(np.asarray(photograph(size=(300, 200)))).height == 200


def test_the_default_caps_allow_a_large_request():
    """The default caps accept 32 photographs of 12 megapixels, or 2,048 frames of 640x480 pixels."""
    for count, pixels in ((32, 4032 * 3024), (2048, 640 * 480)):
        taken = Work(MediaCaps())
        for _ in range(count):
            taken.add_image(pixels)


@pytest.mark.parametrize(
    "data",
    [b"", b"GIF89a", b"not an image at all", b"\xff\xd8\xff\xe0" + bytes(100), b"%PDF-1.4", b"<svg/>", b"P7 2 2 255 "],
)
def test_data_without_an_image_is_refused(data):
    with pytest.raises(MediaError, match="cannot be read as an image"):
        EncodedImage.open(data)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
def test_a_truncated_image_is_refused(file_format):
    data = encoded(photograph(size=(200, 150)), file_format)
    with pytest.raises(MediaError, match=r"truncated|cannot be read as an image") as caught:
        open_image(data[: len(data) // 2]).decode()
    assert "Truncated" not in str(caught.value)
    assert "OSError" not in str(caught.value)


@pytest.mark.parametrize("size", [(56, 84), (84, 56), (28, 28), (280, 140), (333, 77)])
def test_resize_equals_the_bicubic_interpolation_of_torch(size):
    pixels = np.asarray(photograph(size=(201, 150)))
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
    expected = torch.nn.functional.interpolate(
        tensor[None], size=size, mode="bicubic", antialias=True, align_corners=False
    )[0]
    assert np.array_equal(resize(pixels, *size).transpose(2, 0, 1), expected.numpy())


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "rows"), [(56, 112), (200, 56)])
def test_an_image_one_pixel_wide_is_resized_as_one_that_is_one_pixel_high(height, rows, resample):
    pixels = np.random.default_rng(height).integers(0, 256, (height, 1, 3), np.uint8)
    low = resize(np.ascontiguousarray(pixels.transpose(1, 0, 2)), 1, rows, resample).transpose(1, 0, 2)
    difference = resize(pixels, rows, 1, resample).astype(int) - low
    assert abs(difference).max() <= 1


def test_an_unchanged_size_is_not_resized():
    pixels = np.asarray(photograph(size=(56, 28)))
    assert resize(pixels, 28, 56) is pixels


def test_pil_images_are_rotated_upright():
    image = photograph(size=(40, 20))
    exif = Image.Exif()
    exif[0x0112] = 8
    rotated = Image.open(io.BytesIO(encoded(image, "PNG", exif=exif)))
    assert pil_to_rgb(rotated, (255, 255, 255)).size == (20, 40)


def test_the_header_of_a_png_is_read_without_its_pixels():
    """Planning decodes no pixels. Otherwise, all decoded images of a prompt would be in memory at once."""
    out = io.BytesIO()
    Image.new("RGB", (3000, 2000)).save(out, "PNG")
    opened = open_image(out.getvalue())
    assert (opened.width, opened.height) == (3000, 2000)
    tracemalloc.start()
    open_image(out.getvalue())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened.file._im is None
    assert peak < 10**6


def test_a_decoded_image_is_not_kept():
    """Each image is closed after decoding.

    All images of a prompt are opened before the first is decoded, so they would otherwise stay in memory together.
    """
    image = open_image(encoded(Image.new("RGB", (64, 48), "red"), "PNG"))
    assert isinstance(image, EncodedImage)
    assert image.decode().shape == (48, 64, 3)
    with pytest.raises(ValueError, match="closed"):
        image.file.tobytes()


def test_decoding_in_threads_leaves_the_warning_filters_unchanged():
    data = encoded(Image.new("RGB", (64, 48), "red"), "PNG")
    before = [*warnings.filters]

    def decode_often():
        for _ in range(200):
            resize(open_image(data).decode(), 20, 30)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(decode_often) for _ in range(2)]:
            done.result()
    assert warnings.filters == before
