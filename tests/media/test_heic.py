"""Tests for HEIC images: tiles, crops, turns, alpha, limits and broken files."""

import struct
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import open_image
from mindie_mm.settings.config import MediaCaps
from tests.heic_samples import ALPHA, coded, grid_head, heif, size_of, tiled
from tests.media_samples import encoded, photograph

CASES = Path(__file__).parents[1] / "cases/media3"
PIXELS = np.asarray(photograph("chelsea.png", (128, 96)))
ONE = coded(PIXELS)
TILES = [PIXELS[top : top + 64, left : left + 64] for top in (0, 64) for left in (0, 64)]
LARGE = np.asarray(photograph("chelsea.png", (128, 128)))
GRID = [LARGE[top : top + 64, left : left + 64] for top in (0, 64) for left in (0, 64)]


def decoded(data: bytes, **caps: int) -> np.ndarray:
    with under(MediaCaps(**caps)):
        image = open_image(data)
    pixels = image.decode()
    assert pixels.shape == (image.height, image.width, 3)
    return pixels


def difference(pixels: np.ndarray, expected: np.ndarray) -> float:
    assert pixels.shape == expected.shape
    return float(abs(pixels.astype(int) - expected).mean())


def test_the_photograph_of_a_phone_equals_the_plain_image():
    photo, plain = (decoded((CASES / name).read_bytes()) for name in ("photo.heic", "plain.png"))
    assert difference(photo, plain) < 1


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1"])
def test_an_image_in_one_piece_is_read(brand):
    assert difference(decoded(heif([ONE], brand=brand)), PIXELS) < 2


@pytest.mark.parametrize(("height", "width"), [(128, 128), (100, 90), (65, 65)])
def test_tiles_are_joined_and_cut_to_the_size_of_the_image(height, width):
    data = tiled(GRID, grid_head(2, 2, height, width), size_of(height, width))
    assert difference(decoded(data), LARGE[:height, :width]) < 2


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ([(b"irot", b"\1")], np.rot90(PIXELS)),
        ([(b"irot", b"\2")], np.rot90(PIXELS, 2)),
        ([(b"irot", b"\3")], np.rot90(PIXELS, 3)),
        ([(b"imir", b"\0")], PIXELS[::-1]),
        ([(b"imir", b"\1")], PIXELS[:, ::-1]),
        ([(b"irot", b"\1"), (b"imir", b"\1")], np.rot90(PIXELS)[:, ::-1]),
        ([(b"clap", struct.pack(">8i", 40, 1, 30, 1, -10, 1, 5, 1))], PIXELS[38:68, 34:74]),
        ([(b"clap", struct.pack(">8i", 127, 1, 95, 1, -1, 2, -1, 2)), (b"irot", b"\1")], np.rot90(PIXELS[:95, :127])),
    ],
    ids=[
        "90",
        "180",
        "270",
        "top and bottom",
        "left and right",
        "turned and mirrored",
        "cropped",
        "cropped and turned",
    ],
)
def test_crops_turns_and_mirrors_apply_in_their_order(properties, expected):
    """ISO/IEC 23008-12, 6.5.9 to 6.5.12. The turn is anticlockwise."""
    kind, data, given = ONE
    assert difference(decoded(heif([(kind, data, [*given, *properties])])), expected) < 2


def test_transparent_pixels_show_the_background():
    alpha = np.zeros((96, 128), np.uint8)
    alpha[:, 64:] = 255
    items = [ONE, coded(alpha, (b"auxC", bytes(4) + ALPHA))]
    data = heif(items, references=[(b"auxl", 2, [1])])
    expected = PIXELS.copy()
    expected[:, :64] = 255
    assert difference(decoded(data), expected) < 2
    assert difference(open_image(data, drop_alpha=True).decode(), PIXELS) < 2


