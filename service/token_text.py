"""Tokens and their log-probabilities as OpenAI's endpoints write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from mindie_mm.engine.messages import TokenLogprob
from mindie_mm.tokenize.prompt import Prompt

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_INLINE_MEDIA = re.compile(r"(data:[^,\s]*;base64,)[A-Za-z0-9+/=_-]+")


def prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """A prompt for people to read: each media item's run as its kind and length, base64 that is text left out."""
    parts, start = [], 0
    for span in prompt.spans:
        parts += [prompt.ids[start : span.start].tolist(), f"<{span.kind} of {span.stop - span.start} tokens>"]
        start = span.stop
    parts.append(prompt.ids[start:].tolist())
    text = "".join(
        part if isinstance(part, str) else tokenizer.decode(part, skip_special_tokens=False) for part in parts
    )
    return _INLINE_MEDIA.sub(r"\1...", text)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token by itself; U+FFFD where it is no whole character."""
    return tokenizer.decode([token_id], skip_special_tokens=False)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {
        "content": [
            {
                **_entry(tokenizer, position.token_id, position.logprob),
                "top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in position.top],
            }
            for position in logprobs
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer, positions: Sequence[tuple[int, TokenLogprob | None]], *, text_offset: int = 0
) -> dict[str, Any]:
    """The `logprobs` object of a text choice, from its token ids; the first token of an echoed prompt has none."""
    texts = [token_text(tokenizer, token_id) for token_id, _ in positions]
    found = [logprob for _, logprob in positions]
    return {
        "tokens": texts,
        "token_logprobs": [logprob and _finite(logprob.logprob) for logprob in found],
        "top_logprobs": [logprob and _by_text(tokenizer, logprob) for logprob in found],
        "text_offset": [text_offset + start for start in accumulate(map(len, texts[:-1]), initial=0)] if texts else [],
    }


def _by_text(tokenizer: Tokenizer, position: TokenLogprob) -> dict[str, float]:
    return {token_text(tokenizer, token): _finite(logprob) for token, logprob in position.top}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
