"""Tests for PDFs. Their pages are rendered in decoder processes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.media.document.pdf import PdfPage
from mindie_mm.settings.config import MediaCaps, MiB
from mindie_mm.tokenize import Tokenizer
from tests.decode.conftest import Bench, same
from tests.media_samples import photograph, raw_pdf

pytestmark = pytest.mark.usefixtures("copied_workers")

BOX = "/MediaBox[0 0 99 99]"
TEXT = "/Resources<</Font<</F <</Type/Font/Subtype/Type1/BaseFont/Times-Roman>>>>>>"
FORM = "/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</F 5 0 R>>>>"
TILES = "/Type/Pattern/PatternType 1/PaintType 1/TilingType 1/BBox[0 0 1 1]/XStep 0.001/YStep 0.001/Resources<<>>"
NEVER_ENDS = raw_pdf(
    f"{BOX}/Resources<</Pattern<</P 5 0 R>>>>",
    "/Pattern cs /P scn 0 0 99 99 re f",
    f"5 0 obj <<{TILES}/Length 12>> stream\n0 0 1 1 re f\nendstream endobj\n",
)
GROWS = raw_pdf(
    f"{BOX}/Resources<</XObject<</F 5 0 R>>>>",
    "/F Do",
    f"5 0 obj <<{FORM}/Length 11>> stream\n/F Do /F Do\nendstream endobj\n",
)
ACTIONS = raw_pdf(f"{BOX}/AA<</O 5 0 R>>", "", "5 0 obj <</S/JavaScript/JS(while \\(1\\);)>> endobj\n").replace(
    b"/Catalog", b"/Catalog/OpenAction 5 0 R/AcroForm<</Fields[]>>"
)


def two_pages() -> bytes:
    file = io.BytesIO()
    first = photograph("chelsea.png", (150, 120))
    first.save(file, "PDF", save_all=True, append_images=[photograph("coffee.png", (90, 120))], resolution=144)
    return file.getvalue()


@pytest.mark.parametrize("pdf", [two_pages(), raw_pdf(BOX + TEXT, "BT /F 24 Tf 9 9 Td (a text) Tj ET"), ACTIONS])
async def test_a_page_is_the_same_in_a_decoder(bench: Bench, pdf: bytes) -> None:
    for index in range(PdfPage.open(pdf, 0).num_pages):
        page = Media("image", pdf, page=index)
        assert same(await bench.arrays(page), bench.arrays_in_process(page))


async def test_pages_of_one_pdf_have_different_digests(bench: Bench) -> None:
    pdf = two_pages()
    plans = [await bench.plan(Media("image", pdf, page=index)) for index in (0, 1)]
    assert len({one.settings for one in plans}) == 2
    assert [one.num_pages for one in plans] == [2, 2]


def test_a_page_shows_its_image_and_its_text() -> None:
    shown = PdfPage.open(two_pages(), 0).decode().astype(int)
    photo = np.asarray(photograph("chelsea.png", (150, 120)).convert("RGB")).astype(int)
    assert shown.shape == photo.shape
    assert abs(shown - photo).mean() < 8, "the difference is larger than that of a JPEG"
    text = PdfPage.open(raw_pdf(BOX + TEXT, "BT /F 24 Tf 9 9 Td (a text) Tj ET"), 0).decode()
    assert (text == 255).mean() > 0.5
    assert (text < 64).mean() > 0.01


@pytest.fixture(scope="module")
def strict(random_checkpoint: Path) -> Iterator[Tokenizer]:
    """Yield a tokenizer that has one decoder process and small limits on PDF pages."""
    caps = MediaCaps(max_pdf_pages=2, max_pdf_page_pixels=10_000)
    with Tokenizer.from_pretrained(random_checkpoint, decoders=1, caps=caps) as tokenizer:
        yield tokenizer


@pytest.mark.parametrize(
    ("pdf", "limits", "error", "message"),
    [
        (
            NEVER_ENDS,
            {"max_pdf_page_s": 1},
            LimitExceeded,
            r"processor time than the limit of 1 s \(--max-pdf-page-s\)",
        ),
        pytest.param(  # reaches one of the limits first, depending on how much freed memory the decoder reuses
            GROWS,
            {"max_pdf_page_s": 20, "max_decode_bytes": 32 * MiB},
            LimitExceeded,
            r"memory than the limit of 33554432 bytes \(--max-decode-bytes\)|processor time than the limit of 20 s",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["never ends", "grows"],
)
def test_a_page_that_takes_too_much_fails_alone(
    random_checkpoint: Path,
    tmp_path: Path,
    pdf: bytes,
    limits: dict[str, int],
    error: type[Exception],
    message: str,
) -> None:
    good = [{"document": two_pages()}, {"text": "What is it?"}]
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(random_checkpoint, decoders=1, caps=MediaCaps(**limits)) as tokenizer:
        ids = tokenizer.tokenize(good, path_file)
        with pytest.raises(error, match=message):
            tokenizer.tokenize([{"document": pdf}], path_file)
        assert len(tokenizer.tokenize(good, path_file)) == len(ids)


def test_the_number_and_the_size_of_pages_are_limited(strict: Tokenizer, tmp_path: Path) -> None:
    path_file = tmp_path / "shm_name.txt"
    pdf = tmp_path / "two.pdf"
    pdf.write_bytes(two_pages())
    with pytest.raises(LimitExceeded, match=r"document 2: .* 4 pages or more; the limit is 2 \(--max-pdf-pages\)"):
        strict.tokenize([{"document": str(pdf)}, {"document": str(pdf)}], path_file)
    with pytest.raises(InputError, match="must be a path, bytes or a URL of a PDF or TIFF"):
        strict.tokenize([{"document": np.zeros((9, 9, 3), np.uint8)}], path_file)
    with pytest.raises(MediaError, match="cannot be read"):
        strict.tokenize([{"document": b"no PDF"}], path_file)
