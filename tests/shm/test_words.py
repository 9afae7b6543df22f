"""Tests for the native wire format: round trips, error detection and literal words."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded
from mindie_mm.shm import NAME_WORD_STOP, Ref, is_name_word
from mindie_mm.shm.format.spec import DTYPES
from mindie_mm.shm.format.words import MAX_ARENA, MAX_BLOCK, MAX_GENERATION

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "words.json").read_text())
MASK = (1 << 64) - 1

REQUIRED_SHAPES = [
    (100_000, 1176),
    (64, 3, 448, 448),
    (13, 576, 588),
    (1, 128, 3000),
    (2**31,),
    (1, 16, 3, 1024, 1024),
    (1,),
    (2**40,),
    (1, 2**32),
    (1, 1, 1, 1, 1, 1),
]

shapes = st.integers(1, 6).flatmap(
    lambda ndim: st.integers(0, 47 - 4 * (ndim - 1)).flatmap(
        lambda bits: st.tuples(
            st.integers(1, 2 ** min(40, bits)), *[st.integers(1, 2 ** min(6, bits // ndim))] * (ndim - 1)
        )
    )
)
names = st.builds(Ref, st.integers(0, MAX_ARENA), st.integers(0, MAX_BLOCK), st.integers(0, MAX_GENERATION))


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def refused(name_word: int, shape_word: int | None) -> bool:
    try:
        Ref.from_words(name_word, shape_word)
    except CorruptReference:
        return True
    return False


def sample_refs(count: int) -> list[Ref]:
    rng = np.random.default_rng(7)
    numbers = zip(
        rng.integers(0, MAX_ARENA, count, endpoint=True).tolist(),
        rng.integers(0, MAX_BLOCK, count, endpoint=True).tolist(),
        rng.integers(0, MAX_GENERATION, count, endpoint=True).tolist(),
        strict=True,
    )
    return [
        Ref(*triple, DTYPES[i % len(DTYPES)], REQUIRED_SHAPES[i % len(REQUIRED_SHAPES)])
        for i, triple in enumerate(numbers)
    ]


@pytest.mark.parametrize("vector", VECTORS["references"], ids=lambda v: str(v["shape"]))
def test_references_encode_to_the_literal_words(vector: dict) -> None:
    ref = Ref(vector["arena"], vector["block"], vector["generation"], vector["dtype"], tuple(vector["shape"]))
    assert ref.to_words() == (vector["name_word"], vector["shape_word"])
    assert f"{vector['name_word'] & MASK:016x}" == vector["name_hex"]
    assert f"{vector['shape_word'] & MASK:016x}" == vector["shape_hex"]
    assert Ref.from_words(vector["name_word"], vector["shape_word"]) == ref


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda v: v["why"])
def test_invalid_literal_words_are_refused(vector: dict) -> None:
    assert refused(vector["name_word"], vector["shape_word"])


@given(names, st.sampled_from(DTYPES), shapes | st.sampled_from(REQUIRED_SHAPES))
def test_every_reference_that_fits_round_trips(name: Ref, dtype: str, shape: tuple[int, ...]) -> None:
    ref = Ref(name.arena, name.block, name.generation, dtype, shape)
    try:
        name_word, shape_word = ref.to_words()
    except LimitExceeded:
        assert shape not in REQUIRED_SHAPES
        assert sum(4 + (size - 1).bit_length() for size in shape) > 40
        return
    assert Ref.from_words(name_word, shape_word) == ref
    assert Ref.from_words(name_word, None) == name
    assert name.name_word == name_word
    for word in (name_word, shape_word):
        assert -(2**63) <= word < -1
    assert is_name_word(name_word)
    assert not is_name_word(shape_word)


def test_small_sizes_always_fit() -> None:
    for shape in [(2**40,), (2**31, 4096), (2**20, 256, 64), (64, 64, 64, 64), (16,) * 5, (16,) * 6]:
        ref = Ref(1, 2, 3, "float32", shape)
        assert Ref.from_words(*ref.to_words()) == ref


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (Ref(65536, 0, 1, "uint8", (1,)), "arena 65536.*0 to 65535"),
        (Ref(0, 16384, 1, "uint8", (1,)), "block 16384.*0 to 16383"),
        (Ref(0, 0, 1 << 24, "uint8", (1,)), "generation 16777216.*0 to 16777215"),
        (Ref(-1, 0, 1, "uint8", (1,)), "arena -1"),
        (Ref(0, 0, 1, "uint8", (2**40 + 1,)), "needs 41 bits.*limits are 47 bits in total and 40 bits"),
        (Ref(0, 0, 1, "uint8", (2**30, 2**31)), "needs 66 bits.*limits are 47"),
        (Ref(0, 0, 1, "uint8", (1, 2**32 + 1)), "axis of 4294967297.*limit is 4294967296"),
        (Ref(0, 0, 1, "uint8", (1,) * 7), "7 dimensions; it must have 1 to 6"),
        (Ref(0, 0, 1, "uint8", ()), "0 dimensions; it must have 1 to 6"),
    ],
)
def test_a_reference_that_does_not_fit_reports_value_and_limit(ref: Ref, message: str) -> None:
    with pytest.raises(LimitExceeded, match=message):
        ref.to_words()


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (Ref(0, 0, 1, "uint8", (3, 0)), "at least 1"),
        (Ref(0, 0, 1, "uint8", (-1,)), "at least 1"),
        (Ref(0, 0, 1, "complex64", (1,)), "'complex64' is not one of"),
        (Ref(0, 0, 1), "no shape word"),
    ],
)
def test_an_invalid_shape_or_dtype_raises_input_error(ref: Ref, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ref.to_words()


def test_every_error_of_one_or_two_bits_is_refused() -> None:
    """All 8,256 error patterns of one or two bits among the 128 bits are decoded."""
    patterns = [1 << bit for bit in range(128)]
    patterns += [a | b for a, b in combinations(patterns, 2)]
    assert len(patterns) == 128 + 8128
    for ref in sample_refs(12):
        name_word, shape_word = ref.to_words()
        pair = (name_word & MASK) << 64 | (shape_word & MASK)
        accepted = [
            f"{pattern:032x}"
            for pattern in patterns
            if not refused(signed((pair ^ pattern) >> 64), signed((pair ^ pattern) & MASK))
        ]
        assert accepted == []


def test_every_error_of_one_or_two_bits_is_detected_for_every_reference() -> None:
    """True if an error is detected does not depend on the reference, because the checks are affine.

    The syndromes of the 128 single bits are the same for every reference. None of them is zero and all differ, so no
    error of one or two bits passes both checks.
    """
    seeds = np.array([crc_of_pair(*ref.to_words()) for ref in sample_refs(1000)])
    assert not seeds.any()
    bits = [1 << bit for bit in range(128)]
    base = sample_refs(1)[0].to_words()
    for ref in sample_refs(1000)[1::100]:
        words = ref.to_words()
        assert [syndrome(words, bit) for bit in bits] == [syndrome(base, bit) for bit in bits]
    syndromes = [syndrome(base, bit) for bit in bits]
    assert 0 not in syndromes
    assert len(set(syndromes)) == 128


def syndrome(words: tuple[int, int], pattern: int) -> int:
    return crc_of_pair(words[0] ^ signed(pattern >> 64), words[1] ^ signed(pattern & MASK))


def crc_of_pair(name_word: int, shape_word: int) -> int:
    """Return both checks as 16 bits, by the definition in docs/wire-format.md. The result is 0 if both pass."""
    name, shape = (name_word & MASK).to_bytes(8, "big"), (shape_word & MASK).to_bytes(8, "big")
    return (crc8(name[:7], 0xFF) ^ name[7]) << 8 | crc8(name[:7] + shape[:7], 0x5A) ^ shape[7]


def crc8(data: bytes, crc: int) -> int:
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ 0x107) if crc & 0x80 else crc << 1
    return crc


def test_every_error_of_one_or_two_bits_in_a_lone_name_word_is_refused() -> None:
    patterns = [1 << bit for bit in range(64)]
    patterns += [a | b for a, b in combinations(patterns, 2)]
    for ref in sample_refs(20):
        name_word = ref.name_word & MASK
        assert all(refused(signed(name_word ^ pattern), None) for pattern in patterns)


def test_at_most_two_in_a_thousand_random_pairs_are_accepted() -> None:
    """A million random pairs are decoded. The decoder first refuses pairs with a wrong tag bit."""
    rng = np.random.default_rng(11)
    pairs = rng.integers(-(2**63), 2**63 - 1, (1_000_000, 2), dtype=np.int64, endpoint=True)
    tagged = pairs[(pairs[:, 0] < NAME_WORD_STOP) & (pairs[:, 1] >= NAME_WORD_STOP) & (pairs[:, 1] < 0)]
    accepted = sum(not refused(name, shape) for name, shape in tagged.tolist())
    assert accepted <= 2000
    untagged = pairs[(pairs[:, 0] >= NAME_WORD_STOP) | (pairs[:, 1] < NAME_WORD_STOP) | (pairs[:, 1] >= 0)]
    assert all(refused(name, shape) for name, shape in untagged[:50_000].tolist())


def test_a_name_word_is_never_a_shape_word() -> None:
    for ref in sample_refs(200):
        name_word, shape_word = ref.to_words()
        assert refused(shape_word, None)
        assert refused(shape_word, name_word)
        assert refused(name_word, name_word)
        assert refused(shape_word, shape_word)


@given(st.integers())
def test_any_integer_is_decoded_or_refused(word: int) -> None:
    name_word = sample_refs(1)[0].name_word
    assert refused(word, None) or (-(2**63) <= word < NAME_WORD_STOP)
    assert refused(name_word, word) or (NAME_WORD_STOP <= word < -1)


@pytest.mark.parametrize("word", [-1, 0, 1, 2**31 - 1, 151655, 2**63 - 1, -(2**63), 2**64 - 1, -(2**64)])
def test_token_ids_and_padding_are_not_words(word: int) -> None:
    assert refused(word, None)
    assert refused(sample_refs(1)[0].name_word, word)


def test_name_words_are_found_in_arrays_and_tensors() -> None:
    import torch

    name_word, shape_word = sample_refs(1)[0].to_words()
    ids = np.array([5, name_word, shape_word, -1, 151655], dtype=np.int64)
    assert is_name_word(ids).tolist() == [False, True, False, False, False]
    assert is_name_word(torch.from_numpy(ids)).tolist() == [False, True, False, False, False]


def test_the_wire_format_page_shows_vectors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    shown = re.findall(r"\| (-\d+)<br>`(\w+)` \| (-\d+)<br>", page)
    vectors = {(str(one["name_word"]), one["name_hex"], str(one["shape_word"])) for one in VECTORS["references"]}
    assert len(shown) >= 4
    assert set(shown) <= vectors


def test_words_may_be_integers_of_any_type() -> None:
    name_word, shape_word = sample_refs(1)[0].to_words()
    ids = np.array([name_word, shape_word], np.int64)
    assert Ref.from_words(ids[0], ids[1]) == sample_refs(1)[0]
    for bad in (1.5, "7", None):
        with pytest.raises(InputError, match="must be integers"):
            Ref.from_words(bad, shape_word)
