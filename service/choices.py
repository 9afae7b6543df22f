"""What a request's choices have come to, and what an answer says about them: usage and timings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindie_mm.engine.worker import Answer
from mindie_mm.inputs import KINDS
from mindie_mm.shm.layout import block_name
from mindie_mm.tokenize.prompt import MediaSpan, Prompt

_ENGINE_STAGES = ("queue_s", "tower_s", "prefill_s", "decode_s")


@dataclass(slots=True)
class Clock:
    """Where a request's time goes before the engine has it; seconds."""

    arrived: float
    """When its head came, on the clock of time.perf_counter."""
    fetch_s: float = 0.0
    """Having its media as files: fetching, copying, decoding base64."""
    preprocess_s: float = 0.0
    """In a tokenizer process, waiting for one included: decoding and resizing media, text to ids."""


@dataclass(slots=True)
class Choice(Answer):
    """One of several answers."""

    index: int = field(kw_only=True)


def usage(prompts: Sequence[Prompt], choices: Sequence[Answer]) -> dict[str, Any]:
    """OpenAI's usage object, of as many choices for each prompt; a prompt counts once, as its first choice found it."""
    n = len(choices) // len(prompts)
    num_prompt = sum(len(prompt) for prompt in prompts)
    num_generated = sum(len(choice.token_ids) for choice in choices)
    cached = sum(min(choice.cached_tokens for choice in choices[i : i + n]) for i in range(0, len(choices), n))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": cached}
        | {
            f"{kind}_tokens": sum(_features(one, span) for one in prompts for span in one.spans if span.kind == kind)
            for kind in KINDS
        },
    }


def _features(prompt: Prompt, span: MediaSpan) -> int:
    """Slots of an item's span that take a feature."""
    ids = prompt.ids[span.start : span.stop]
    return int(np.count_nonzero((ids < 0) | (ids == span.token)))


def media_spans(prompt: Prompt) -> list[dict[str, Any]]:
    """Where the tokens of each media item lie in the prompt, and the block of shared memory that its words name."""
    return [
        {
            "type": span.kind,
            "start": span.start,
            "stop": span.stop,
            "features": _features(prompt, span),
            "block": block_name(ref.arena, ref.block),  # as `mindie-mm shm list --blocks` names it
        }
        for span, ref in zip(prompt.spans, prompt.refs(), strict=True)
    ]


def timings(clock: Clock, choices: Sequence[Answer]) -> dict[str, float]:
    """Where a finished request's time went, in seconds; of several choices, the longest of each stage."""
    found = [choice.timings for choice in choices if choice.timings is not None]
    stages = {name: max((getattr(one, name) for one in found), default=0.0) for name in _ENGINE_STAGES}
    seconds = {
        "fetch_s": clock.fetch_s,
        "preprocess_s": clock.preprocess_s,
        **stages,
        "total_s": time.perf_counter() - clock.arrived,
    }
    return {name: round(value, 6) for name, value in seconds.items()}
