"""Tests for the bytes and text offsets of tokens, with both kinds of vocabulary whose tokens may split characters."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from mindie_mm.engine.requests.engine_messages import FinishReason, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.text.detokenizer import Detokenizer
from mindie_mm.worker.deltas import Delta
from service.request.text_logprobs import LogprobsBuffer
from service.request.token_text import (
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_text,
    token_bytes,
)
from tests.processor_time import processor_time_below
from tests.service.conftest import TINY

DAY = "日".encode()


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Return a tokenizer that falls back to one token per byte, as SentencePiece does."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁red", "\ufffd", "a"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


async def offsets(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the offsets that TextOffsets computes.

    Check first that each offset is the length of the text that a Detokenizer outputs before the token.
    """
    detokenizer, num_characters, expected = Detokenizer(tokenizer), 0, []
    for token_id in ids:
        expected.append(num_characters)
        num_characters += len(detokenizer.push([token_id]))
    text_offsets = TextOffsets(tokenizer)
    assert [(await text_offsets.answered([token_id]))[0] for token_id in ids] == expected
    assert await TextOffsets(tokenizer).answered(ids) == expected
    return expected


def test_bytes_of_byte_level_tokens_join_to_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("naïve 日本語 🎉 \ufffd red", add_special_tokens=False).ids
    assert any("\ufffd" in byte_level.decode([token_id]) for token_id in ids)
    assert b"".join(token_bytes(byte_level, token_id) for token_id in ids).decode() == "naïve 日本語 🎉 \ufffd red"
    parts = {bytes([byte]) for byte in range(256)} - {bytes([byte]) for byte in range(128)}
    assert parts <= {token_bytes(byte_level, token_id) for token_id in range(byte_level.get_vocab_size())}
    assert token_bytes(byte_level, 10**6) == b"", "an id of a padded vocabulary"


def test_fallback_pieces_have_their_own_bytes(byte_fallback: Tokenizer) -> None:
    for byte in range(256):
        assert token_bytes(byte_fallback, 1 + byte) == bytes([byte])
    assert token_bytes(byte_fallback, 257) == b" red"
    assert token_bytes(byte_fallback, 258) == "\ufffd".encode()


