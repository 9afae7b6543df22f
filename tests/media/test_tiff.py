"""Tests for TIFFs: samples for which 0 is white, thumbnails, pages and subdirectories."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.document.tiff import MAX_ENTRIES, TiffPage
from mindie_mm.media.guard.caps import under
from mindie_mm.media.guard.segments import MAX_SCANS
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.media.source import read_source
from mindie_mm.settings.config import MediaCaps
from mindie_mm.settings.environment import environment_now
from tests.media_samples import photograph

CASES = Path(__file__).parents[1] / "cases/media3"
PHOTO = np.asarray(photograph("chelsea.png", (90, 60)))
GREY = np.asarray(ImageOps.autocontrast(photograph("chelsea.png", (90, 60)).convert("L")))
SMALL = PHOTO[::4, ::4]


def decoded(data: bytes) -> np.ndarray:
    return open_image(data).decode()


def case(name: str) -> np.ndarray:
    return decoded((CASES / name).read_bytes())


def written(*pages: np.ndarray, **settings: object) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(
        file, **{key: settings.pop(key) for key in ("byteorder", "bigtiff") if key in settings}
    ) as tiff:
        for page in pages:
            tiff.write(page, metadata=None, **settings)
    return file.getvalue()


def with_subfile(*pages: tuple[np.ndarray, int], **settings: object) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file, **settings) as tiff:
        for page, kind in pages:
            tiff.write(page, metadata=None, photometric="rgb" if page.ndim == 3 else "minisblack", subfiletype=kind)
    return file.getvalue()


def test_the_cases_equal_the_plain_images():
    assert np.array_equal(case("white_is_zero_16.tif"), case("plain_grey.png"))
    assert np.array_equal(case("thumbnail_first.tif"), case("plain.png"))


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    "samples",
    [
        GREY,
        GREY.astype(np.uint16) * 257,
        GREY.astype(np.uint32) * 0x1010101,
        (GREY.astype(np.int32) * 257 - 2**15).astype(np.int16),
        GREY.astype(np.float32) / 255,
    ],
    ids=["uint8", "uint16", "uint32", "int16", "float32"],
)
def test_0_is_white_if_the_file_says_so(samples, compression, byteorder):
    """The image is inverted, as libvips does for 8 and 16 bits, whatever the type of the samples is."""
    most = {"u": np.iinfo(np.uint32).max >> (32 - 8 * samples.itemsize), "i": -1, "f": 1}[samples.dtype.kind]
    negative = (most - samples).astype(samples.dtype)
    if samples.dtype == np.uint32 and byteorder == ">":
        pytest.skip("Pillow does not read such files")
    settings = {"compression": compression, "byteorder": byteorder}
    usual = decoded(written(samples, photometric="minisblack", **settings))
    inverted = decoded(written(negative, photometric="miniswhite", **settings))
    assert abs(inverted.astype(int) - usual).max() <= 1
    assert abs(usual[..., 0].astype(int) - GREY).max() <= 1


def test_one_bit_with_0_as_white():
    bits = GREY > 127
    assert np.array_equal(
        decoded(written(~bits, photometric="miniswhite")), decoded(written(bits, photometric="minisblack"))
    )


def test_a_pil_image_with_0_as_white_is_inverted():
    """Pillow opens only one form with more than 8 bits, without inverting it."""
    image = Image.open(CASES / "white_is_zero_16.tif")
    assert np.array_equal(read_source(Media("image", image)), case("plain_grey.png"))


@pytest.mark.parametrize("settings", [{}, {"byteorder": ">"}, {"bigtiff": True}])
@pytest.mark.parametrize("before", [True, False])
def test_thumbnails_and_masks_are_not_the_image(before, settings):
    others = [(SMALL, 1), (GREY > 99, 4), (GREY[::4, ::4] > 99, 5)]
    pages = [*others, (PHOTO, 0)] if before else [(PHOTO, 0), *others]
    assert np.array_equal(decoded(with_subfile(*pages, **settings)), PHOTO)


def test_the_old_subfile_type_marks_thumbnails():
    """Tag 255 had the values 1 (full), 2 (reduced) and 3 (page) before tag 254 replaced it."""
    data = with_subfile((SMALL, 1), (PHOTO, 0))
    old = struct.pack("<HHL", 255, 3, 1)
    data = data.replace(struct.pack("<HHLL", 254, 4, 1, 1), old + struct.pack("<L", 2))
    data = data.replace(struct.pack("<HHLL", 254, 4, 1, 0), old + struct.pack("<L", 1))
    assert np.array_equal(decoded(data), PHOTO)


def test_if_all_images_are_reduced_the_largest_is_used():
    assert np.array_equal(decoded(with_subfile((SMALL, 1), (PHOTO, 1))), PHOTO)


def test_the_full_image_may_be_in_a_subdirectory():
    """Camera raw files begin with a thumbnail, whose subdirectory has the full image."""
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as tiff:
        tiff.write(SMALL, metadata=None, photometric="rgb", subfiletype=1, subifds=1)
        tiff.write(PHOTO, metadata=None, photometric="rgb", subfiletype=0)
    assert np.array_equal(decoded(file.getvalue()), PHOTO)


def test_raw_data_of_a_camera_are_refused():
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as tiff:
        tiff.write(SMALL, metadata=None, photometric="rgb", subfiletype=1, subifds=1)
        tiff.write(GREY, metadata=None, photometric=32803, subfiletype=0)
    with pytest.raises(MediaError, match="raw data of a camera"):
        open_image(file.getvalue())
    with pytest.raises(MediaError, match="raw data of a camera"):
        open_image(b"II*\0\x10\0\0\0CR\2\0" + bytes(4) + with_subfile((PHOTO, 0))[8:])


def test_an_image_of_several_pages_is_refused_with_their_number():
    with pytest.raises(MediaError, match=r"the TIFF has 2 pages, .* send the TIFF as a document"):
        case("pages.tif")
    pages = [PHOTO, 255 - PHOTO, PHOTO[::-1]]
    with pytest.raises(MediaError, match="the TIFF has 3 pages"):
        decoded(written(*pages, photometric="rgb"))


@pytest.mark.parametrize("settings", [{}, {"byteorder": ">"}, {"bigtiff": True}])
@pytest.mark.parametrize("tile", [None, (2, 64, 64)])
def test_slices_are_refused_with_their_number(tile, settings):
    data = written(np.stack([GREY, 255 - GREY]), photometric="minisblack", volumetric=True, tile=tile, **settings)
    assert tifffile.TiffFile(io.BytesIO(data)).pages[0].imagedepth == 2
    with pytest.raises(MediaError, match=r"has 2 slices \(ImageDepth\), .* send each slice as an image"):
        decoded(data)
    with pytest.raises(MediaError, match="has 2 slices"):
        open_image(TiffPage.open(data, 0))
    with pytest.raises(MediaError, match="has 2 slices"):
        read(Image.open(io.BytesIO(data)))
    one = written(GREY[None], photometric="minisblack", volumetric=True)
    assert np.array_equal(decoded(one)[..., 0], GREY)


def read(image: Image.Image) -> np.ndarray:
    return open_image(read_source(Media("image", image))).decode()


def test_a_pil_image_of_several_pages_is_refused_as_its_file_is():
    message = r"the TIFF has 2 pages, .* send the TIFF as a document"
    with Image.open(CASES / "pages.tif") as image:
        with pytest.raises(MediaError, match=message):
            read(image)
        image.load()
        with pytest.raises(MediaError, match=message):
            read(image)
    with pytest.raises(MediaError, match=r"several images, whose file is closed; .* image\.copy\(\)"):
        read(image)


def test_a_pil_image_of_a_page_that_the_caller_chose_is_used():
    image = Image.open(io.BytesIO((CASES / "pages.tif").read_bytes()))
    first = np.asarray(image.convert("RGB"))
    assert np.array_equal(read(image.copy()), first)
    image.seek(1)
    second = read(image)
    assert np.array_equal(second, np.asarray(image.convert("RGB")))
    assert not np.array_equal(second, first)


def test_a_pil_image_passes_over_thumbnails_and_keeps_changes():
    assert np.array_equal(read(Image.open(io.BytesIO((CASES / "thumbnail_first.tif").read_bytes()))), case("plain.png"))
    changed = Image.open(io.BytesIO(with_subfile((PHOTO, 0), (SMALL, 1))))
    changed.thumbnail((30, 30))
    assert read(changed).shape == (20, 30, 3)


@pytest.mark.parametrize("settings", [{}, {"byteorder": ">"}, {"bigtiff": True}])
def test_all_pages_of_a_document_are_used(settings):
    pages = [PHOTO, 255 - PHOTO, PHOTO[::-1]]
    data = written(*pages, photometric="rgb", compression="zlib", **settings)
    for index, page in enumerate(pages):
        opened = TiffPage.open(data, index)
        assert opened.num_pages == 3
        assert np.array_equal(open_image(opened).decode(), page)
    assert np.array_equal(open_image(TiffPage.open(written(PHOTO, photometric="rgb"), 0)).decode(), PHOTO)


def test_limits_apply_to_pages():
    page = TiffPage.open((CASES / "pages.tif").read_bytes(), 1)
    with under(MediaCaps(max_image_pixels=104 * 104 - 1)), pytest.raises(LimitExceeded, match="104x104"):
        open_image(page)


BIG = b"II+\0\x08\0\0\0" + struct.pack("<Q", 16)
FAR = struct.pack("<QHHQQ", 1, 254, 16, 64, 2**64 - 1)


@pytest.mark.parametrize(
    "data",
    [b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\0", BIG[:8] + b"\xff" * 8, BIG + FAR + bytes(8)],
    ids=["no offset", "beyond the end", "no entries", "far beyond the end", "values far beyond the end"],
)
def test_broken_directories_are_refused(data):
    with pytest.raises(MediaError, match="cannot be read"):
        open_image(data)
    with pytest.raises(MediaError, match="cannot be read"):
        TiffPage.open(data, 0)


def test_the_number_of_entries_is_limited():
    """Directories may share their bytes, and each of them is parsed."""
    head, num_directories = b"II*\0" + struct.pack("<L", 8), 3
    entries = MAX_ENTRIES // num_directories
    step = 2 + 12 * entries + 4
    data = head + b"".join(
        struct.pack("<H", entries) + bytes(12 * entries) + struct.pack("<L", 8 + step * (index + 1))
        for index in range(num_directories + 1)
    )
    with pytest.raises(LimitExceeded, match=f"the limit is {MAX_ENTRIES}"):
        open_image(data)


def test_a_chain_that_returns_to_its_start_ends():
    data = bytearray(written(PHOTO, photometric="rgb"))
    (start,) = struct.unpack_from("<L", data, 4)
    (entries,) = struct.unpack_from("<H", data, start)
    struct.pack_into("<L", data, start + 2 + 12 * entries, start)
    assert np.array_equal(decoded(bytes(data)), PHOTO)


def test_child_processes_inherit_the_limit_on_scans() -> None:
    """A process that is forked elsewhere gets the environment that this process has in `os.environ`."""
    assert environment_now()["LIBTIFF_JPEG_MAX_ALLOWED_SCAN_NUMBER"] == str(MAX_SCANS)
