"""Tokens and their log-probabilities as OpenAI's endpoints write them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from tokenizers import Tokenizer

from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.text.detokenizer import TextStream
from service.schemas.openai_answers import ChatLogprobs, ChatPosition, ChatToken, CompletionLogprobs

T = TypeVar("T")

_ENTRIES_A_TURN = 1000
"""Tokens that are written at a time: some milliseconds."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_BEFORE = "a"
"""A token that every vocabulary has: sentencepiece's take a blank off the first one of a text."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")

_INLINE_MEDIA = re.compile(r"(data:[^,\s]{0,256};base64,)[A-Za-z0-9+/=_-]+")


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


class TokenTexts:
    """Texts of the vocabulary's tokens, cached because one answer may name a million tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = cache(partial(token_text, tokenizer))
        """`token_text`."""
        self.name = cache(partial(_name, tokenizer))
        """The text, or, where it is no whole character, the bytes in OpenAI's form."""
        self.entry = cache(partial(_text_and_bytes, tokenizer))
        """JSON of the text, and that of the list of bytes."""

    def cut_name(self, token_id: int, num_bytes: int) -> str:
        """Return `name` of the first `num_bytes` bytes of a token."""
        own = token_bytes(self._tokenizer, token_id)[:num_bytes]
        try:
            return own.decode()
        except UnicodeDecodeError:
            return _spelled(own)

    def cut_entry(self, token_id: int, num_bytes: int | None) -> tuple[Raw, Raw]:
        """Return `entry` of the first `num_bytes` bytes of a token."""
        own = token_bytes(self._tokenizer, token_id)[:num_bytes]
        return _encoded(own.decode(errors="replace"), own)

    def piece(self, token_id: int) -> str:
        """Return the vocabulary's own string, such as `Ġred` or `<0xE6>`, or "" for an id that only pads it."""
        return self._tokenizer.id_to_token(token_id) or ""


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters.

    A token begins where the text of those before it ends: special tokens of an answer have none, a part of a character
    none before the character's end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answer = TextStream(tokenizer)
        self._length = 0  # of the text before the answer's next token

    async def echoed(self, token_ids: Sequence[int]) -> list[int]:
        """Of the prompt in front of the answer, special tokens spelled out."""
        self._length += len(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        return (await _starts(TextStream(self._tokenizer, skip_special_tokens=False), token_ids, 0))[:-1]

    async def answered(self, token_ids: Sequence[int]) -> list[int]:
        """Of the answer's next tokens."""
        *starts, self._length = await _starts(self._answer, token_ids, self._length)
        return starts


async def _starts(stream: TextStream, token_ids: Sequence[int], start: int) -> list[int]:
    """Where each of the stream's next tokens begins, and the one behind them, if the first one does at `start`."""
    starts = [start]
    async for part in in_turns(token_ids, 4):
        starts += [*accumulate((len(stream.push(token_id)) for token_id in part), initial=starts.pop())]
    return starts


async def in_turns(items: Sequence[T], weight: int) -> AsyncIterator[Sequence[T]]:
    """Slices of `items`, each as heavy as `weight` entries; between them others have their turn on the event loop."""
    step = max(1, _ENTRIES_A_TURN // weight)
    for start in range(0, len(items), step):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + step]


async def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob], cut: int | None = None) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice. If `cut` is not None, keep so many bytes of the last token."""
    last = logprobs[-1] if logprobs and cut is not None else None

    def entry(token_id: int, logprob: float) -> ChatToken:
        text, its_bytes = texts.entry(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": its_bytes}

    def position(one: TokenLogprob) -> ChatPosition:
        found: ChatPosition = {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]}
        if one is last:
            found["token"], found["bytes"] = texts.cut_entry(one.token_id, cut)
        return found

    return {"content": await _json_list(logprobs, position, _weight(logprobs))}


async def completion_logprobs(
    texts: TokenTexts,
    positions: Sequence[tuple[int, TokenLogprob | None]],
    text_offsets: list[int],
    cut: int | None = None,
) -> CompletionLogprobs:
    """Return the `logprobs` object of a text choice. `cut` is as in `chat_logprobs`.

    The first token of an echoed prompt has no log-probability.
    """
    found = [logprob for _, logprob in positions]
    last = len(positions) - 1

    def name(at: int) -> str:
        token, _ = positions[at]
        return texts.name(token) if cut is None or at < last else texts.cut_name(token, cut)

    weight = _weight([logprob for logprob in found[-1:] if logprob])

    def by_text(one: TokenLogprob | None) -> dict[str, float] | None:
        """The likeliest tokens and the position's own, which need not be one of them."""
        found = [] if one is None else [*one.top, (one.token_id, one.logprob)]
        return {texts.name(token): _finite(logprob) for token, logprob in found} or None

    return {
        "tokens": await _json_list(range(len(positions)), name, 1),
        "token_logprobs": await _json_list(found, lambda one: one and _finite(one.logprob), 1),
        "top_logprobs": await _json_list(found, by_text, weight),
        "text_offset": text_offsets,
    }


async def _json_list(items: Sequence[T], make: Callable[[T], Any], weight: int) -> Raw:
    """What `make` makes of the items, as JSON: as objects it would take ten times the memory."""
    parts = [msgspec.json.encode([make(item) for item in part])[1:-1] async for part in in_turns(items, weight)]
    return Raw(b"[" + b",".join(parts) + b"]")


def _weight(logprobs: Sequence[TokenLogprob]) -> int:
    """Entries of a position; all have as many."""
    return 1 + len(logprobs[0].top) if logprobs else 1


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token's text, or, where it is no whole character, its bytes in OpenAI's form: `bytes:\xe4\xbd`."""
    text = token_text(tokenizer, token_id)
    if "\ufffd" not in text:
        return text
    return _spelled(token_bytes(tokenizer, token_id))


def _spelled(own: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _text_and_bytes(tokenizer: Tokenizer, token_id: int) -> tuple[Raw, Raw]:
    return _encoded(token_text(tokenizer, token_id), token_bytes(tokenizer, token_id))


def _encoded(text: str, own: bytes) -> tuple[Raw, Raw]:
    return Raw(msgspec.json.encode(text)), Raw(msgspec.json.encode([*own]))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
