"""Shortening a prompt that does not fit: from its front, and never through a media item."""

from __future__ import annotations

import msgspec
import numpy as np

from mindie_mm.errors import ContextLengthExceeded
from mindie_mm.tokenize.prompt import Prompt


def truncate(prompt: Prompt, max_tokens: int) -> Prompt:
    """The last tokens of `prompt`, at most `max_tokens`: the oldest text is dropped, and whole media items.

    The spans left are the last ones, and the opening stays, as a tokenizer that truncates from the left has it.
    ContextLengthExceeded if nothing else would be left.
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
            f"nothing would be left of the prompt within the limit of {max_tokens} tokens: what it begins with, or its "
            "last media item, takes them all"
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
