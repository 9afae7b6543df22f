"""Beam search, which finds the outputs with the highest log-probability instead of drawing tokens.

The algorithm follows vLLM 0.33 (`vllm/entrypoints/generate/beam_search/online.py`). In each step, the `2 * beam_width`
most likely next tokens of each beam are candidates. Each candidate that is an end-of-sequence token ends a beam. Among
the other candidates, the `beam_width` with the highest total log-probability are the beams of the next step. At the
end, outputs are ranked by their total log-probability divided by `num_tokens ** length_penalty`, without the prompt.

In `generate(num_beams=...)` of transformers, a beam ends only if its end-of-sequence token is one of the `beam_width`
best candidates, and the search may end before `max_tokens`. With `ignore_eos`, both searches return the same outputs.

In each step, the engine gets a request for one token per beam. Most KV blocks of these requests are in the prefix
cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, fields
from heapq import nlargest
from operator import itemgetter
from typing import Any

import msgspec

from mindie_mm.engine.requests.engine_messages import FinishReason, Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import ALL_TOKENS, MAX_LOGPROBS, SamplingParams
from mindie_mm.errors import ContextLengthExceeded, InputError
from mindie_mm.inputs import shown
from mindie_mm.processes.tasks import gather
from mindie_mm.settings.limits import python_number
from mindie_mm.tokenize.text.detokenizer import StopScope
from mindie_mm.worker.deltas import Answer, OutputText
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Worker

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Settings of a beam search."""

    beam_width: int
    """Number of beams and of outputs, in [1, 10]."""
    max_tokens: int
    """Maximum number of tokens to generate, at least 1."""
    ignore_eos: bool = False
    """Whether to generate past the end-of-sequence token."""
    temperature: float = 0.0
    """Has no effect, as in vLLM, because a beam search uses log-probabilities before the temperature is applied."""
    length_penalty: float = 1.0
    """Exponent of the number of tokens, in [-10, 10]. Outputs are ranked by their total log-probability divided by
    `num_tokens ** length_penalty`, so a positive exponent favors long outputs."""
    include_stop_str_in_output: bool = False
    """True if the text includes the special token that ends the output. Needs `skip_special_tokens=False`."""
    skip_special_tokens: bool = True
    """Whether to leave special tokens out of the output's text."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "temperature", "length_penalty"):
            object.__setattr__(self, name, python_number(getattr(self, name)))

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """Convert the settings to `SamplingParams` that request the log-probabilities of all candidates.

        Raise InputError if a setting is invalid.
        """
        check_beams(self.beam_width, self.length_penalty, self.max_tokens, name="beam_width")
        shared = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name in SamplingParams.__struct_fields__
        }
        return SamplingParams(**shared, logprobs=2 * self.beam_width).check(vocab_size)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One output of a beam search."""

    text: str
    tokens: list[int]
    """Generated tokens. In contrast to vLLM, `tokens` and `text` do not include the prompt."""
    cum_logprob: float
    """Sum of the log-probabilities of the tokens."""
    logprobs: list[TokenLogprob]
    """Log-probabilities of each token and of the most likely tokens at its position."""
    finish_reason: FinishReason
    cached_tokens: int
    """Number of prompt tokens that were in the prefix cache."""
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The outputs of a beam search for one prompt."""

    sequences: list[BeamSearchSequence]
    """The `beam_width` best outputs, best first."""


@dataclass(frozen=True, slots=True)
class _Beam:
    """A continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cum_logprob: float = 0.0
    finish_reason: FinishReason = "length"

    def extended(self, token: TokenLogprob, reason: FinishReason) -> _Beam:
        return _Beam(
            (*self.token_ids, token.token_id), (*self.logprobs, token), self.cum_logprob + token.logprob, reason
        )


def check_beams(width: Any, length_penalty: Any, max_tokens: Any, *, name: str) -> None:
    """Raise InputError if a setting of a beam search is not supported. `name` is the name of the setting `width`."""
    limits = (
        (name, width, (int,), 1, MAX_BEAM_WIDTH),
        ("length_penalty", length_penalty, (int, float), -10, 10),
        ("max_tokens", 1 if max_tokens is None else max_tokens, (int, float), 1, 2**31 - 1),
    )
    for setting, value, types, low, high in limits:
        if type(value) not in types or not low <= value <= high:
            is_number = isinstance(value, int | float)
            found = f"{setting}={shown(value)}" if is_number else f"{setting} is of type {type(value).__name__}; it"
            message = f"{found} must be in [{low}, {high}] for a beam search"
            raise InputError(message, param=setting)


