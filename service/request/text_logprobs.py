"""Log-probabilities of the tokens in an answer's text.

A stop string is cut from the text, and so are its tokens. Tokens whose text may begin a stop string are held back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.tokenize.text.detokenizer import TextStream
from mindie_mm.worker.worker import Answer, Delta
from service.request.token_text import in_turns, token_bytes


@dataclass(frozen=True, slots=True)
class ReleasedLogprobs:
    """Log-probabilities of the tokens in a part of an answer's text."""

    logprobs: Sequence[TokenLogprob]
    cut: int | None = None
    """Number of bytes of the last token in the text, if a stop string begins within that token. None: all of them."""


class LogprobsBuffer:
    """A buffer that releases each token with its text. Unreleased text may turn out to belong to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], silent: Collection[int] | None = None) -> None:
        """Create a buffer. Without stop strings it holds nothing back. `silent` is as in `TextStream`."""
        self._tokenizer = tokenizer
        self._holds = bool(stop)
        self._stream = TextStream(tokenizer, silent=silent)
        self._silent = silent
        self._text = ""
        """Text of all tokens so far."""
        self._num_released = 0
        """Number of characters of this text that were released."""
        self._waiting: list[TokenLogprob] = []
        self._stops: list[int] = []
        """Offset in characters at which the text of each waiting token ends. The last tokens have no offset while
        their character is incomplete."""

    async def push(self, part: Delta | Answer) -> ReleasedLogprobs:
        """Return the log-probabilities to send with the next part of the answer, or with the whole answer."""
        logprobs = part.logprobs or []
        if not self._holds:
            return ReleasedLogprobs(logprobs)
        self._num_released += len(part.text)
        async for some in in_turns(logprobs, 4):
            for one in some:
                self._push(one)
        if part.finish_reason is None:
            return ReleasedLogprobs(self._take(sum(stop <= self._num_released for stop in self._stops)))
        if self._num_released < len(self._text):  # tokens without decoded text lie behind the cut
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

    def _last(self) -> ReleasedLogprobs:
        """Return the waiting tokens without the bytes that the text lacks.

        Bytes are counted from the end, because the text may lack the blank at the beginning.
        """
        excess, cut = len(self._text[self._num_released :].encode()), None
        if excess and not self._num_released:
            return ReleasedLogprobs([])
        while excess and self._waiting:
            token_id = self._waiting[-1].token_id
            own = len(token_bytes(self._tokenizer, token_id)) if self._has_text(token_id) else 0
            if own > excess:
                excess, cut = 0, own - excess
            else:
                excess -= own
                self._waiting.pop()
        return ReleasedLogprobs(self._take(len(self._waiting)), cut)

    def _has_text(self, token_id: int) -> bool:
        """Return whether a token is in the text. Special tokens are not."""
        if self._silent is not None:
            return token_id not in self._silent
        return bool(self._tokenizer.decode([token_id], skip_special_tokens=True)) or not self._tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
