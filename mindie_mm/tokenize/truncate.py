"""Truncation of prompts. Media items are never split."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from mindie_mm.errors import ContextLengthExceeded, InputError
from mindie_mm.tokenize.prompt import MediaSpan, Prompt, Side


def truncate(prompt: Prompt, max_tokens: int) -> Prompt:
    """Return at most the last `max_tokens` tokens of `prompt`. Drop the oldest text and the oldest media items.

    The opening is kept, as in a tokenizer that truncates on the left.

    Raises:
        ContextLengthExceeded: Only the opening would be left.

    """
    first, last = prompt.opening
    start = max(0, len(prompt) - max_tokens)
    if start > first:
        start += last - first
    for span in prompt.spans:
        if span.start - span.lead < start < span.stop + span.tail:
            start = span.stop + span.tail
    if start >= len(prompt):
        raise ContextLengthExceeded(
            f"the prompt cannot be truncated to {max_tokens} tokens: only its opening tokens, such as BOS, would be "
            "left, because nothing else fits or the last media item is too long. Raise the limit, or shorten the "
            "last media item"
        )
    opening = prompt.ids[first:last] if start > first else prompt.ids[:0]
    cut = start - len(opening)
    spans = tuple(
        msgspec.structs.replace(span, start=span.start - cut, stop=span.stop - cut)
        for span in prompt.spans
        if span.start - span.lead >= start
    )
    at = max(first - start, 0)
    return Prompt(np.concatenate([opening, prompt.ids[start:]]), spans, (at, at + last - first))


def cut(prompt: Prompt, num_tokens: int, side: Side) -> Prompt:
    """Return `prompt` cut to `num_tokens` tokens. The other tokens are removed on one side.

    Raises:
        InputError: The cut would split a media item.

    """
    start, stop = (len(prompt) - num_tokens, len(prompt)) if side == "left" else (0, num_tokens)
    for index, span in enumerate(prompt.spans):
        first, last = span.start - span.lead, span.stop + span.tail
        if any(first < edge < last for edge in (start, stop)):
            raise InputError(
                f"truncate_prompt_tokens is {num_tokens}, which cuts through media item {index} ({span.kind}), tokens "
                f"{first} to {last} of {len(prompt)}; keep the whole item, or none of it",
                param="truncate_prompt_tokens",
            )
    first, last = prompt.opening
    opening = (max(first - start, 0), max(last - start, 0)) if start <= first and last <= stop else (0, 0)
    return Prompt(prompt.ids[start:stop], _moved(prompt.spans, start, stop), opening)


def _moved(spans: Iterable[MediaSpan], start: int, stop: int) -> tuple[MediaSpan, ...]:
    """Return the spans inside [start, stop), with positions relative to `start`."""
    return tuple(
        msgspec.structs.replace(span, start=span.start - start, stop=span.stop - start)
        for span in spans
        if start <= span.start and span.stop <= stop
    )