async def beam_search(
    worker: Worker,
    source: PromptSource,
    params: SamplingParams,
    width: int,
    length_penalty: float,
    request_id: str,
    silent: Collection[int] | None = None,
    stop_scope: StopScope | None = None,
) -> list[BeamSearchSequence]:
    """Return the `width` best outputs for a prompt, best first.

    This function raises the same errors as `AsyncEngine.generate`, and the errors below.

    Args:
        worker: Worker that computes the log-probabilities.
        source: Prompt of the request. Its blocks stay in shared memory until the last step.
        params: Settings of the request. Settings for drawing tokens have no effect.
        width: Number of beams, at most `MAX_BEAM_WIDTH`.
        length_penalty: See `BeamSearchParams`.
        request_id: Unique id of the request.
        silent: See `Worker.generate`.
        stop_scope: See `Worker.generate`.

    Raises:
        InputError: The model is an encoder-decoder model, or `params` request a structured output.
        ContextLengthExceeded: The prompt and `max_tokens` do not fit in the context.

    """
    num_steps = _num_steps(worker, len(source.prompt), params)
    source.share(1 + width * (num_steps - 1))  # one answer per beam and step
    eos_token_ids = () if params.ignore_eos else worker.engine.info.eos_token_ids
    wanted = params.logprobs or 0
    num_top = ALL_TOKENS if wanted == ALL_TOKENS else max(2 * width, wanted)
    step = SamplingParams(
        max_tokens=1,
        temperature=0,
        logprobs=num_top,
        cache_salt=params.cache_salt,
        priority=params.priority,
        lora=params.lora,
    )

    def score(beam: _Beam) -> float:
        return beam.cum_logprob / math.pow(len(beam.token_ids), length_penalty)

    beams, ended, first, began_s = [_Beam()], list[_Beam](), Answer(), 0.0
    for number in range(num_steps):
        steps = [
            worker.generate_whole(source, step, f"{request_id}-{number}-{index}", written=beam.token_ids)
            for index, beam in enumerate(beams)
        ]
        answers = await gather(steps)
        if number == 0:
            (first,), began_s = answers, time.monotonic()
        found: dict[bool, list[tuple[float, _Beam, TokenLogprob]]] = {False: [], True: []}
        for beam, answer in zip(beams, answers, strict=True):
            top = answer.logprobs[0].top
            kept = top if wanted == ALL_TOKENS else top[:wanted]
            for token, logprob in top[: 2 * width]:
                candidate = beam.cum_logprob + logprob, beam, TokenLogprob(token, logprob, kept)
                found[token in eos_token_ids].append(candidate)
        new = [beam.extended(token, "stop") for _, beam, token in nlargest(width, found[True], key=itemgetter(0))]
        ended = nlargest(width, [*ended, *new], key=score)
        beams = [beam.extended(token, "length") for _, beam, token in nlargest(width, found[False], key=itemgetter(0))]
    timings = first.timings and msgspec.structs.replace(first.timings, decode_s=time.monotonic() - began_s)
    return [
        BeamSearchSequence(
            OutputText(worker.tokenizer, params, silent, stop_scope).whole(beam.token_ids, beam.finish_reason),
            [*beam.token_ids],
            beam.cum_logprob,
            [*beam.logprobs],
            beam.finish_reason,
            first.cached_tokens,
            timings,
        )
        for beam in nlargest(width, [*ended, *beams], key=score)
    ]


def _num_steps(worker: Worker, num_prompt: int, params: SamplingParams) -> int:
    info = worker.engine.info
    if info.max_output_len is not None:
        raise InputError("beam search is not supported for encoder-decoder models", param="use_beam_search")
    if params.structure is not None:
        raise InputError(f"beam search cannot be used with {params.structure.noun}; leave one of them out")
    if num_prompt > worker.prompt_room(params):
        detail = f"the prompt has {num_prompt} tokens and the request needs {params.least_room} output tokens"
        raise ContextLengthExceeded.of(info.max_model_len, detail)
    return params.most_tokens(info.max_model_len - num_prompt)
