"""Tokens and their log-probabilities as OpenAI's endpoints write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from mindie_mm.engine.detokenizer import TextStream
from mindie_mm.engine.messages import TokenLogprob
from mindie_mm.tokenize.prompt import Prompt

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_BEFORE = "a"
"""A token that every vocabulary has: sentencepiece's take a blank off the first one of a text."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")

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
    """The text of one token in the midst of others; U+FFFD where it is no whole character."""
    before = tokenizer.token_to_id(_BEFORE)
    if before is None:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    return tokenizer.decode([before, token_id], skip_special_tokens=False).removeprefix(_BEFORE)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one token in the midst of others, which may be a part of a character."""
    text, piece = token_text(tokenizer, token_id), tokenizer.id_to_token(token_id)
    if "\ufffd" not in text or piece is None:
        return text.encode()
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:  # no byte-level vocabulary: the piece has U+FFFD itself
        return text.encode()


def _byte_characters() -> dict[str, int]:
    """Byte-level vocabularies' characters: Latin-1's visible ones as they are, the rest from U+0100 on (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters.

    A token begins where the text of those before it ends: special tokens of an answer have none, a part of a character
    none before the character's end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answer = TextStream(tokenizer)
        self._length = 0  # of the text before the answer's next token

    def echoed(self, token_ids: Sequence[int]) -> list[int]:
        """Of the prompt in front of the answer, special tokens spelled out."""
        self._length += len(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        return _starts(TextStream(self._tokenizer, skip_special_tokens=False), token_ids, 0)[:-1]

    def answered(self, token_ids: Sequence[int]) -> list[int]:
        """Of the answer's next tokens."""
        *starts, self._length = _starts(self._answer, token_ids, self._length)
        return starts


def _starts(stream: TextStream, token_ids: Sequence[int], start: int) -> list[int]:
    """Where each of the stream's next tokens begins, and the one behind them, if the first one does at `start`."""
    return [*accumulate((len(stream.push(token_id)) for token_id in token_ids), initial=start)]


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
    tokenizer: Tokenizer, positions: Sequence[tuple[int, TokenLogprob | None]], text_offsets: list[int]
) -> dict[str, Any]:
    """The `logprobs` object of a text choice, from its token ids; the first token of an echoed prompt has none."""
    texts = [_name(tokenizer, token_id) for token_id, _ in positions]
    found = [logprob for _, logprob in positions]
    return {
        "tokens": texts,
        "token_logprobs": [logprob and _finite(logprob.logprob) for logprob in found],
        "top_logprobs": [logprob and _by_text(tokenizer, logprob) for logprob in found],
        "text_offset": text_offsets,
    }


def _by_text(tokenizer: Tokenizer, position: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the position's own, which need not be one of them."""
    found = [*position.top, (position.token_id, position.logprob)]
    return {_name(tokenizer, token): _finite(logprob) for token, logprob in found}


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token's text, or, where it is no whole character, its bytes in OpenAI's form: `bytes:\xe4\xbd`."""
    text = token_text(tokenizer, token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes(tokenizer, token_id))


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(token_bytes(tokenizer, token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
