"""Pages of documents: of PDFs, and of TIFFs with several pages."""

from __future__ import annotations

from mindie_mm.media.document.pdf import PdfPage
from mindie_mm.media.document.tiff import TiffPage, is_tiff

DocumentPage = PdfPage | TiffPage


def page_of_document(data: bytes, index: int) -> DocumentPage:
    """Read the page `index` of a document. The first page has index 0.

    Raises:
        MediaError: The data are not a document, or the document is encrypted or broken.

    """
    return TiffPage.open(data, index) if is_tiff(data) else PdfPage.open(data, index)
