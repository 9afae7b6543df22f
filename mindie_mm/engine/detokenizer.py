"""From token ids to text, as they come, up to a stop string."""

from __future__ import annotations

import json
from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mindie_mm.nn.checkpoint import Checkpoint


class Detokenizer:
    """One request's output as text. Text that may yet begin a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        self._text = ""
        self._behind = 0  # the first id behind the last piece
        self._anew = 0, 0  # the first id, and the first character, of what the stream decodes
        self._emitted = 0
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    def push(self, token_ids: list[int]) -> str:
        """Text that is certain with these further tokens; nothing after a stop string."""
        for token_id in token_ids:
            self._ids.append(token_id)
            if (piece := self._step(token_id)) is not None:
                self._append(piece)
                self._behind = len(self._ids)
        return self._emit(max(self._emitted, len(self._text) - self._hold))

    def flush(self) -> str:
        """The rest, once no token follows: bytes that form no whole character become U+FFFD, as in one decode."""
        if self.stopped_by is None:
            first_id, first = self._anew
            whole, told = self._tokenizer.decode(self._ids[first_id:], skip_special_tokens=True), self._text[first:]
            if whole.startswith(told):
                self._append(whole[len(told) :])
            else:  # the last bytes spoil a character that was told
                self._append(self._tokenizer.decode(self._ids[self._behind :], skip_special_tokens=True))
        return self._emit(len(self._text))

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
        # A byte spoils the character that those before it made. That was told, and what is behind it begins anew.
        self._stream = DecodeStream(skip_special_tokens=True)
        self._anew = self._behind, len(self._text)
        pieces = [self._stream.step(self._tokenizer, one) for one in self._ids[self._behind :]]
        return "".join(piece for piece in pieces if piece)

    def _append(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        searched = max(0, len(self._text) - self._hold)
        self._text += piece
        hits = [(at, text) for text in self._stop if (at := self._text.find(text, searched)) >= 0]
        if hits and len(self._ids) >= self._min_tokens:
            at, self.stopped_by = min(hits)
            self._text = self._text[:at]
            self._hold = 0

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
        described = checkpoint.json("tokenizer.json")
        added = [
            {**token, "special": token["special"] and token["content"] not in shown_tokens}
            for token in described["added_tokens"]
        ]
        return Tokenizer.from_str(json.dumps({**described, "added_tokens": added}))
    # Late: only checkpoints without a tokenizer.json pay for torch, and for the conversion.
    from mindie_mm.models import family_of

    converted: Tokenizer = family_of(checkpoint, family).tokenizer(checkpoint).backend_tokenizer
    return converted
