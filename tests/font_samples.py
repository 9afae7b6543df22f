"""A small font with chosen characters, and PDFs whose fonts are not embedded."""

from __future__ import annotations

import io
from pathlib import Path

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTCollection, TTFont

from tests.media_samples import raw_pdf

CHINESE = "们说这国发票合计"
PAGE = "/MediaBox[0 0 240 80]/Resources<</Font<</F 5 0 R>>>>"


def font_of(characters: str, name: str, *, side: int = 800) -> TTFont:
    """Return a font in which each of `characters` is a square of `side` of 1000 units."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, side), (side, side), (side, 0)):
        pen.lineTo(corner)
    pen.closePath()
    glyphs = dict.fromkeys((f"g{index}" for index in range(len(characters))), pen.glyph())
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *glyphs])
    builder.setupCharacterMap({ord(c): f"g{index}" for index, c in enumerate(characters)})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), **glyphs})
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", *glyphs), (1000, 0)))
    builder.setupHorizontalHeader(ascent=880, descent=-120)
    builder.setupNameTable({"familyName": name, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    return builder.font


def save_fonts(path: Path, *fonts: TTFont) -> None:
    """Write a font, or a collection of several fonts."""
    file = io.BytesIO()
    if len(fonts) == 1:
        fonts[0].save(file)
    else:
        collection = TTCollection()
        collection.fonts = list(fonts)
        collection.save(file, shareTables=False)
    path.write_bytes(file.getvalue())


def cid_pdf(text: str, *, ordering: str = "GB1", encoding: str = "UniGB-UCS2-H", mode: int = 0) -> bytes:
    """Return a PDF with a Chinese, Japanese or Korean text in a font that is not embedded.

    `mode` is the rendering mode of the text. Text of mode 3 is invisible.
    """
    font = (
        f"5 0 obj <</Type/Font/Subtype/Type0/BaseFont/SimSun/Encoding/{encoding}/DescendantFonts[<</Type/Font/Subtype"
        f"/CIDFontType2/BaseFont/SimSun/DW 1000/CIDSystemInfo<</Registry(Adobe)/Ordering({ordering})/Supplement 2>>"
        "/FontDescriptor 6 0 R>>]>> endobj\n6 0 obj <</Type/FontDescriptor/FontName/SimSun/Flags 4/FontBBox"
        "[0 -141 1000 859]/Ascent 859/Descent -141/CapHeight 683/StemV 80/ItalicAngle 0>> endobj\n"
    )
    codec = {"GBK-EUC-H": "gbk", "90ms-RKSJ-H": "cp932"}.get(encoding, "utf-16-be")
    return raw_pdf(PAGE, f"BT {mode} Tr /F 24 Tf 20 30 Td <{text.encode(codec).hex()}> Tj ET", font)


def simple_pdf(text: str, font: str) -> bytes:
    """Return a PDF with the string `text`, in PDF syntax, in a font."""
    return raw_pdf(PAGE, f"BT /F 24 Tf 20 30 Td {text} Tj ET", f"5 0 obj {font} endobj\n")
