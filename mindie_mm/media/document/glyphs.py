"""Search for characters of a PDF page that PDFium would leave out, because no font has their glyphs."""

from __future__ import annotations

import ctypes
import unicodedata
from collections.abc import Iterator
from typing import Any

TEXT, IMAGE, FORM = 1, 3, 5  # FPDF_PAGEOBJ_*
_MAX_DEPTH = 8
"""Maximum nesting depth of form objects."""
_INVISIBLE = frozenset({3, 7})  # text below a scanned page, and clipping paths
_NO_GLYPH = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Cn"})
"""Categories of Unicode characters that are not drawn."""


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


def missing_characters(pdfium: Any, page: Any) -> dict[str, set[str]]:
    """Return the visible characters without a glyph, by the name of their font.

    If the page does not say which characters a font has, the set of the font is empty.
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
            character = chr(code)
            if pdfium.FPDFText_HasUnicodeMapError(texts, index) == 1:
                # In a font with one byte per character, only codes that no encoding defines have this error.
                if "!" <= character <= "~" or code > 0xFF:
                    missing.setdefault(_name(pdfium, font), set())
            elif unicodedata.category(character) not in _NO_GLYPH and not _has_glyph(pdfium, font, code):
                missing.setdefault(_name(pdfium, font), set()).add(character)
    finally:
        pdfium.FPDFText_ClosePage(texts)
    return missing


def _font(pdfium: Any, text: Any) -> Any:
    """Return the font of a text object, or None if the font is embedded."""
    font = pdfium.FPDFTextObj_GetFont(text)
    return font if font and not pdfium.FPDFFont_GetIsEmbedded(font) else None


def _has_glyph(pdfium: Any, font: Any, code: int) -> bool:
    path = pdfium.FPDFFont_GetGlyphPath(font, code, 1.0)
    return bool(path) and pdfium.FPDFGlyphPath_CountGlyphSegments(path) > 0


def _name(pdfium: Any, font: Any) -> str:
    name = ctypes.create_string_buffer(128)
    pdfium.FPDFFont_GetBaseFontName(font, name, len(name))
    return name.value.decode("utf-8", "replace")
