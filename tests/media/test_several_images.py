"""Tests that files with several images are read as documented, or refused with the reason."""

import io

import numpy as np
import pytest
from PIL import Image

from mindie_mm.errors import MediaError
from mindie_mm.media.image.encoded_image import open_image
from tests.media_samples import encoded, photograph

PHOTO = photograph("chelsea.png", (90, 60))
OTHER = photograph("coffee.png", (90, 60))
FIRST = np.asarray(PHOTO)


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "AVIF", "MPO"])
def test_an_animation_or_stereo_image_as_an_image_is_its_first_image(file_format: str) -> None:
    settings = {"lossless": True} if file_format == "WEBP" else {}
    several = encoded(PHOTO, file_format, save_all=True, append_images=[OTHER], **settings)
    alone = Image.open(io.BytesIO(several)).convert("RGB")
    assert np.array_equal(open_image(several).decode(), np.asarray(alone))
    assert abs(np.asarray(alone).astype(int) - FIRST).mean() < 12, "the other image differs by 60"


def test_the_largest_image_of_an_icon_is_used() -> None:
    icon = encoded(PHOTO, "ICO", sizes=[(16, 16), (48, 48)])
    assert max(open_image(icon).decode().shape[:2]) == 48


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_several_portable_anymaps_in_one_file_are_refused(mode: str) -> None:
    one = encoded(PHOTO.convert(mode), "PPM")
    assert open_image(one).decode().shape == FIRST.shape
    assert open_image(one + b"\n").decode().shape == FIRST.shape
    with pytest.raises(MediaError, match="several images"):
        open_image(one + one)


@pytest.mark.parametrize("start", [b"\xb1\x68\xde\x3a", b"%PDF-1.7", b"8BPS\0\1"])
def test_other_formats_with_several_images_are_not_read_as_images(start: bytes) -> None:
    """DCX holds several PCX images, a PDF several pages and a PSD several layers."""
    with pytest.raises(MediaError, match="cannot be read as an image"):
        open_image(start + bytes(200))
