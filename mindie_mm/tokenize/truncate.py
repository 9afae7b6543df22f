"""Shortening a prompt that does not fit: from its front, and never through a media item."""

from __future__ import annotations

from dataclasses import replace

from mindie_mm.errors import ContextLengthExceeded
from mindie_mm.tokenize.prompt import Prompt


def truncate(prompt: Prompt, max_tokens: int) -> Prompt:
    """The last tokens of `prompt`, at most `max_tokens`: the oldest text is dropped, and whole media items.

    The spans left are the last ones. ContextLengthExceeded if nothing would be left.
    """
    start = max(0, len(prompt) - max_tokens)
    for span in prompt.spans:
        if span.start - span.lead < start < span.stop + span.tail:
            start = span.stop + span.tail
    if start >= len(prompt):
        raise ContextLengthExceeded(
            f"the prompt's last item alone is longer than the limit of {max_tokens} tokens; nothing would be left"
        )
    spans = tuple(
        replace(span, start=span.start - start, stop=span.stop - start)
        for span in prompt.spans
        if span.start - span.lead >= start
    )
    return Prompt(prompt.ids[start:].copy(), spans)
