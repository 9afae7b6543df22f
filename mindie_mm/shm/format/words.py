"""References to blocks, and the two negative int64 words that encode a reference (docs/wire-format.md).

    name word    63  62  61......46  45.....32  31........8  7....0
                  1   0  arena (16)  block (14)  gen. (24)   CRC-8 of bits 63 to 8
    shape word   63  62  61...58  57..55  54.......8  7....0
                  1   1  dtype(4) ndim(3)  dims (47)  CRC-8 of bits 63 to 8 of the name word, then of this word

`dims` starts at bit 8 with the last axis. Each axis except axis 0 has a 4-bit width code, followed by (size - 1) in
that number of bits. The remaining bits hold (size - 1) of axis 0. The CRC polynomial (x^8 + x^2 + x + 1) has period
127, and the CRC of the shape word covers 120 bits. This CRC therefore detects every error of one, two or three bits in
the pair of words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, NoReturn, SupportsIndex, overload

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded
from mindie_mm.shm.format import spec

ARENA_BITS, BLOCK_BITS, GENERATION_BITS = 16, 14, 24
MAX_ARENA = (1 << ARENA_BITS) - 1
MAX_BLOCK = (1 << BLOCK_BITS) - 1
MAX_GENERATION = (1 << GENERATION_BITS) - 1

DIMS_BITS = 47
FIRST_AXIS_BITS = 40
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 32)
"""Number of bits of (size - 1), by width code."""
WIDTH_CODES = tuple(next(code for code, width in enumerate(WIDTHS) if width >= bits) for bits in range(33))
"""Code of the smallest width that holds a number, by the number's bit length."""

NAME_WORD_STOP = -(1 << 62)
"""Exclusive upper bound of name words. No shape word is below this bound."""

_MASK64 = (1 << 64) - 1
_UNSIGNED = 1 << 64
"""Difference between a word with its highest bit set as an unsigned and as a signed number."""
_NAME_TAG, _SHAPE_TAG = 0b10, 0b11
_NAME_SEED, _SHAPE_SEED = 0xFF, 0x5A


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to one block at one generation, with the dtype and shape of its first array.

    References compare equal by value.
    """

    arena: int
    """Number of the arena, 0 to 65,535. Its file is `mindie_mm-<4 hex digits>`."""
    block: int
    """Index of the block's entry in the arena's table, 0 to 16,383."""
    generation: int
    """Generation of the entry when the block was allocated, 1 to 2^24 - 1. A reused entry has another generation."""
    dtype: str | None = None
    """Dtype of the block's first array. None if the reference was decoded from a name word alone."""
    shape: tuple[int, ...] | None = None
    """Shape of the block's first array. None if the reference was decoded from a name word alone."""

    @property
    def name_word(self) -> int:
        """Name word of the block. For an item with a single placeholder, the prompt contains only this word.

        Raise LimitExceeded if a number does not fit its field.
        """
        arena, block, generation = self.arena, self.block, self.generation
        if not (0 <= arena <= MAX_ARENA and 0 <= block <= MAX_BLOCK and 0 <= generation <= MAX_GENERATION):
            _does_not_fit(arena, block, generation)
        payload = (_NAME_TAG << 54) | (arena << 38) | (block << 24) | generation
        return ((payload << 8) | _crc8(payload, _NAME_SEED)) - _UNSIGNED

    def to_words(self) -> tuple[int, int]:
        """Encode the reference.

        Returns:
            The name word and the shape word, two negative int64 values.

        Raises:
            InputError: The reference has no dtype or shape.
            LimitExceeded: A number does not fit the name word, or the shape does not fit the shape word.

        """
        if self.dtype is None or self.shape is None:
            raise InputError(f"{self} has no shape word: it was read from a name word only")
        name_word = self.name_word
        payload = _pack(self.dtype, self.shape)
        return name_word, ((payload << 8) | _crc8(payload, (name_word & 0xFF) ^ _NAME_TO_SHAPE)) - _UNSIGNED

    @classmethod
    def from_words(cls, name_word: SupportsIndex, shape_word: SupportsIndex | None) -> Ref:
        """Decode a reference.

        Args:
            name_word: The name word, an int or an integer scalar of numpy or torch.
            shape_word: The shape word, or None to leave `dtype` and `shape` unset.

        Raises:
            InputError: A handle word is not an integer.
            CorruptReference: A handle word is damaged, or is not a handle word of this format.

        """
        try:
            name_word = index(name_word)
            shape_word = None if shape_word is None else index(shape_word)
        except TypeError as error:
            raise InputError(f"words {name_word!r} and {shape_word!r} must be integers") from error
        arena, block, generation = decode_name(name_word)
        if shape_word is None:
            return cls(arena, block, generation)
        return cls(arena, block, generation, *decode_shape(name_word, shape_word))


def _crc_table() -> bytes:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc << 1) ^ 0x107 if crc & 0x80 else crc << 1
        table.append(crc)
    return bytes(table)


_CRC = _crc_table()


def _crc8(payload: int, crc: int) -> int:
    """Return the CRC-8 of a 56-bit payload, most significant byte first, with the initial value `crc`."""
    for byte in payload.to_bytes(7, "big"):
        crc = _CRC[crc ^ byte]
    return crc


# A CRC is linear. XOR with this constant turns the name word's CRC into the initial value for the shape word's CRC.
_NAME_TO_SHAPE = _crc8(0, _NAME_SEED ^ _SHAPE_SEED)


