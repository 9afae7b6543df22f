"""Tokens and log-probabilities in the format of OpenAI's endpoints."""

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
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.text.detokenizer import TextStream
from service.schemas.openai_answers import ChatLogprobs, ChatPosition, ChatToken, CompletionLogprobs, PromptToken

T = TypeVar("T")

_ENTRIES_A_TURN = 1000
"""Number of tokens to encode before the event loop runs other tasks. Encoding them takes some milliseconds."""

_LEAST_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON cannot express."""

_BEFORE = "a"
"""Token that is decoded before a single token, because SentencePiece drops the leading space of a text's first token.

Every usual vocabulary contains this token.
"""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")

_INLINE_MEDIA = re.compile(r"(data:[^,\s]{0,256};base64,)[A-Za-z0-9+/=_-]+")


def prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Return a readable form of a prompt. Media appear as their kind and length, and inline base64 as an ellipsis.

    Handles that a client sent are left out.
    """
    parts, start = [], 0
    for span in prompt.spans:
        parts += [prompt.ids[start : span.start].tolist(), f"<{span.kind} of {span.stop - span.start} tokens>"]
        start = span.stop
    parts.append(prompt.ids[start:].tolist())
    text = "".join(
        part
        if isinstance(part, str)
        else tokenizer.decode([index for index in part if index >= 0], skip_special_tokens=False)
        for part in parts
    )
    return _INLINE_MEDIA.sub(r"\1...", text)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text that a token has inside a longer text. Incomplete characters become U+FFFD."""
    before = tokenizer.token_to_id(_BEFORE)
    if before is None:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    return tokenizer.decode([before, token_id], skip_special_tokens=False).removeprefix(_BEFORE)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes that a token has inside a longer text. The bytes may be only a part of a character."""
    text, piece = token_text(tokenizer, token_id), tokenizer.id_to_token(token_id)
    if "\ufffd" not in text or piece is None:
        return text.encode()
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:  # the vocabulary is not byte-level: the piece itself contains U+FFFD
        return text.encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary (GPT-2) represents.

    A visible Latin-1 character represents its own byte. All other bytes are represented by characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class TokenTexts:
    """Texts of the vocabulary's tokens. They are cached, because one answer may list a million tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text: Callable[[int], str] = cache(partial(token_text, tokenizer))
        """Function that returns the `token_text` of a token id."""
        self.name: Callable[[int], str] = cache(partial(_name, tokenizer))
        """Function that returns the text of a token id. Bytes of incomplete characters are written in OpenAI's
        notation."""
        self.entry: Callable[[int], tuple[Raw, Raw]] = cache(partial(_text_and_bytes, tokenizer))
        """Function that returns the text and the list of bytes of a token id, both as JSON."""

    def cut_name(self, token_id: int, num_bytes: int) -> str:
        """Return what `name` would return for a token with only the first `num_bytes` bytes."""
        own = token_bytes(self._tokenizer, token_id)[:num_bytes]
        try:
            return own.decode()
        except UnicodeDecodeError:
            return _spelled(own)

    def cut_entry(self, token_id: int, num_bytes: int | None) -> tuple[Raw, Raw]:
        """Return what `entry` would return for a token with only the first `num_bytes` bytes."""
        own = token_bytes(self._tokenizer, token_id)[:num_bytes]
        return _encoded(own.decode(errors="replace"), own)

    def piece(self, token_id: int) -> str:
        """Return the string in the vocabulary, such as `Ġred` or `<0xE6>`, or "" for an id that no token uses."""
        return self._tokenizer.id_to_token(token_id) or ""


class TokensAsIds(TokenTexts):
    """Texts of the form `token_id:5`, for `return_tokens_as_token_ids`. The lists of bytes do not change."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self.text = texts.text
        self.name = _id_name
        self.entry = self._entry

    def cut_name(self, token_id: int, num_bytes: int) -> str:
        return _id_name(token_id)

    def cut_entry(self, token_id: int, num_bytes: int | None) -> tuple[Raw, Raw]:
        return _id_entry(token_id), self._texts.cut_entry(token_id, num_bytes)[1]

    def _entry(self, token_id: int) -> tuple[Raw, Raw]:
        return _id_entry(token_id), self._texts.entry(token_id)[1]


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _id_entry(token_id: int) -> Raw:
    return Raw(msgspec.json.encode(_id_name(token_id)))


