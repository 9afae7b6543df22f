"""Pages of PDFs as images, rendered by PDFium.

PDFium is built without JavaScript and XFA. It runs no actions of a PDF, and fetches no files or URLs that a PDF refers
to. Fonts that are not embedded are replaced by PDFium's built-in fonts, so a page looks the same on every machine. For
characters that these fonts do not have, fonts of the system are used.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.document.font_mapper import FontMapper
from mindie_mm.media.document.fonts import find_faces
from mindie_mm.media.document.glyphs import IMAGE, fonts_not_embedded, missing_characters, objects
from mindie_mm.media.guard.caps import add_image, caps, check_pixels

DPI = 144
"""Resolution of a rendered page in dots per inch.

If a page would have more pixels than `max_pdf_page_pixels`, it is rendered at a lower resolution.
"""
_POINTS_PER_INCH = 72
_PASSWORD, _SECURITY = 4, 5  # FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY
_XFA_FULL = 2  # FORMTYPE_XFA_FULL
_RGB = 2  # FPDFBitmap_BGR, with the bytes in the reverse order
_FLAGS = 0x01 | 0x10  # FPDF_ANNOT, FPDF_REVERSE_BYTE_ORDER
_FONT_PACKAGE = "fonts-wqy-microhei"
_SHOWN = 20
_lock = threading.RLock()
"""Lock that guards all use of PDFium, which has global state and is not thread-safe."""


@dataclass(frozen=True, slots=True, eq=False)
class PdfPage:
    """A page whose size has been read. It is not rendered yet. The class has the same interface as EncodedImage."""

    data: bytes
    """The PDF."""
    index: int
    """Index of the page. The first page has index 0."""
    height: int
    """Height in pixels."""
    width: int
    """Width in pixels."""
    num_pages: int
    """Number of pages of the PDF."""
    max_pixels: int
    """Maximum number of pixels of all images on the page (`max_request_pixels`)."""

    @classmethod
    def open(cls, data: bytes, index: int) -> PdfPage:
        """Read the size of a page.

        Raises:
            MediaError: The data are not a PDF, or the PDF is encrypted or broken.

        """
        with _document(data) as document:
            num_pages = _pdfium().FPDF_GetPageCount(document)
            size = _pdfium().FS_SIZEF()
            if not _pdfium().FPDF_GetPageSizeByIndexF(document, index, ctypes.byref(size)):
                raise MediaError(f"page {index + 1} of the PDF is broken")
        points = size.width * size.height
        if not (math.isfinite(points) and size.width > 0 and size.height > 0):
            raise MediaError(f"page {index + 1} of the PDF has no valid size")
        scale = min(DPI / _POINTS_PER_INCH, math.sqrt(caps().max_pdf_page_pixels / points))
        width, height = (max(1, int(side * scale)) for side in (size.width, size.height))
        return cls(data, index, height, width, num_pages, caps().max_request_pixels)

    @property
    def settings(self) -> str:
        """Index and size of the page, as a string. Together with `data`, they determine the pixels."""
        return f"page {self.index} of a PDF at {self.width}x{self.height}"

    def decode(self) -> NDArray[np.uint8]:
        """Return RGB pixels, uint8 [height, width, 3].

        Raises:
            MediaError: The page is broken, or no font has some of its characters.
            LimitExceeded: The images on the page have too many pixels.

        """
        with _lock:
            mapper, characters = _mapper(), set[str]()
            pixels, missing = self._rendered(characters)
            if missing and all(missing.values()):
                characters = set().union(*missing.values())
                pixels, missing = self._rendered(characters)
            if missing and all(missing.values()):
                with mapper.replacing(characters):
                    pixels, missing = self._rendered(characters)
        if missing:
            raise self._font_error(missing)
        return pixels

    def _rendered(self, characters: set[str]) -> tuple[NDArray[np.uint8], dict[str, set[str]]]:
        """Render the page, with a font of the system for `characters` that other fonts do not have.

        If glyphs are missing, do not render the page. Return the missing characters by the name of their font.
        """
        pdfium, mapper = _pdfium(), _mapper()
        mapper.unmapped.clear()
        pixels = np.full((self.height, self.width, 3), 255, np.uint8)
        with _document(self.data) as document, _page(document, self.index) as page, _forms(document) as forms:
            _check_images(page, self.max_pixels)
            if names := fonts_not_embedded(pdfium, page):
                # PDFium asks for a fallback font when the first glyph is missing, and keeps it with the document.
                with mapper.falling_back(characters):
                    missing = missing_characters(pdfium, page, mapper.replacement)
                if missing:
                    return pixels, missing
            bitmap = pdfium.FPDFBitmap_CreateEx(self.width, self.height, _RGB, pixels.ctypes.data, 3 * self.width)
            if not bitmap:
                raise MediaError(f"page {self.index + 1} of the PDF cannot be rendered")
            try:
                place = (0, 0, self.width, self.height, 0, _FLAGS)
                pdfium.FPDF_RenderPageBitmap(bitmap, page, *place)
                if forms:
                    pdfium.FPDF_FFLDraw(forms, bitmap, page, *place)
            finally:
                pdfium.FPDFBitmap_Destroy(bitmap)
        # Text of the page has been checked. Fonts that it does not use belong to annotations and form fields.
        if others := [name for name in mapper.unmapped if not any(name in own for own in names)]:
            raise self._font_error({name: {""} for name in others})
        return pixels, {}

    def _font_error(self, missing: dict[str, set[str]]) -> MediaError:
        where = f"page {self.index + 1} of the PDF"
        unstated = sorted(repr(name) for name, found in missing.items() if not found)
        names = ", ".join(unstated or sorted(map(repr, missing)))
        if unstated:
            return MediaError(
                f"{where} uses the font {names}, which is not embedded, and does not state which characters it shows; "
                "embed the font"
            )
        characters = "".join(sorted(set().union(*missing.values())))[:_SHOWN]
        shown = f" ({characters})" if characters else ""
        return MediaError(
            f"{where} uses the font {names}, which is not embedded, and no installed font has all of its "
            f"characters{shown}; embed the font in the PDF, or install a font with these characters where decoders "
            f"run, such as the package {_FONT_PACKAGE} for Chinese, Japanese and Korean"
        )


def open_page(page: PdfPage) -> PdfPage:
    """Count the pixels of `page` and return it. Raise LimitExceeded if the page or the request has too many pixels."""
    add_image(page.width, page.height)
    return page


@cache
def _pdfium() -> Any:
    """Return the PDFium library, initialized without a search for fonts, which would open files while it renders."""
    import pypdfium2_raw  # late, because it loads a library of 8 MB that only decoders need

    no_fonts = (ctypes.POINTER(ctypes.c_char) * 1)()
    config = pypdfium2_raw.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=no_fonts)
    pypdfium2_raw.FPDF_InitLibraryWithConfig(config)
    return pypdfium2_raw


@cache
def _mapper() -> FontMapper:
    return FontMapper(_pdfium(), find_faces())


@contextmanager
def _document(data: bytes) -> Iterator[Any]:
    """Open a PDF, as a context manager that holds the lock. Raise MediaError if the PDF cannot be opened."""
    with _lock:
        pdfium = _pdfium()
        document = pdfium.FPDF_LoadMemDocument64(data, len(data), None)
        if not document:
            if pdfium.FPDF_GetLastError() in {_PASSWORD, _SECURITY}:
                raise MediaError("the PDF is encrypted; send a PDF without a password")
            raise MediaError(f"the PDF of {len(data)} bytes cannot be read; it may be truncated or damaged")
        try:
            yield document
        finally:
            pdfium.FPDF_CloseDocument(document)


@contextmanager
def _page(document: Any, index: int) -> Iterator[Any]:
    page = _pdfium().FPDF_LoadPage(document, index)
    if not page:
        raise MediaError(f"page {index + 1} of the PDF is broken")
    try:
        yield page
    finally:
        _pdfium().FPDF_ClosePage(page)


@contextmanager
def _forms(document: Any) -> Iterator[Any]:
    """Open the form fields of a document, so that they can be drawn with their values.

    The environment has no callbacks, so no action of the document runs.

    Yields:
        The environment, or None if the document has no form fields.

    """
    pdfium = _pdfium()
    if not (kind := pdfium.FPDF_GetFormType(document)):
        yield None
        return
    if kind == _XFA_FULL:
        raise MediaError("the PDF is an XFA form, whose pages are made by a program inside it; print it to a PDF first")
    callbacks = pdfium.FPDF_FORMFILLINFO(version=2)
    forms = pdfium.FPDFDOC_InitFormFillEnvironment(document, callbacks)
    try:
        yield forms
    finally:
        if forms:
            pdfium.FPDFDOC_ExitFormFillEnvironment(forms)


def _check_images(page: Any, max_pixels: int) -> None:
    """Raise LimitExceeded if an image on a page has too many pixels, or if all have more than `max_pixels`."""
    pdfium, total = _pdfium(), 0
    width, height = ctypes.c_uint(), ctypes.c_uint()
    for item, kind in objects(pdfium, page):
        if kind == IMAGE and pdfium.FPDFImageObj_GetImagePixelSize(item, width, height):
            check_pixels(width.value, height.value)
            total += width.value * height.value
            if total > max_pixels:
                raise LimitExceeded(
                    f"the images on a page of the PDF have {total} pixels or more; the limit is {max_pixels} "
                    "(--max-request-pixels)"
                )