def test_thumbnails_and_depth_maps_are_other_items():
    thumbnail = coded(PIXELS[:64, :64])
    depth = coded(PIXELS[..., 0].copy(), (b"auxC", bytes(4) + b"urn:mpeg:hevc:2015:auxid:2\0"))
    data = heif([ONE, thumbnail, depth], references=[(b"thmb", 2, [1]), (b"auxl", 3, [1])])
    assert difference(decoded(data), PIXELS) < 2


def test_limits_apply_before_decoding():
    with pytest.raises(LimitExceeded, match="128x96"):
        decoded(heif([ONE]), max_image_pixels=128 * 96 - 1)
    kind, data, (setup, _, colours) = ONE
    with pytest.raises(LimitExceeded, match="60000x60000"):
        decoded(heif([(kind, data, [setup, size_of(60_000, 60_000), colours])]))
    with pytest.raises(LimitExceeded, match="has 65536 tiles; the limit is 4096"):
        decoded(tiled(TILES[:1], grid_head(256, 256, 16_384, 16_384), size_of(16_384, 16_384)))


def test_a_frame_of_another_size_than_stated_is_refused():
    kind, data, (setup, _, colours) = ONE
    for (height, width), message in (
        ((8, 8), r"HEIC image of .* is broken"),  # FFmpeg stops before the size is known
        ((96, 127), "states tiles of 127x96 pixels, but one of 128x96 pixels was decoded"),
        ((97, 128), "states tiles of 128x97 pixels, but one of 128x96 pixels was decoded"),
    ):
        with pytest.raises(MediaError, match=message):
            decoded(heif([(kind, data, [setup, size_of(height, width), colours])]))


@pytest.mark.parametrize("name", ["one", "tiles"])
def test_truncated_files_are_refused(name):
    data = heif([ONE]) if name == "one" else tiled(GRID, grid_head(2, 2, 128, 128), size_of(128, 128))
    for size in (20, 60, len(data) // 2, len(data) - 9):
        with pytest.raises(MediaError):
            decoded(data[:size])


@pytest.mark.parametrize(
    "data",
    [
        tiled(GRID[:3], grid_head(2, 2, 128, 128), size_of(128, 128)),
        tiled(GRID, grid_head(2, 2, 129, 128), size_of(129, 128)),
        tiled([*GRID[:3], PIXELS], grid_head(2, 2, 128, 128), size_of(128, 128)),
        heif([(b"hvc1", ONE[1], [ONE[2][0], (b"ispe", bytes(12))])]),
        heif([(b"hvc1", ONE[1], ONE[2][1:])]),
        heif([(b"hvc1", b"", ONE[2])]),
        heif([(b"hvc1", ONE[1], [*ONE[2], (b"clap", struct.pack(">8i", 40, 0, 30, 1, 0, 1, 0, 1))])]),
        heif([(b"hvc1", ONE[1], [*ONE[2], (b"clap", struct.pack(">8i", 400, 1, 30, 1, 0, 1, 0, 1))])]),
    ],
    ids=[
        "a tile is missing",
        "too few tiles",
        "unequal tiles",
        "no size",
        "no setup",
        "no data",
        "division by 0",
        "outside",
    ],
)
def test_contradicting_headers_are_refused(data):
    with pytest.raises(MediaError, match=r"HEIC image of .* is broken"):
        decoded(data)


def test_what_is_not_read_is_named():
    with pytest.raises(MediaError, match=r"HEIC image is of type b'iovl'.*convert it to JPEG"):
        decoded(heif([(b"iovl", b"", [size_of(9, 9)]), ONE]))
    with pytest.raises(MediaError, match="HEIC file has no still image; send it as a video"):
        decoded(b"\0\0\0\x14ftyphevc\0\0\0\0hevc" + bytes(40))


def test_an_avif_with_a_general_brand_is_still_read():
    avif = encoded(photograph("chelsea.png", (90, 60)), "AVIF")
    assert np.array_equal(decoded(avif.replace(b"ftypavif", b"ftypmif1", 1)), decoded(avif))
