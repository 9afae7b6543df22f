"""Which tokens an answer's text is made of: a stop string, or what begins one, is cut from the text and from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from mindie_mm.engine.detokenizer import TextStream
from mindie_mm.engine.messages import TokenLogprob
from mindie_mm.engine.worker import Answer, Delta
from service.token_text import in_turns, token_bytes


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens of a part of an answer's text, with their log-probabilities."""

    logprobs: Sequence[TokenLogprob]
    cut: int | None = None
    """Bytes of the last of them that are in the text, where a stop string begins within it; None: all."""


class ToldLogprobs:
    """Tells of each token once its text is told, which may yet turn out to belong to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Without stop strings nothing is held back."""
        self._tokenizer = tokenizer
        self._holds = bool(stop)
        self._stream = TextStream(tokenizer)
        self._text = ""
        """Of all tokens."""
        self._num_told = 0
        """Characters of it that were told."""
        self._waiting: list[TokenLogprob] = []
        self._stops: list[int] = []
        """Where the text of each that waits ends; of the last ones, whose character has not ended, it is not known."""

    async def push(self, part: Delta | Answer) -> Told:
        """Return what is told with a further part of the answer, or with all of it."""
        logprobs = part.logprobs or []
        if not self._holds:
            return Told(logprobs)
        self._num_told += len(part.text)
        async for some in in_turns(logprobs, 4):
            for one in some:
                self._push(one)
        if part.finish_reason is None:
            return Told(self._take(sum(stop <= self._num_told for stop in self._stops)))
        if self._num_told < len(self._text):  # what is not decoded yet comes behind the cut
            del self._waiting[len(self._stops) :]
        else:
            self._text += self._stream.flush()
        return self._last()

    def _push(self, logprob: TokenLogprob) -> None:
        self._waiting.append(logprob)
        if piece := self._stream.push(logprob.token_id):
            self._text += piece
            self._stops += [len(self._text)] * (len(self._waiting) - len(self._stops))

    def _take(self, count: int) -> list[TokenLogprob]:
        taken, self._waiting, self._stops = self._waiting[:count], self._waiting[count:], self._stops[count:]
        return taken

    def _last(self) -> Told:
        """Return the rest, less the bytes that were not told. They count from the end: a first blank may be missing."""
        excess, cut = len(self._text[self._num_told :].encode()), None
        if excess and not self._num_told:
            return Told([])
        while excess and self._waiting:
            token_id = self._waiting[-1].token_id
            own = len(token_bytes(self._tokenizer, token_id)) if self._has_text(token_id) else 0
            if own > excess:
                excess, cut = 0, own - excess
            else:
                excess -= own
                self._waiting.pop()
        return Told(self._take(len(self._waiting)), cut)

    def _has_text(self, token_id: int) -> bool:
        """Whether a token is none of the special ones, which answers leave out."""
        return bool(self._tokenizer.decode([token_id], skip_special_tokens=True)) or not self._tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
