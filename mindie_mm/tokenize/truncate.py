"""Truncation of prompts. The beginning is removed, and media items are never split."""

from __future__ import annotations

import msgspec
import numpy as np

from mindie_mm.errors import ContextLengthExceeded
from mindie_mm.tokenize.prompt import Prompt


def truncate(prompt: Prompt, max_tokens: int) -> Prompt:
    """Return at most the last `max_tokens` tokens of `prompt`. Drop the oldest text and whole media items.

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
            f"truncation to {max_tokens} tokens would leave nothing of the prompt: its beginning or its last "
            "media item needs all of them"
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
