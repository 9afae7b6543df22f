"""Draw a PDF in a sandboxed process with the fonts in a folder: `python -m tests.lockdown.drawing FOLDER < PDF`."""

from __future__ import annotations

import pickle
import sys

from mindie_mm.media.document import pdf
from mindie_mm.media.document.fonts import find_faces
from mindie_mm.media.document.pdf import PdfPage
from mindie_mm.media.warm import warm_up
from tests.lockdown.children import in_locked_child
from tools.arguments import parser


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", metavar="FOLDER")
    folder, data = options.parse_args().folder, sys.stdin.buffer.read()
    pdf.find_faces = lambda: find_faces([folder])
    warm_up()
    pixels, noticed = in_locked_child(lambda: PdfPage.open(data, 0).decode())
    sys.stdout.buffer.write(pickle.dumps((pixels, noticed["locks"])))


if __name__ == "__main__":
    main()