def _does_not_fit(arena: int, block: int, generation: int) -> NoReturn:
    limits = (("arena", arena, MAX_ARENA), ("block", block, MAX_BLOCK), ("generation", generation, MAX_GENERATION))
    what, value, limit = next(one for one in limits if not 0 <= one[1] <= one[2])
    raise LimitExceeded(f"{what} {value} does not fit in a name word; it must be from 0 to {limit}")


@lru_cache(maxsize=4096)
def _pack(dtype: str, shape: tuple[int, ...]) -> int:
    array = spec.ArraySpec(shape, dtype)
    return (_SHAPE_TAG << 54) | (spec.DTYPE_CODES[dtype] << 50) | (len(shape) << 47) | pack_dims(array.shape)


def pack_dims(shape: tuple[int, ...]) -> int:
    """Return the `dims` field of a shape word. Raise LimitExceeded if the shape does not fit."""
    dims = used = 0
    for size in reversed(shape[1:]):
        bits = (size - 1).bit_length()
        if bits > WIDTHS[-1]:
            raise LimitExceeded(
                f"shape {shape}: an axis of {size} does not fit in a shape word; the limit is {1 << WIDTHS[-1]}"
            )
        code = WIDTH_CODES[bits]
        dims |= (code | (size - 1) << 4) << used
        used += 4 + WIDTHS[code]
    room = min(FIRST_AXIS_BITS, DIMS_BITS - used)
    if (shape[0] - 1).bit_length() > room:
        needed = used + (shape[0] - 1).bit_length()
        raise LimitExceeded(
            f"shape {shape} needs {needed} bits of a shape word; the limits are {DIMS_BITS} bits in total and "
            f"{FIRST_AXIS_BITS} bits for the first axis"
        )
    return dims | (shape[0] - 1) << used


def decode_name(word: int) -> tuple[int, int, int]:
    """Decode a name word.

    Returns:
        The arena, block and generation.

    Raises:
        CorruptReference: The word is not a name word, or its CRC is wrong.

    """
    unsigned = word & _MASK64
    payload = unsigned >> 8
    if unsigned >> 62 != _NAME_TAG or not -(1 << 63) <= word < 0:
        _corrupt(word, "it is not a name word")
    if _crc8(payload, _NAME_SEED) != unsigned & 0xFF:
        _corrupt(word, "its checksum is wrong")
    return (payload >> 38) & MAX_ARENA, (payload >> 24) & MAX_BLOCK, payload & MAX_GENERATION


def decode_shape(name_word: int, word: int) -> tuple[str, tuple[int, ...]]:
    """Decode the shape word that belongs to `name_word`.

    The caller checks the name word itself with `decode_name`.

    Returns:
        The dtype and shape.

    Raises:
        CorruptReference: The word is not a shape word, its CRC does not match the two words, or a field is invalid.

    """
    unsigned = word & _MASK64
    payload = unsigned >> 8
    if unsigned >> 62 != _SHAPE_TAG or not -(1 << 63) <= word < 0:
        _corrupt(word, "it is not a shape word")
    if _crc8(payload, (name_word & 0xFF) ^ _NAME_TO_SHAPE) != unsigned & 0xFF:
        _corrupt(word, f"its checksum does not match name word {name_word}")
    try:
        return _unpack(payload)
    except ValueError as error:
        _corrupt(word, str(error))


@lru_cache(maxsize=4096)
def _unpack(payload: int) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape. Raise ValueError with the reason if a field is invalid."""
    code = (payload >> 50) & 0xF
    num_dims = (payload >> 47) & 0x7
    if code >= len(spec.DTYPES):
        raise ValueError(f"the dtype code is {code}; it must be below {len(spec.DTYPES)}")
    if not 1 <= num_dims <= spec.MAX_DIMS:
        raise ValueError(f"the number of dimensions is {num_dims}; it must be in [1, {spec.MAX_DIMS}]")
    return spec.DTYPES[code], _unpack_dims(payload & ((1 << DIMS_BITS) - 1), num_dims)


def _unpack_dims(dims: int, num_dims: int) -> tuple[int, ...]:
    """Decode the `dims` field. Accept only outputs of `pack_dims`, so that each shape has exactly one encoding.

    Raise ValueError with the reason if the field is invalid.
    """
    left = DIMS_BITS
    shape = []
    for _ in range(num_dims - 1):
        code = dims & 0xF
        width = WIDTHS[code]
        left -= 4 + width
        if left < 0:
            raise ValueError("the dimensions have more bits than their field")
        size = (dims >> 4) & ((1 << width) - 1)
        if WIDTH_CODES[size.bit_length()] != code:
            raise ValueError("a dimension is not encoded in its shortest form")
        shape.append(size + 1)
        dims >>= 4 + width
    if dims.bit_length() > FIRST_AXIS_BITS:
        raise ValueError(f"the first axis has more than {FIRST_AXIS_BITS} bits")
    shape.append(dims + 1)
    return tuple(reversed(shape))


def _corrupt(word: int, why: str) -> NoReturn:
    raise CorruptReference(f"word {word} (0x{word & _MASK64:016x}): {why}")


@overload
def is_name_word(word: int) -> bool: ...
@overload
def is_name_word(word: Any) -> Any: ...
def is_name_word(word: Any) -> Any:
    """Return whether an int64 has the sign and tag of a name word, without checking its CRC.

    Args:
        word: An int, or an int64 numpy array or torch tensor, whose elements are tested one by one.

    Returns:
        A bool, or a boolean array or tensor with the shape of `word`.

    """
    return word < NAME_WORD_STOP
