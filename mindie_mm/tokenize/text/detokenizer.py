"""From token ids to text, as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer

from mindie_mm.nn.checkpoint.directory import Checkpoint

_UNFINISHED = 64
"""Tokens without text of their own after which none is waited for any longer; a character has 4 bytes."""


class TextStream:
    """Token ids as text, as they come; what is told is never taken back.

    A token is decoded behind those of the piece before it, for its text may hang on them: a blank at a text's beginning
    is left out, several bytes are one character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._last: list[int] = []  # the ids of the last piece
        self._last_text = ""  # their text
        self._behind: list[int] = []  # those that have given no text yet

    def push(self, token_id: int) -> str:
        """What is certain with this further token: nothing with a special one, or before a character's end."""
        self._behind.append(token_id)
        text = self._decoded([*self._last, *self._behind])
        # More would be decoded anew with each that follows.
        if len(self._behind) <= _UNFINISHED and (len(text) <= len(self._last_text) or text.endswith("\ufffd")):
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """The rest, once no token follows: bytes that form no whole character become U+FFFD, as in one decode."""
        return self._tell(self._decoded([*self._last, *self._behind]))

    def _tell(self, text: str) -> str:
        """The new piece of `text`, which that of the last piece begins."""
        # Where it does not, a byte has spoilt a character that was told.
        piece = text[len(self._last_text) :] if text.startswith(self._last_text) else self._decoded(self._behind)
        if piece:
            self._last = self._behind
            self._last_text = self._decoded(self._last)
        self._behind = []
        return piece

    def _decoded(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
        return text


class Detokenizer:
    """One request's output as text. Text that may yet begin a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._stream = TextStream(tokenizer)
        self._min_tokens = min_tokens
        self._stop = stop
        self._num_tokens = 0
        self._text = ""
        self._emitted = 0
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    def push(self, token_ids: list[int]) -> str:
        """Text that is certain with these further tokens; nothing after a stop string."""
        for token_id in token_ids:
            self._num_tokens += 1
            if piece := self._stream.push(token_id):
                self._append(piece)
        return self._emit(self._certain())

    def flush(self) -> str:
        """The rest, once no token follows."""
        self._append(self._stream.flush())
        return self._emit(len(self._text))

    def _append(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        before = len(self._text)
        self._text += piece
        # Those that end in the piece: one that came before `min_tokens` ends nothing later.
        places = ((self._text.find(text, max(0, before - len(text) + 1)), text) for text in self._stop)
        hits = [(at, text) for at, text in places if at >= 0]
        if hits and self._num_tokens >= self._min_tokens:
            at, self.stopped_by = min(hits)
            self._text = self._text[:at]

    def _certain(self) -> int:
        """Where the longest tail of the text begins that begins a stop string, too; the text's end if none does."""
        text = self._text
        if self.stopped_by is None:
            # A place that is none stays none, so each is tried until it is passed, and the first one again.
            for start in range(self._emitted, len(text)):
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stop):
                    return start
        return len(text)

    def _emit(self, stop: int) -> str:
        text = self._text[self._emitted : stop]
        self._emitted = max(self._emitted, stop)
        return text


def load_tokenizer(checkpoint: Checkpoint, family: str | None = None, shown_tokens: Collection[str] = ()) -> Tokenizer:
    """The checkpoint's tokenizer, for decoding; `family` as in `family_of`. UnsupportedCheckpoint.

    `shown_tokens` are those of its special tokens that answers show.
    """
    file = checkpoint.path / "tokenizer.json"
    if file.is_file():
        if not shown_tokens:
            return Tokenizer.from_file(str(file))
        stated = {token["content"] for token in checkpoint.json("tokenizer.json").get("added_tokens", ())}
        if stated.issuperset(shown_tokens):
            return checkpoint.tokenizer(lambda token: token["special"] and token["content"] not in shown_tokens)
    # Late: only checkpoints whose tokenizer.json does not have all tokens pay for torch, and for the conversion.
    from mindie_mm.models import family_of

    converted: Tokenizer = family_of(checkpoint, family).tokenizer(checkpoint).backend_tokenizer
    return converted
