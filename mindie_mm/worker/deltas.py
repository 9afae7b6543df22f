"""The output of a request: the additions to it, and the whole of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from mindie_mm.engine.requests.engine_messages import FinishReason, Progress, Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.tokenize.text.detokenizer import Detokenizer, StopScope, is_skipped


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to a request's output."""

    text: str
    """New text, without stop strings. Text that may be the beginning of a stop string is held back."""
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token, if the request asked for them."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each prompt token except the first, if the request asked for them. Only the first delta has
    them."""
    cached_tokens: int | None = None
    """Number of prompt tokens that were in the prefix cache. Only the first delta has it."""
    finish_reason: FinishReason | None = None
    """Reason why generation ended. Only the last delta has it."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the output. It is None if the output ended for another reason, such as
    the end-of-sequence token."""
    timings: Timings | None = None
    """Times up to this delta."""
    pooled: bytes = b""
    """See `Progress.pooled`."""


@dataclass(slots=True)
class Answer:
    """The output of a request so far, accumulated from its deltas."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    timings: Timings | None = None
    pooled: bytes = b""

    def add(self, delta: Delta) -> None:
        """Append `delta`."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs += delta.prompt_logprobs or []
        self.cached_tokens += delta.cached_tokens or 0
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.timings = delta.timings or self.timings
        self.pooled = delta.pooled or self.pooled

    @property
    def text(self) -> str:
        """Text of all deltas."""
        return "".join(self.texts)


class OutputText:
    """Turns the engine's progress with one request into additions to the output, up to a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        silent: Collection[int] | None = None,
        stop_scope: StopScope | None = None,
    ) -> None:
        """Create the text of one output. `silent` and `stop_scope` have the same meaning as in `Worker.generate`."""
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            params.stop,
            params.min_tokens,
            silent,
            include_stop_str_in_output=params.include_stop_str_in_output,
            scope=stop_scope,
            **params.text_options,
        )

    def read(self, step: Progress) -> Delta | None:
        """Return the addition to the output, or None if there is none. No step may follow a finish reason."""
        if not step.token_ids and step.finish_reason is None:
            return None
        shown_ids = self._shown(step.token_ids, step.finish_reason)
        text = self._detokenizer.push(shown_ids)
        num_tokens, reason = len(step.token_ids), step.finish_reason
        if (stopped_by := self._detokenizer.stopped_by) is not None:
            # The engine does not know stop strings, so it may have generated more tokens.
            num_tokens, reason = len(shown_ids) - self._detokenizer.num_dropped, "stop"
        if reason is not None:
            text += self._detokenizer.flush()
        return Delta(
            text=text,
            token_ids=step.token_ids[:num_tokens],
            logprobs=None if step.logprobs is None else step.logprobs[:num_tokens],
            prompt_logprobs=step.prompt_logprobs,
            cached_tokens=step.cached_tokens,
            finish_reason=reason,
            stop_reason=step.stop_token_id if stopped_by is None else stopped_by,
            timings=step.timings,
            pooled=step.pooled,
        )

    def whole(self, token_ids: Sequence[int], finish_reason: FinishReason) -> str:
        """Return the text of a whole output."""
        return self._detokenizer.push(self._shown([*token_ids], finish_reason)) + self._detokenizer.flush()

    def _shown(self, token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
        """Return the tokens that are part of the text. By default, a stop token is not part of it."""
        if finish_reason == "stop" and token_ids and is_hidden_end(self._tokenizer, token_ids[-1], self._params):
            return token_ids[:-1]
        return token_ids


def is_hidden_end(tokenizer: Tokenizer, token: int, params: SamplingParams) -> bool:
    """Return whether the token that ends an output must be removed from the text, as in vLLM.

    If `skip_special_tokens` is set, special tokens produce no text anyway.
    """
    if params.include_stop_str_in_output:
        return False
    is_silent = params.skip_special_tokens and is_skipped(tokenizer, token)
    return token in params.stop_token_ids or not is_silent