class TextOffsets:
    """Offsets, in characters, at which the tokens of one choice begin in its text.

    A token begins at the end of the text of all tokens before it. Skipped special tokens have no text. The text of an
    incomplete character belongs to the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams = SamplingParams()) -> None:  # noqa: B008 - frozen
        self._tokenizer = tokenizer
        self._answer = TextStream(tokenizer, **params.text_options, silent=None)
        self._length = 0  # length of the text before the answer's next token

    async def echoed(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the offsets of the tokens of a prompt that is echoed as `text`.

        Tokens that the service has added before or after the caller's text, such as BOS, are empty in it.
        """
        self._length += len(text)
        decoded = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        added = decoded.find(text) if text in decoded else -max(0, text.rfind(decoded))  # negative for a cut prompt
        starts = await _starts(TextStream(self._tokenizer, skip_special_tokens=False), token_ids, 0)
        return [min(max(0, start - added), len(text)) for start in starts[:-1]]

    async def answered(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the answer's next tokens."""
        *starts, self._length = await _starts(self._answer, token_ids, self._length)
        return starts


async def _starts(stream: TextStream, token_ids: Sequence[int], start: int) -> list[int]:
    """Return the offset of each token and the offset at the end. The first token is at `start`."""
    starts = [start]
    async for part in in_turns(token_ids, 4):
        starts += [*accumulate((len(stream.push(token_id)) for token_id in part), initial=starts.pop())]
    return starts


async def in_turns(items: Sequence[T], weight: int) -> AsyncIterator[Sequence[T]]:
    """Yield slices of `items`, and let the event loop run other tasks in between.

    Encoding an item takes as long as encoding `weight` tokens. A slice takes as long as `_ENTRIES_A_TURN` tokens.
    """
    step = max(1, _ENTRIES_A_TURN // weight)
    for start in range(0, len(items), step):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + step]


async def chat_logprobs(
    texts: TokenTexts, logprobs: Sequence[TokenLogprob], cut: int | None = None, *, named: bool = False
) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice.

    Args:
        texts: Texts of the tokens.
        logprobs: Log-probabilities of the answer's tokens.
        cut: Number of bytes of the last token to keep. None: all bytes.
        named: Whether the request lists the tokens to report. The sampled token is then listed first, as in vLLM.

    """
    last = logprobs[-1] if logprobs and cut is not None else None

    def entry(token: tuple[int, float]) -> ChatToken:
        token_id, logprob = token
        text, its_bytes = texts.entry(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": its_bytes}

    def tops(one: TokenLogprob) -> Sequence[tuple[int, float]]:
        return [*({one.token_id: one.logprob} | dict(one.top)).items()] if named else one.top

    def position(one: TokenLogprob, top: list[ChatToken] | Raw) -> ChatPosition:
        position_entry: ChatPosition = {**entry((one.token_id, one.logprob)), "top_logprobs": top}
        if one is last:
            position_entry["token"], position_entry["bytes"] = texts.cut_entry(one.token_id, cut)
        return position_entry

    if (weight := _weight(logprobs)) <= _ENTRIES_A_TURN:
        positions = await _json_list(logprobs, lambda one: position(one, [*map(entry, tops(one))]), weight)
    else:
        parts = [position(one, await _json_list(tops(one), entry, 1)) for one in logprobs]
        positions = Raw(msgspec.json.encode(parts))
    return {"content": positions}


async def completion_logprobs(
    texts: TokenTexts,
    positions: Sequence[tuple[int, TokenLogprob | None]],
    text_offsets: list[int],
    cut: int | None = None,
) -> CompletionLogprobs:
    """Return the `logprobs` object of a text choice.

    `cut` has the same meaning as in `chat_logprobs`. The first token of an echoed prompt has no log-probability.
    """
    logprobs = [logprob for _, logprob in positions]
    last = len(positions) - 1

    def name(at: int) -> str:
        token, _ = positions[at]
        return texts.name(token) if cut is None or at < last else texts.cut_name(token, cut)

    weight = _weight([logprob for logprob in logprobs[-1:] if logprob])

    def tops(one: TokenLogprob | None) -> Sequence[tuple[int, float]]:
        """Return the sampled token, which vLLM's clients expect first, and then the most likely tokens."""
        return [] if one is None else [(one.token_id, one.logprob), *one.top]

    def add(by_text: dict[str, float], top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Add the log-probabilities of tokens. If several tokens have the same text, the first counts."""
        for token, logprob in top:
            by_text.setdefault(texts.name(token), finite(logprob))
        return by_text

    if weight <= _ENTRIES_A_TURN:
        top_logprobs = await _json_list(logprobs, lambda one: add({}, tops(one)) or None, weight)
    else:
        merged: list[dict[str, float] | None] = []
        for one in logprobs:
            by_text: dict[str, float] = {}
            async for part in in_turns(tops(one), 1):
                add(by_text, part)
            merged.append(by_text or None)
        top_logprobs = Raw(msgspec.json.encode(merged))
    return {
        "tokens": await _json_list(range(len(positions)), name, 1),
        "token_logprobs": await _json_list(logprobs, lambda one: one and finite(one.logprob), 1),
        "top_logprobs": top_logprobs,
        "text_offset": text_offsets,
    }


async def _json_list(items: Sequence[T], make: Callable[[T], Any], weight: int) -> Raw:
    """Return a JSON list of `make(item)` for all items. A list of Python objects would take ten times the memory."""
    parts = [msgspec.json.encode([make(item) for item in part])[1:-1] async for part in in_turns(items, weight)]
    return Raw(b"[" + b",".join(parts) + b"]")


def _weight(logprobs: Sequence[TokenLogprob]) -> int:
    """Return the number of entries per position, which is the same for all positions."""
    return 1 + len(logprobs[0].top) if logprobs else 1


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token's text, or its bytes in OpenAI's notation, `bytes:\xe4\xbd`, if a character is incomplete."""
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


def finite(logprob: float) -> float:
    """Return a log-probability as a number that JSON can express."""
    return max(logprob, _LEAST_LOGPROB)


async def prompt_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob], num_top: int) -> Raw:
    """Return a JSON list with null for the prompt's first token, and an object for each further token.

    The keys of an object are token ids: first the prompt's token, and then the `num_top` most likely tokens.
    """

    def entry(token_id: int, logprob: float, rank: int | None) -> PromptToken:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}

    parts = [b"null"]
    weight = 1 + (len(logprobs[0].top) if logprobs else 0)
    async for some in in_turns(logprobs, weight):
        for one in some:
            entries = {str(one.token_id): entry(one.token_id, one.logprob, one.rank)}
            for rank, (token_id, logprob) in enumerate(one.top[:num_top], 1):
                if token_id != one.token_id:
                    entries[str(token_id)] = entry(token_id, logprob, rank)
            parts.append(msgspec.json.encode(entries))
    return Raw(b"[" + b",".join(parts) + b"]")
