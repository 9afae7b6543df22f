"""Answers to PDFium's questions for fonts that a PDF does not embed.

PDFium's own fonts, which look the same on every machine, have Latin letters and symbols. Only for other characters, a
font of the system is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mindie_mm.media.document.fonts import Face, normalized

_PROBES: Mapping[int, str] = {134: "们说这国发", 136: "們說這國發", 128: "あいうアイウ国", 129: "한글이다가"}
"""Frequent characters of Windows' character sets for Chinese (simplified, traditional), Japanese and Korean."""
_MARKS: Mapping[int, str] = {134: "sc", 136: "tc", 128: "jp", 129: "kr"}
"""Endings of the names of fonts that have variants for these languages, such as Noto Sans CJK SC."""
_FALLBACK = "Helvetica"
"""Font that PDFium asks for if a font has no glyph of a character."""
_COLLECTION = int.from_bytes(b"ttcf")
_ANSI = 0
"""Charset of fonts that are not for one language."""
_LATIN = "".join(map(chr, (*range(33, 127), *range(161, 256))))


class FontMapper:
    """Object that chooses faces for PDFium. There is one, and it exists as long as the process."""

    def __init__(self, pdfium: Any, faces: Sequence[Face]) -> None:
        """Register the mapper with PDFium, after PDFium was initialized."""
        self.use(faces)
        self.unmapped: set[str] = set()
        """Names of Chinese, Japanese and Korean fonts without a face on this machine."""
        self._fallback: Face | None = None
        self.replacement: Face | None = None
        """Face that replaces fonts as a whole, instead of PDFium's own fonts."""
        types = dict(pdfium.FPDF_SYSFONTINFO._fields_)
        self._info = pdfium.FPDF_SYSFONTINFO(
            version=1,
            Release=types["Release"](lambda _: None),
            EnumFonts=types["EnumFonts"](lambda *_: None),
            MapFont=types["MapFont"](self._map),
            GetFont=types["GetFont"](lambda *_: None),
            GetFontData=types["GetFontData"](self._data),
            GetFaceName=types["GetFaceName"](self._name),
            GetFontCharset=types["GetFontCharset"](lambda *_: 1),
            DeleteFont=types["DeleteFont"](lambda *_: None),
        )
        pdfium.FPDF_SetSystemFontInfo(self._info)

    def use(self, faces: Sequence[Face]) -> None:
        """Choose among `faces` from now on."""
        self.faces = faces
        self._found: dict[int, Face | None] = {}

    @contextmanager
    def falling_back(self, characters: Collection[str]) -> Iterator[None]:
        """Inside this context, fall back to the face with the largest number of the `characters`.

        If no face has any of them, fall back to PDFium's own font.
        """
        self._fallback = self._with_most(characters)
        try:
            yield
        finally:
            self._fallback = None

    @contextmanager
    def replacing(self, characters: Collection[str]) -> Iterator[None]:
        """Inside this context, load the face with the largest number of the `characters` in place of every font.

        PDFium asks for no fallback for a Type 1 font. Where the font has no glyph, PDFium would draw glyph 0 of the
        replacement, so the caller must check that the replacement has all characters.
        """
        self.replacement = self._with_most(characters)
        try:
            yield
        finally:
            self.replacement = None

    def _with_most(self, characters: Collection[str]) -> Face | None:
        """Return the face with the largest number of the `characters`, or None if no face has any of them.

        If faces are equal in this, prefer the one with more Latin letters.
        """
        best = max(self.faces, key=lambda face: (face.num_of(characters), face.num_of(_LATIN)), default=None)
        return best if best is not None and best.num_of(characters) else None

    def _map(self, _: Any, weight: int, italic: int, charset: int, pitch: int, name: Any, exact: Any) -> int | None:
        """Return the handle of a face: its index plus 1. None lets PDFium use its own fonts."""
        text = ctypes.string_at(name).decode("latin-1")
        face = self._fallback if text == _FALLBACK else None
        if charset == _ANSI and self.replacement is not None:
            face = self.replacement
        if charset in _PROBES:
            face = self._of_charset(charset, text)
            if face is None:
                self.unmapped.add(text)
        return None if face is None else self.faces.index(face) + 1

    def _of_charset(self, charset: int, name: str) -> Face | None:
        """Return a face with the characters of `charset`, preferably the one with this name."""
        if (named := next((face for face in self.faces if normalized(name) in face.names), None)) is not None:
            return named
        if charset not in self._found:
            able = [face for face in self.faces if face.num_of(_PROBES[charset]) == len(_PROBES[charset])]
            mark = _MARKS[charset]
            self._found[charset] = min(able, key=lambda face: not _has_mark(face, mark), default=None)
        return self._found[charset]

    def _data(self, _: Any, handle: int, table: int, buffer: Any, nbytes: int) -> int:
        """Copy a font file to `buffer` if it is large enough. Return the number of bytes.

        PDFium computes the index of a face in a collection from the sizes of the file and of its part from the face on.
        """
        face = self.faces[handle - 1]
        if table not in {0, _COLLECTION} or (table == _COLLECTION and not face.offset):
            return 0
        size = face.nbytes - (0 if table else face.offset)
        if buffer and nbytes:
            ctypes.memmove(buffer, face.address + face.nbytes - size, min(size, nbytes))
        return size

    def _name(self, _: Any, handle: int, buffer: Any, nbytes: int) -> int:
        name = f"face at {self.faces[handle - 1].address + self.faces[handle - 1].offset}".encode() + b"\0"
        if buffer and nbytes >= len(name):
            ctypes.memmove(buffer, name, len(name))
        return len(name)


def _has_mark(face: Face, mark: str) -> bool:
    return any(name.removesuffix("regular").endswith(mark) for name in face.names)
