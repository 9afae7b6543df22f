"""Tests for PDFs whose fonts are not embedded: every visible character is drawn, or the page is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mindie_mm.errors import MediaError
from mindie_mm.media.document import pdf
from mindie_mm.media.document.font_mapper import FontMapper
from mindie_mm.media.document.fonts import find_faces
from mindie_mm.media.document.pdf import PdfPage
from tests.font_samples import CHINESE, cid_pdf, font_of, save_fonts, simple_pdf

CASES = Path(__file__).parents[1] / "cases/media3"
ROOT = Path(__file__).parents[2]
INVOICE = (CASES / "chinese_not_embedded.pdf").read_bytes()
BLANK = (CASES / "blank.pdf").read_bytes()
ARIAL = "<</Type/Font/Subtype/TrueType/BaseFont/Arial/Encoding"
CYRILLIC = simple_pdf("<C0C141>", f"{ARIAL}<</BaseEncoding/WinAnsiEncoding/Differences[192/afii10017/afii10018]>>>>")
IDENTITY = (
    "<</Type/Font/Subtype/Type0/BaseFont/Arial/Encoding/Identity-H/DescendantFonts[<</Type/Font/Subtype/CIDFontType2"
    "/BaseFont/Arial/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>>>]>>"
)
UseFonts = Callable[[Path], FontMapper]


@pytest.fixture
def use_fonts() -> Iterator[UseFonts]:
    """Yield a function that lets PDFium use only the fonts in a folder."""
    mapper = pdf._mapper()
    kept = mapper.faces

    def use(folder: Path) -> FontMapper:
        mapper.use(find_faces([folder]))
        return mapper

    yield use
    mapper.use(kept)


def decoded(data: bytes) -> np.ndarray:
    return PdfPage.open(data, 0).decode()


def ink(data: bytes) -> float:
    return float((decoded(data) < 128).mean())


def test_an_installed_font_draws_chinese(use_fonts: UseFonts, tmp_path: Path) -> None:
    save_fonts(tmp_path / "some.ttf", font_of(CHINESE, "Some"))
    use_fonts(tmp_path)
    assert ink(INVOICE) > 0.05, "four squares"
    assert ink(BLANK) == 0
    for encoding in ("UniGB-UTF16-H", "GBK-EUC-H"):
        assert ink(cid_pdf("发票合计", encoding=encoding)) > 0.05


def test_without_a_font_the_error_names_it_and_the_characters(use_fonts: UseFonts, tmp_path: Path) -> None:
    use_fonts(tmp_path)
    with pytest.raises(
        MediaError, match=r"page 1 of the PDF uses the font 'SimSun'.* no installed font has .*发合票计"
    ):
        decoded(INVOICE)
    for data, shown in [
        (cid_pdf("領収書あ", ordering="Japan1", encoding="UniJIS-UCS2-H"), "あ"),
        (cid_pdf("領収書あ", ordering="Japan1", encoding="90ms-RKSJ-H"), "あ"),
        (cid_pdf("發票", ordering="CNS1", encoding="UniCNS-UCS2-H"), "票"),
        (cid_pdf("한글", ordering="Korea1", encoding="UniKS-UCS2-H"), "한"),
        (CYRILLIC, "АБ"),
    ]:
        with pytest.raises(MediaError, match=f"not embedded, and no installed font has .*{shown}"):
            decoded(data)


def test_one_missing_character_is_not_dropped(use_fonts: UseFonts, tmp_path: Path) -> None:
    save_fonts(tmp_path / "some.ttf", font_of(CHINESE.replace("计", ""), "Some"))
    use_fonts(tmp_path)
    with pytest.raises(MediaError, match=r"'SimSun'.*\(计\)"):
        decoded(INVOICE)
    save_fonts(tmp_path / "other.ttf", font_of("计", "Other"))
    use_fonts(tmp_path)
    assert ink(INVOICE) > 0.04


def test_an_installed_font_draws_cyrillic_and_leaves_latin_to_pdfium(use_fonts: UseFonts, tmp_path: Path) -> None:
    latin = simple_pdf("(A)", f"{ARIAL}/WinAnsiEncoding>>")
    use_fonts(tmp_path)
    expected = decoded(latin)
    save_fonts(tmp_path / "some.ttf", font_of("\u0410\u0411ABC", "Some"))
    use_fonts(tmp_path)
    assert np.array_equal(decoded(latin), expected)
    assert ink(CYRILLIC) > 2 * ink(latin)


@pytest.mark.parametrize("font", ["Helvetica", "Arial", "Times-Roman", "Foo-Bold", "FooNarrow,Italic"])
def test_an_installed_font_draws_type_1_fonts(use_fonts: UseFonts, tmp_path: Path, font: str) -> None:
    """PDFium asks for no fallback for them, so the font as a whole is replaced."""
    czech = f"<</Type/Font/Subtype/Type1/BaseFont/{font}/Encoding<</Differences[65/Ccaron/ccaron]>>>>"
    use_fonts(tmp_path)
    with pytest.raises(MediaError, match=r"no installed font has all of its characters \(\u010c\u010d\)"):
        decoded(simple_pdf("(ABxyz)", czech))
    save_fonts(tmp_path / "some.ttf", font_of("\u010c\u010d", "Some"))
    use_fonts(tmp_path)
    assert ink(simple_pdf("(AB)", czech)) > 0.02
    with pytest.raises(MediaError, match=r"no installed font has all of its characters \(xyz\)"):
        decoded(simple_pdf("(ABxyz)", czech))
    save_fonts(tmp_path / "other.ttf", font_of("\u010c\u010dxyz", "Other"))
    use_fonts(tmp_path)
    assert ink(simple_pdf("(ABxyz)", czech)) > 0.05


def test_a_collection_gives_the_right_face(use_fonts: UseFonts, tmp_path: Path) -> None:
    """PDFium finds the face by its offset. The faces draw squares of different sizes."""
    save_fonts(tmp_path / "c.ttc", font_of(CHINESE, "Small", side=200), font_of(CHINESE, "SimSun", side=800))
    assert len(use_fonts(tmp_path).faces) == 2
    large = ink(INVOICE)
    save_fonts(tmp_path / "c.ttc", font_of(CHINESE, "Small", side=200), font_of(CHINESE, "Large", side=800))
    use_fonts(tmp_path)
    assert large == pytest.approx(16 * ink(INVOICE), rel=0.3)


@pytest.mark.parametrize("font", ["Helvetica", "Times-Bold", "Courier", "Symbol", "ZapfDingbats"])
def test_the_standard_fonts_need_no_file(use_fonts: UseFonts, tmp_path: Path, font: str) -> None:
    use_fonts(tmp_path)
    codes = "".join(f"{code:02x}" for code in (*range(32, 127), *range(161, 255)))
    assert ink(simple_pdf(f"<{codes}>", f"<</Type/Font/Subtype/Type1/BaseFont/{font}>>")) > 0.001


@pytest.mark.parametrize("font", ["Arial", "ABCDEF+Calibri", "Georgia,Bold"])
def test_latin_fonts_are_replaced(use_fonts: UseFonts, tmp_path: Path, font: str) -> None:
    use_fonts(tmp_path)
    codes = "".join(f"{code:02x}" for code in (*range(32, 127), *range(128, 256)))
    encoding = "/Encoding/WinAnsiEncoding"
    assert ink(simple_pdf(f"<{codes}>", f"<</Type/Font/Subtype/TrueType/BaseFont/{font}{encoding}>>")) > 0.001


@pytest.mark.parametrize("codes", ["0024002500260048", "00030004000500060007", "0009", "00a100b2", "01230124"])
def test_characters_without_unicode_are_not_guessed(use_fonts: UseFonts, tmp_path: Path, codes: str) -> None:
    """Glyph numbers of a font that is not there would select other glyphs of the replacement."""
    use_fonts(tmp_path)
    with pytest.raises(MediaError, match=r"'Arial', which is not embedded, and does not state which characters"):
        decoded(simple_pdf(f"<{codes}>", IDENTITY))


@pytest.mark.parametrize("turn", ["1 0 0 1", "0 1 -1 0", "1 0 0.3 1"])
def test_control_characters_in_a_latin_font_are_not_drawn(use_fonts: UseFonts, tmp_path: Path, turn: str) -> None:
    use_fonts(tmp_path)
    font = f"{ARIAL}/WinAnsiEncoding>>"
    assert ink(simple_pdf(f"{turn} 90 10 Tm <41090d0103>", font)) == ink(simple_pdf(f"{turn} 90 10 Tm (A)", font)) > 0


@pytest.mark.parametrize("encoding", ["", "/Encoding/WinAnsiEncoding"])
@pytest.mark.parametrize(
    ("font", "text"),
    [
        ("Wingdings", "(l)"),
        ("ABCDEF+Wingdings-Regular", "(4)"),
        ("Wingdings#202", "<fefe>"),
        ("Webdings", "(a)"),
        ("ITCZapfDingbats", "(4)"),
        ("ZapfDingbats", "(44)"),
        ("SymbolMT", "(abc)"),
        ("Symbol,Bold", "(abc)"),
    ],
)
def test_letters_are_not_drawn_for_symbols(
    use_fonts: UseFonts, tmp_path: Path, font: str, text: str, encoding: str
) -> None:
    use_fonts(tmp_path)
    with pytest.raises(
        MediaError, match=r"page 1 of the PDF uses the font '.*(dings|Dingbats|Symbol).* embed the font"
    ):
        decoded(simple_pdf(text, f"<</Type/Font/Subtype/TrueType/BaseFont/{font}{encoding}>>"))


def test_fonts_with_symbols_and_letters_are_replaced(use_fonts: UseFonts, tmp_path: Path) -> None:
    use_fonts(tmp_path)
    assert ink(simple_pdf("(abc)", f"{ARIAL}/WinAnsiEncoding>>".replace("Arial", "SegoeUISymbol"))) > 0
    assert ink(simple_pdf("(a = 1)", "<</Type/Font/Subtype/Type1/BaseFont/Symbol>>")) > 0


def test_invisible_text_below_a_scanned_page_needs_no_font(use_fonts: UseFonts, tmp_path: Path) -> None:
    use_fonts(tmp_path)
    assert ink(cid_pdf("发票", mode=3)) == 0


def test_a_font_of_an_annotation_is_missed(use_fonts: UseFonts, tmp_path: Path) -> None:
    use_fonts(tmp_path)
    page = cid_pdf("发票").replace(
        b"/Contents", b"/Annots[<</Type/Annot/Subtype/Stamp/Rect[0 0 240 80]/AP<</N 7 0 R>>>>]/None"
    )
    stream = b"BT /F 24 Tf 20 30 Td <53d17968> Tj ET"
    form = (
        b"7 0 obj <</Type/XObject/Subtype/Form/BBox[0 0 240 80]/Resources<</Font<</F 5 0 R>>>>/Length %d>> stream\n%s\n"
        b"endstream endobj\n"
    )
    page = page.replace(b"trailer", form % (len(stream), stream) + b"trailer")
    with pytest.raises(MediaError, match="'SimSun', which is not embedded, and no installed font"):
        decoded(page)
    save_fonts(tmp_path / "some.ttf", font_of(CHINESE, "Some"))
    use_fonts(tmp_path)
    assert ink(page) > 0.02


def test_a_dynamic_form_is_refused() -> None:
    """Its only page asks for another viewer. The fields are made by a program in the XFA."""
    page = simple_pdf("(Please wait)", "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    dynamic = page.replace(b"/Catalog", b"/Catalog/NeedsRendering true/AcroForm<</Fields[]/XFA(x)>>")
    with pytest.raises(MediaError, match=r"XFA form.* print it to a PDF"):
        decoded(dynamic)
    assert ink(page.replace(b"/Catalog", b"/Catalog/AcroForm<</Fields[]/XFA(x)>>")) > 0


def test_broken_font_files_are_left_out(tmp_path: Path) -> None:
    save_fonts(tmp_path / "good.ttf", font_of(CHINESE, "Good"))
    good = (tmp_path / "good.ttf").read_bytes()
    for size in (0, 3, 50, 200, len(good) // 2):
        (tmp_path / f"cut{size}.ttf").write_bytes(good[:size])
    (tmp_path / "noise.otf").write_bytes(bytes(range(256)) * 9)
    assert {name for face in find_faces([tmp_path]) for name in face.names} == {"good"}


def test_a_decoder_draws_with_fonts_that_were_found_before_it_was_locked_in(tmp_path: Path) -> None:
    save_fonts(tmp_path / "some.ttf", font_of(CHINESE, "Some"))
    command = [sys.executable, "-m", "tests.lockdown.drawing", str(tmp_path)]
    done = subprocess.run(command, input=INVOICE, capture_output=True, check=True, cwd=ROOT)
    pixels, locks = pickle.loads(done.stdout)
    assert "sandboxed" in locks
    assert (pixels < 128).mean() > 0.04
