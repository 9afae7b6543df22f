"""The choices of a request, and the parts of an answer that report usage, media spans and timings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NotRequired

import numpy as np
from typing_extensions import TypedDict

from mindie_mm.inputs import Kind
from mindie_mm.shm.format.layout import block_name
from mindie_mm.tokenize.prompt import MediaSpan, Prompt
from mindie_mm.worker.deltas import Answer


@dataclass(slots=True)
class Clock:
    """Times of a request before it reaches the engine."""

    arrived: float
    """Time at which the request's head arrived, from `time.perf_counter`."""
    fetch_s: float = 0.0
    """Seconds for fetching media, copying files and decoding base64."""
    preprocess_s: float = 0.0
    """Seconds for tokenizing text and for decoding and resizing media, with the wait for a tokenizer process."""


@dataclass(slots=True)
class Choice(Answer):
    """An answer with its index among the choices of its request."""

    index: int = field(kw_only=True)


class PromptTokensDetails(TypedDict):
    """Details of the number of prompt tokens.

    `cached_tokens` is the number of tokens that were found in the prefix cache. The other fields are the numbers of
    tokens that are replaced by features of media.
    """

    cached_tokens: int
    image_tokens: int
    video_tokens: int
    audio_tokens: int


class CompletionTokensDetails(TypedDict):
    """Number of generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Present in chats if the checkpoint writes reasoning."""


class Used(TypedDict):
    """The part of a streamed answer that is present if `stream_options` ask for usage."""

    usage: NotRequired[Usage]


class SpanEntry(TypedDict):
    """The position of a media item's tokens in the prompt."""

    type: Kind
    start: int
    stop: int
    features: int
    """Number of tokens from `start` to `stop` that are replaced by features."""
    block: str
    """Name of the item's shared-memory block, as in `mindie-mm shm list --blocks`."""


class StageTimings(TypedDict):
    """The durations of a request's stages in seconds.

    If the request has several choices, the value for a stage of the engine is the maximum over the choices.
    """

    fetch_s: float
    preprocess_s: float
    queue_s: float
    tower_s: float
    prefill_s: float
    decode_s: float
    total_s: float


class Timed(TypedDict):
    """The part of an answer that is present if the request sets `timings`."""

    timings: NotRequired[StageTimings]


def usage(
    prompts: Sequence[Prompt], choices: Sequence[Answer], num_untold: int = 0, num_reasoning: int | None = None
) -> Usage:
    """Return the usage of the prompts and their choices.

    Each prompt is counted once, however many choices it has. A prompt's cached tokens are the minimum over its choices.

    Args:
        prompts: Prompts of the request.
        choices: Choices in the order of the prompts, with the same number of choices for each prompt.
        num_untold: Number of generated tokens that are not counted yet, because a later chunk sends them.
        num_reasoning: Number of reasoning tokens, or None if the checkpoint does not write reasoning.

    """
    n = len(choices) // len(prompts)
    num_prompt = sum(len(prompt) for prompt in prompts)
    num_generated = sum(len(choice.token_ids) for choice in choices) - num_untold

    def features(kind: Kind) -> int:
        return sum(_features(one, span) for one in prompts for span in one.spans if span.kind == kind)

    usage: Usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(
                min(choice.cached_tokens for choice in choices[i : i + n]) for i in range(0, len(choices), n)
            ),
            "image_tokens": features("image"),
            "video_tokens": features("video"),
            "audio_tokens": features("audio"),
        },
    }
    if num_reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


def _features(prompt: Prompt, span: MediaSpan) -> int:
    """Return the number of tokens in an item's span that are replaced by features."""
    ids = prompt.ids[span.start : span.stop]
    tokens = [span.token] if span.second_token is None else [span.token, span.second_token]
    return int(np.count_nonzero((ids < 0) | np.isin(ids, tokens)))


def media_spans(prompt: Prompt) -> list[SpanEntry]:
    """Return an entry for each media item of `prompt`, in order."""
    return [
        {
            "type": span.kind,
            "start": span.start,
            "stop": span.stop,
            "features": _features(prompt, span),
            "block": block_name(ref.arena, ref.block),
        }
        for span, ref in zip(prompt.spans, prompt.refs(), strict=True)
    ]


def timings(clock: Clock, choices: Sequence[Answer]) -> StageTimings:
    """Return the timings of a finished request."""
    timings = [choice.timings for choice in choices if choice.timings is not None]

    def longest(stage: str) -> float:
        return round(max(map(attrgetter(stage), timings), default=0.0), 6)

    return {
        "fetch_s": round(clock.fetch_s, 6),
        "preprocess_s": round(clock.preprocess_s, 6),
        "queue_s": longest("queue_s"),
        "tower_s": longest("tower_s"),
        "prefill_s": longest("prefill_s"),
        "decode_s": longest("decode_s"),
        "total_s": round(time.perf_counter() - clock.arrived, 6),
    }