async def test_offsets_count_the_characters_before_each_token(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    red = byte_level.encode("red", add_special_tokens=False).ids
    end = byte_level.token_to_id("<|im_end|>")
    day = byte_level.encode("日", add_special_tokens=False).ids
    found = await offsets(byte_level, [*red, *day, end, *red])
    assert found[len(red) : len(red) + len(day)] == [3] * len(day)
    assert found[len(red) + len(day) :][:2] == [4, 4]
    pieces = [257, *(1 + byte for byte in DAY), 257]
    assert await offsets(byte_fallback, [*pieces, byte_fallback.token_to_id("</s>"), 257]) == [0, 3, 3, 3, 4, 8, 8]
    await offsets(byte_fallback, [1 + DAY[0], 257, 1 + DAY[1], 257, *(1 + byte for byte in DAY), 1 + DAY[0]])


async def test_offsets_continue_after_an_echoed_prompt(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|im_end|>")
    red = byte_level.encode("red", add_special_tokens=False).ids
    found = TextOffsets(byte_level)
    assert (await found.echoed([*red, end, *red], "red<|im_end|>red"))[len(red) :][:2] == [3, 3 + len("<|im_end|>")]
    assert await found.echoed([], "") == []
    assert (await found.answered([end, *red]))[:2] == [6 + len("<|im_end|>")] * 2


async def test_tokens_that_the_echoed_text_lacks_are_empty(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|im_end|>")
    red, blue = (byte_level.encode(text, add_special_tokens=False).ids for text in ("red", " blue"))
    found = TextOffsets(byte_level)
    starts = await found.echoed([end, *red, *blue, end], "red blue")
    assert (starts[0], starts[1], starts[1 + len(red)], starts[-1]) == (0, 0, 3, 8)
    assert (await found.answered(red))[0] == 8
    assert (await TextOffsets(byte_level).echoed(blue, "red blue"))[0] == 3, "a prompt that was cut on the left"


async def test_offsets_of_incomplete_characters_take_linear_time(byte_level: Tokenizer) -> None:
    """If all bytes were decoded again for each token, the service would be blocked for minutes."""
    (part,) = [i for i in range(byte_level.get_vocab_size()) if token_bytes(byte_level, i) == b"\x80"]
    with processor_time_below(20):
        assert (await TextOffsets(byte_level).echoed([part] * 32_768, "\ufffd" * 32_768))[-1] > 32_000


async def with_turns(work: Awaitable[Any]) -> tuple[Any, int]:
    """Return the result of `work`, and how often another task ran before `work` ended."""
    turns, ended = 0, asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await asyncio.sleep(0)
    result = await work
    ended.set()
    await running
    return result, turns


async def test_formatting_many_log_probabilities_lets_other_tasks_run(byte_level: Tokenizer) -> None:
    texts, top = TokenTexts(byte_level), [(token, -float(token)) for token in range(300, 320)]
    logprobs = [TokenLogprob(300 + i % 5, -0.5, top) for i in range(1000)]
    chat, turns = await with_turns(chat_logprobs(texts, logprobs))
    assert turns > 20
    entries = msgspec.json.decode(msgspec.json.encode(chat))["content"]
    assert len(entries) == 1000
    assert entries[7]["logprob"] == -0.5
    assert bytes(entries[7]["bytes"]) == token_bytes(byte_level, 302)
    assert entries[7]["token"] == byte_level.decode([302])
    assert [entry["logprob"] for entry in entries[7]["top_logprobs"]] == [logprob for _, logprob in top]
    positions = [(one.token_id, one) for one in logprobs]
    starts, turns = await with_turns(TextOffsets(byte_level).answered([one.token_id for one in logprobs]))
    assert turns > 3
    text, turns = await with_turns(completion_logprobs(texts, [(300, None), *positions], [0, *starts]))
    assert turns > 20
    found = msgspec.json.decode(msgspec.json.encode(text))
    assert found["token_logprobs"] == [None, *[-0.5] * 1000]
    assert found["tokens"][1:6] == [byte_level.decode([token]) for token in range(300, 305)]
    assert found["top_logprobs"][0] is None
    assert len(found["top_logprobs"][9]) == 20
    assert await completion_logprobs(texts, [], []) == await completion_logprobs(TokenTexts(byte_level), [], [])


async def detokenized(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], at_once: int) -> tuple[str, bytes]:
    """Return the text that a Detokenizer outputs, and the bytes of the tokens that a LogprobsBuffer releases."""
    detokenizer, buffer, text, spelled = (
        Detokenizer(tokenizer, stop),
        LogprobsBuffer(tokenizer, SamplingParams(stop=stop)),
        "",
        b"",
    )
    for start in range(0, len(ids), at_once):
        some = ids[start : start + at_once]
        piece = detokenizer.push(some)
        stop_string = detokenizer.stopped_by
        reason: FinishReason | None = "length" if start + at_once >= len(ids) else None
        if stop_string is not None:
            reason = "stop"
        piece += detokenizer.flush() if reason else ""
        text += piece
        logprobs = [TokenLogprob(token, -1.0, []) for token in some]
        part = await buffer.push(Delta(piece, some, logprobs, finish_reason=reason, stop_reason=stop_string))
        released = [token_bytes(tokenizer, one.token_id) for one in part.logprobs]
        if part.cut is not None:
            released[-1] = released[-1][: part.cut]
        spelled += b"".join(released)
        decoded = spelled.decode(errors="ignore")
        assert text.startswith(decoded) or f" {text}".startswith(decoded), "a token was released before its text"
        if reason:
            break
    return text, spelled


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("stop", ["red", "ed", "r", "日", "本 r", " ", "nowhere", "d日x"])
async def test_bytes_of_tokens_end_with_the_text(
    byte_level: Tokenizer, byte_fallback: Tokenizer, stop: str, at_once: int
) -> None:
    ids = byte_level.encode("a red日本 red.", add_special_tokens=False).ids
    text, spelled = await detokenized(byte_level, ids, (stop, "zz"), at_once)
    assert text == "a red日本 red.".partition(stop)[0] == spelled.decode()
    pieces = [257, *(1 + byte for byte in "日本".encode()), 257]
    text, spelled = await detokenized(byte_fallback, pieces, (stop, "zz"), at_once)
    assert text == "red日本 red".partition(stop)[0]
    assert spelled.decode() == (f" {text}" if text else ""), "the bytes of the first token start with a space"


async def test_special_tokens_before_the_cut_are_kept(byte_level: Tokenizer) -> None:
    end, red = byte_level.token_to_id("<|im_end|>"), byte_level.encode("red", add_special_tokens=False).ids
    found = LogprobsBuffer(byte_level, SamplingParams(stop=("red", "x")))
    ids = [*byte_level.encode("a ", add_special_tokens=False).ids, end, *red, end]
    part = await found.push(Delta("a ", ids, [TokenLogprob(i, -1.0, []) for i in ids], finish_reason="stop"))
    assert [one.token_id for one in part.logprobs] == ids[: ids.index(end) + 1]


def test_the_text_of_a_prompt_omits_base64_in_linear_time(byte_level: Tokenizer) -> None:
    def text(prompt: str) -> str:
        return prompt_text(byte_level, Prompt(np.array(byte_level.encode(prompt).ids, np.int64)))

    assert text("see data:image/png;base64,QUJD= and") == "see data:image/png;base64,... and"
    for begin in ("data:", "data:;base64"):
        hostile = begin * 16_000
        with processor_time_below(2):
            assert text(hostile) == hostile
