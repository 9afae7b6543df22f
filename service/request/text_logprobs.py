"""Log-probabilities of the tokens in an answer's text.

A stop string is removed from the text, and its tokens are removed from the log-probabilities. Tokens are held back
while their text may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.tokenize.text.detokenizer import TextStream, is_skipped
from mindie_mm.worker.deltas import Answer, Delta, is_hidden_end
from service.request.token_text import in_turns, token_bytes


@dataclass(frozen=True, slots=True)
class ReleasedLogprobs:
    """Log-probabilities of the tokens in a part of an answer's text."""

    logprobs: Sequence[TokenLogprob]
    cut: int | None = None
    """Number of bytes of the last token that are in the text, if a stop string begins in it. None: all bytes."""


class LogprobsBuffer:
    """A buffer that releases the log-probability of each token together with the token's text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, silent: Collection[int] | None = None) -> None:
        """Create a buffer. Without stop strings, nothing is held back.

        `silent` has the same meaning as in `TextStream`.
        """
        self._tokenizer = tokenizer
        self._params = params
        self._silent = silent
        self._holds = bool(params.stop)
        self._stream = TextStream(tokenizer, **params.text_options, silent=silent)
        self._text = ""
        """Text of all tokens so far."""
        self._num_released = 0
        """Number of characters of `_text` that have been released."""
        self._waiting: list[TokenLogprob] = []
        self._stops: list[int] = []
        """Offset in `_text` at which the text of each waiting token ends. The last tokens have no offset while their
        character is incomplete."""

    async def push(self, part: Delta | Answer) -> ReleasedLogprobs:
        """Return the log-probabilities to send with the next part of the answer, or with the whole answer."""
        logprobs = part.logprobs or []
        if not self._holds:
            return ReleasedLogprobs(logprobs)
        self._num_released += len(part.text)
        hidden: Sequence[TokenLogprob] = []
        if self._hides_last(part):
            logprobs, hidden = logprobs[:-1], logprobs[-1:]
        async for some in in_turns(logprobs, 4):
            for one in some:
                self._push(one)
        if part.finish_reason is None:
            return ReleasedLogprobs(self._take(sum(stop <= self._num_released for stop in self._stops)))
        if self._num_released < len(self._text):  # tokens without decoded text come after the stop
            del self._waiting[len(self._stops) :]
        else:
            self._text += self._stream.flush()
        last = self._last()
        return ReleasedLogprobs([*last.logprobs, *hidden], last.cut)

    def _hides_last(self, part: Delta | Answer) -> bool:
        """Return whether the token that ends the output was removed from the text."""
        ends = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
        if not (ends and part.logprobs):
            return False
        return is_hidden_end(self._tokenizer, part.logprobs[-1].token_id, self._params)

    def _push(self, logprob: TokenLogprob) -> None:
        self._waiting.append(logprob)
        if piece := self._stream.push(logprob.token_id):
            self._text += piece
            self._stops += [len(self._text)] * (len(self._waiting) - len(self._stops))

    def _take(self, count: int) -> list[TokenLogprob]:
        taken, self._waiting, self._stops = self._waiting[:count], self._waiting[count:], self._stops[count:]
        return taken

    def _last(self) -> ReleasedLogprobs:
        """Return the waiting tokens without the bytes of the removed stop string.

        Bytes are counted from the end, because the leading space of the first token may be missing in the text.
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
        if self._silent is not None:
            return token_id not in self._silent
        return not self._params.skip_special_tokens or not is_skipped(self._tokenizer, token_id)
