"""Bytes and offsets of tokens, over vocabularies of both kinds that have parts of characters."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from mindie_mm.engine.detokenizer import Detokenizer
from service.token_text import TextOffsets, token_bytes
from tests.service.conftest import TINY

DAY = "日".encode()


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As sentencepiece's, with pieces for bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁red", "\ufffd", "a"]
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


def offsets(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """What TextOffsets gives, which is what a Detokenizer has told before each token."""
    detokenizer, told, expected = Detokenizer(tokenizer), 0, []
    for token_id in ids:
        expected.append(told)
        told += len(detokenizer.push([token_id]))
    found = TextOffsets(tokenizer)
    assert [found.answered([token_id])[0] for token_id in ids] == expected
    assert TextOffsets(tokenizer).answered(ids) == expected
    return expected


def test_bytes_of_a_byte_level_vocabulary(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("naïve 日本語 🎉 \ufffd red", add_special_tokens=False).ids
    assert any("\ufffd" in byte_level.decode([token_id]) for token_id in ids)
    assert b"".join(token_bytes(byte_level, token_id) for token_id in ids).decode() == "naïve 日本語 🎉 \ufffd red"
    parts = {bytes([byte]) for byte in range(256)} - {bytes([byte]) for byte in range(128)}
    assert parts <= {token_bytes(byte_level, token_id) for token_id in range(byte_level.get_vocab_size())}
    assert token_bytes(byte_level, 10**6) == b"", "an id of a padded vocabulary"


def test_bytes_of_fallback_pieces(byte_fallback: Tokenizer) -> None:
    for byte in range(256):
        assert token_bytes(byte_fallback, 1 + byte) == bytes([byte])
    assert token_bytes(byte_fallback, 257) == b" red"
    assert token_bytes(byte_fallback, 258) == "\ufffd".encode()


def test_offsets(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    red = byte_level.encode("red", add_special_tokens=False).ids
    end = byte_level.token_to_id("<|im_end|>")
    day = byte_level.encode("日", add_special_tokens=False).ids
    found = offsets(byte_level, [*red, *day, end, *red])
    assert found[len(red) : len(red) + len(day)] == [3] * len(day)
    assert found[len(red) + len(day) :][:2] == [4, 4]
    pieces = [257, *(1 + byte for byte in DAY), 257]
    assert offsets(byte_fallback, [*pieces, byte_fallback.token_to_id("</s>"), 257]) == [0, 3, 3, 3, 4, 8, 8]
    offsets(byte_fallback, [1 + DAY[0], 257, 1 + DAY[1], 257, *(1 + byte for byte in DAY), 1 + DAY[0]])


def test_offsets_behind_an_echo(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|im_end|>")
    red = byte_level.encode("red", add_special_tokens=False).ids
    found = TextOffsets(byte_level)
    assert found.echoed([*red, end, *red])[len(red) :][:2] == [3, 3 + len("<|im_end|>")]
    assert found.echoed([]) == []
    assert found.answered([end, *red])[:2] == [6 + len("<|im_end|>")] * 2


@pytest.mark.timeout(60)
def test_offsets_of_bytes_that_never_end_take_no_longer(byte_level: Tokenizer) -> None:
    """A prompt of them would hold up the service: decoding all of them anew for each took 100 s."""
    (part,) = [i for i in range(byte_level.get_vocab_size()) if token_bytes(byte_level, i) == b"\x80"]
    assert TextOffsets(byte_level).echoed([part] * 32_768)[-1] > 32_000
