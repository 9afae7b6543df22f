"""Search for characters of a PDF page that PDFium would leave out, because no font has their glyphs."""

from __future__ import annotations

import ctypes
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from mindie_mm.media.document.fonts import Face, normalized

TEXT, IMAGE, FORM = 1, 3, 5  # FPDF_PAGEOBJ_*
_MAX_DEPTH = 8
"""Maximum nesting depth of form objects."""
_INVISIBLE = frozenset({3, 7})  # text below a scanned page, and clipping paths
_NO_GLYPH = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Cn"})
"""Categories of Unicode characters that are not drawn."""
_FLAT = 0.02
"""Maximum aspect ratio of an empty box. Boxes around dashes have a higher ratio."""
_SYMBOLIC = re.compile(
    r"(symbol|wingdings[23]?|webdings|(?:itc)?zapfdingbats|dingbats|monotypesorts|mtextra|marlett|msoutlook"
    r"|bookshelfsymbol\d?)(?:mt|ps|std|itc|regular|bold|italic|oblique)*"
)
"""Names of fonts whose codes of Latin letters show symbols, as in `normalized`."""
_FIRST_NOT_LATIN = "\u0180"
_IN_SYMBOL = frozenset("!#%&()+,./0123456789:;<=>?[]_{|}¬°±µ·×÷")  # noqa: RUF001
"""Characters of Latin charsets that the font Symbol has."""


def objects(pdfium: Any, page: Any) -> Iterator[tuple[Any, int]]:
    """Yield the objects of a page and of its form objects, with their types."""
    waiting = [(pdfium.FPDFPage_GetObject(page, i), 0) for i in range(pdfium.FPDFPage_CountObjects(page))]
    while waiting:
        item, depth = waiting.pop()
        kind = pdfium.FPDFPageObj_GetType(item)
        if kind == FORM and depth < _MAX_DEPTH:
            count = pdfium.FPDFFormObj_CountObjects(item)
            waiting += [(pdfium.FPDFFormObj_GetObject(item, i), depth + 1) for i in range(count)]
        yield item, kind


def fonts_not_embedded(pdfium: Any, page: Any) -> set[str]:
    """Return the names of the fonts of the page's text that are not embedded."""
    texts = (item for item, kind in objects(pdfium, page) if kind == TEXT)
    return {_name(pdfium, font) for item in texts if (font := _font(pdfium, item)) is not None}


def missing_characters(pdfium: Any, page: Any, replacement: Face | None) -> dict[str, set[str]]:
    """Return the visible characters without a glyph, by the name of their font.

    If the page does not say which characters a font has, the set of the font is empty. `replacement` is the face that
    replaces fonts as a whole.
    """
    missing: dict[str, set[str]] = {}
    texts = pdfium.FPDFText_LoadPage(page)
    if not texts:
        return missing
    try:
        seen = set()
        for index in range(pdfium.FPDFText_CountChars(texts)):
            item = pdfium.FPDFText_GetTextObject(texts, index)
            if not item or (font := _font(pdfium, item)) is None or pdfium.FPDFText_IsGenerated(texts, index) == 1:
                continue
            code, address = pdfium.FPDFText_GetUnicode(texts, index), ctypes.cast(font, ctypes.c_void_p).value
            if (code, address) in seen or pdfium.FPDFTextObj_GetTextRenderMode(item) in _INVISIBLE:
                continue
            seen.add((code, address))
            character, name = chr(code), _name(pdfium, font)
            is_undefined = pdfium.FPDFText_HasUnicodeMapError(texts, index) == 1
            if _is_symbol(name, character, is_undefined=is_undefined):
                missing.setdefault(name, set())
            elif is_undefined:
                # In a font with one byte per character, only codes that no encoding defines have this error. PDFium
                # draws nothing for them. In other fonts, it takes the codes for glyph numbers of the replacement.
                if "!" <= character <= "~" or code > 0xFF or not _is_flat(pdfium, texts, index):
                    missing.setdefault(name, set())
            elif unicodedata.category(character) not in _NO_GLYPH and not _has_glyph(pdfium, font, code, replacement):
                missing.setdefault(name, set()).add(character)
    finally:
        pdfium.FPDFText_ClosePage(texts)
    return missing


def _font(pdfium: Any, text: Any) -> Any:
    """Return the font of a text object, or None if the font is embedded."""
    font = pdfium.FPDFTextObj_GetFont(text)
    return font if font and not pdfium.FPDFFont_GetIsEmbedded(font) else None


def _has_glyph(pdfium: Any, font: Any, code: int, replacement: Face | None) -> bool:
    if replacement is not None and normalized(_family(pdfium, font)) in replacement.names:
        return replacement.num_of(chr(code)) == 1  # glyph 0 may have a path, too
    path = pdfium.FPDFFont_GetGlyphPath(font, code, 1.0)
    return bool(path) and pdfium.FPDFGlyphPath_CountGlyphSegments(path) > 0


def _is_flat(pdfium: Any, texts: Any, index: int) -> bool:
    """Return whether the box around a character has no area, because nothing is drawn."""
    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    pdfium.FPDFText_GetCharBox(texts, index, left, right, bottom, top)
    sides = sorted((abs(right.value - left.value), abs(top.value - bottom.value)))
    return sides[0] <= _FLAT * sides[1]


def _is_symbol(name: str, character: str, *, is_undefined: bool) -> bool:
    """Return whether the font with this name would show a symbol, where PDFium shows a Latin `character` or nothing.

    PDFium has the fonts Symbol and ZapfDingbats. It knows their characters if the PDF declares them as Type 1 fonts.
    """
    font = _SYMBOLIC.fullmatch(normalized(name.rpartition("+")[2]))
    if font is None or not "!" <= character < _FIRST_NOT_LATIN:
        return False
    if font[1] in {"symbol", "zapfdingbats"} and is_undefined:
        return False
    return font[1] != "symbol" or character not in _IN_SYMBOL


def _name(pdfium: Any, font: Any) -> str:
    name = ctypes.create_string_buffer(128)
    pdfium.FPDFFont_GetBaseFontName(font, name, len(name))
    return name.value.decode("utf-8", "replace")


def _family(pdfium: Any, font: Any) -> str:
    """Return the name of the family that PDFium draws a font with."""
    name = ctypes.create_string_buffer(128)
    pdfium.FPDFFont_GetFamilyName(font, name, len(name))
    return name.value.decode("utf-8", "replace")
