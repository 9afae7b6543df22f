"""Tests for documents and formats in decoder processes, which cannot open files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.document.pdf import PdfPage
from mindie_mm.media.guard.caps import under
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize import Tokenizer
from tests.decode.conftest import Bench, same
from tests.media_samples import raw_pdf

pytestmark = pytest.mark.usefixtures("copied_workers")
CASES = Path(__file__).parents[1] / "cases/media3"
PAGES = (CASES / "pages.tif").read_bytes()
IMAGE = "/Type/XObject/Subtype/Image/Width 400/Height 300/BitsPerComponent 8/ColorSpace/DeviceGray/Length 0"
PAGE = raw_pdf(
    "/MediaBox[0 0 99 99]/Resources<</XObject<</I 5 0 R/J 6 0 R>>>>",
    "99 0 0 99 0 0 cm /I Do /J Do",
    f"5 0 obj <<{IMAGE}>> stream\nendstream endobj\n6 0 obj <<{IMAGE}>> stream\nendstream endobj\n",
)


@pytest.mark.parametrize(
    "name", ["unused_alpha.bmp", "white_is_zero_16.tif", "thumbnail_first.tif", "long_text.png", "photo.heic"]
)
async def test_an_image_is_the_same_in_a_decoder(bench: Bench, name: str) -> None:
    image = Media("image", (CASES / name).read_bytes())
    assert same(await bench.arrays(image), bench.arrays_in_process(image))


async def test_the_pages_of_a_tiff_are_decoded_and_have_digests_of_their_own(bench: Bench) -> None:
    pages = [Media("image", PAGES, page=index) for index in (0, 1)]
    plans = [await bench.plan(page) for page in pages]
    assert [one.num_pages for one in plans] == [2, 2]
    assert len({one.settings for one in plans}) == 2
    arrays = [await bench.arrays(page) for page in pages]
    assert all(same(found, bench.arrays_in_process(page)) for found, page in zip(arrays, pages, strict=True))
    assert not same(*arrays)


@pytest.mark.parametrize("decoders", [0, 1])
def test_a_document_is_all_its_pages_in_python(random_checkpoint: Path, tmp_path: Path, decoders: int) -> None:
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(random_checkpoint, decoders=decoders) as tokenizer:
        one = len(tokenizer.tokenize([{"image": str(CASES / "plain.png")}], path_file))
        assert len(tokenizer.tokenize([{"document": str(CASES / "pages.tif")}], path_file)) == 2 * one
        assert len(tokenizer.tokenize([{"document": str(CASES / "thumbnail_first.tif")}], path_file)) == one
        with pytest.raises(MediaError, match="the TIFF has 2 pages"):
            tokenizer.tokenize([{"image": str(CASES / "pages.tif")}], path_file)


@pytest.mark.parametrize("decoders", [0, 1])
def test_the_pixels_of_all_images_on_a_page_are_limited(random_checkpoint: Path, tmp_path: Path, decoders: int) -> None:
    """Two images of 400x300 pixels are on a page that is rendered with 198x198 pixels."""
    caps = MediaCaps(max_request_pixels=200_000)
    with Tokenizer.from_pretrained(random_checkpoint, decoders=decoders, caps=caps) as tokenizer:
        message = (
            r"images on a page of the PDF have 240000 pixels or more; the limit is 200000 \(--max-request-pixels\)"
        )
        with pytest.raises(LimitExceeded, match=message):
            tokenizer.tokenize([{"document": PAGE}], tmp_path / "shm_name.txt")
    with under(caps):
        page = PdfPage.open(PAGE, 0)
    with pytest.raises(LimitExceeded, match=message):
        page.decode()
    assert isinstance(PdfPage.open(PAGE, 0).decode(), np.ndarray)
