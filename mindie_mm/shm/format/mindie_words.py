"""MindIE-LLM's encoding of segment names and shapes as negative int64 values (docs/wire-format.md, section 5).

    name    -(length << 58 | 5-bit index of each character, from bit 57 down | checksum in bits 2 to 0)
    shape   -(number of axes << 60 | sizes from bit 59 down, in the widths of PLAN | checksum in bits 2 to 0)

The decoding functions are stricter than MindIE's. Each name and each shape has exactly one encoding, and these
functions reject every other value. The words have no tag. The same value can therefore be a valid name word and a valid
shape word.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import NoReturn, SupportsIndex

from mindie_mm.errors import CorruptReference, InputError, LimitExceeded

PREFIX = "psm_"
MAX_NAME_LENGTH = 14
"""Maximum number of characters in a name that a caller passes, including the prefix if there is one."""
CHARSET = "0123456789abcdefpsmnwABCDEF"
PLAN: dict[int, tuple[int, ...]] = {
    1: (57,),
    2: (29, 28),
    3: (19, 19, 19),
    4: (18, 3, 18, 18),
    5: (13, 13, 3, 14, 14),
}
"""Number of bits for each axis, by number of axes. The largest allowed size of an axis is 2^(bits - 1)."""
NUM_SHAPE_DIMS = len(PLAN)

_MAX_CHARACTERS = 11
"""Maximum number of characters in a name without its prefix. The word has no space for more characters."""
_SEGMENT_NAME = re.compile(r"psm_[0-9a-f]{8}")


def is_segment_name(name: str) -> bool:
    """Return whether `name` has the form that Python gives to segment names: psm_ and 8 lower-case hex digits.

    Callers use this check so that they never open or remove other files in /dev/shm.
    """
    return _SEGMENT_NAME.fullmatch(name) is not None


def encode_shm_name_to_int64(name: str) -> int:
    """Return the name word of a segment, a negative int64.

    The word does not encode the prefix psm_, so `name` can omit the prefix.

    Raises:
        InputError: The name is empty or has a character outside CHARSET.
        LimitExceeded: The name has more than 14 characters, or more than 11 after the prefix.

    """
    if not isinstance(name, str):
        raise InputError(f"segment name {name!r} is not a string")
    characters = name.removeprefix(PREFIX)
    if len(name) > MAX_NAME_LENGTH:
        raise LimitExceeded(f"segment name {name!r} has {len(name)} characters; the limit is {MAX_NAME_LENGTH}")
    if len(characters) > _MAX_CHARACTERS:
        raise LimitExceeded(
            f"segment name {name!r} has {len(characters)} characters; the limit is {_MAX_CHARACTERS}, not counting the "
            f"prefix {PREFIX}"
        )
    if not characters:
        raise InputError(f"segment name {name!r} has no character after its prefix {PREFIX}")
    for character in characters:
        if character not in CHARSET:
            raise InputError(f"segment name {name!r} contains {character!r}, which is not one of {CHARSET}")
    return -_pack_name(characters)


def _pack_name(characters: str) -> int:
    value = len(characters) << 58
    for place, character in enumerate(characters):
        value |= CHARSET.index(character) << (53 - 5 * place)
    return value | sum(map(CHARSET.index, characters)) & 7


def decode_shm_name_from_int64(value: SupportsIndex) -> str:
    """Return the name that a name word encodes, with the prefix psm_.

    Raises:
        CorruptReference: The value is not a valid name word.

    """
    word, unsigned = _unsigned(value, "name")
    length = unsigned >> 58
    if not 1 <= length <= _MAX_CHARACTERS:
        _corrupt(word, "name", f"its length {length} is not in [1, {_MAX_CHARACTERS}]")
    indices = [unsigned >> (53 - 5 * place) & 0x1F for place in range(length)]
    if max(indices) >= len(CHARSET):
        _corrupt(word, "name", f"one of its characters has the index {max(indices)}, which is not below {len(CHARSET)}")
    characters = "".join(CHARSET[index] for index in indices)
    if sum(indices) & 7 != unsigned & 7:
        _corrupt(
            word,
            "name",
            f"its checksum is {unsigned & 7}, but the checksum of its characters {characters} is {sum(indices) & 7}",
        )
    if _pack_name(characters) != unsigned:
        _corrupt(word, "name", f"bits after its characters {characters} are not 0")
    return PREFIX + characters


def encode_shape_to_int64(shape: Iterable[SupportsIndex]) -> int:
    """Return the shape word for a shape with 1 to 5 axes, a negative int64.

    Raises:
        InputError: `shape` is not iterable, or a size is not an integer of at least 1.
        LimitExceeded: The shape has no axes or more than 5 axes, or a size exceeds the limit of its axis.

    """
    if not isinstance(shape, Iterable):
        raise InputError(f"shape {shape!r} is not a sequence of integers")
    sizes = [_integer(size, "a size of a shape") for size in shape]
    if not 1 <= len(sizes) <= NUM_SHAPE_DIMS:
        raise LimitExceeded(f"shape {sizes} has {len(sizes)} axes; it must have 1 to {NUM_SHAPE_DIMS}")
    for axis, (size, bits) in enumerate(zip(sizes, PLAN[len(sizes)], strict=True)):
        if size < 1:
            raise InputError(f"shape {sizes} has size {size} on axis {axis}; it must be at least 1")
        if size > 1 << (bits - 1):
            raise LimitExceeded(f"shape {sizes} has size {size} on axis {axis}; the limit is {1 << (bits - 1)}")
    return -_pack_shape(sizes)


def _pack_shape(sizes: list[int]) -> int:
    value, place = len(sizes) << 60, 60
    for size, bits in zip(sizes, PLAN[len(sizes)], strict=True):
        place -= bits
        value |= size << place
    return value | value.bit_count() % 3


def decode_shape_from_int64(value: SupportsIndex) -> list[int]:
    """Return the sizes that a shape word encodes.

    Raises:
        CorruptReference: The value is not a valid shape word.

    """
    word, unsigned = _unsigned(value, "shape")
    num_dims = unsigned >> 60
    if num_dims not in PLAN:
        _corrupt(word, "shape", f"its number of axes {num_dims} is not in [1, {NUM_SHAPE_DIMS}]")
    checksum = (unsigned >> 3).bit_count() % 3
    if checksum != unsigned & 7:
        _corrupt(word, "shape", f"its checksum is {unsigned & 7}, but the checksum of its bits is {checksum}")
    sizes, place = [], 60
    for bits in PLAN[num_dims]:
        place -= bits
        sizes.append(unsigned >> place & ((1 << bits) - 1))
    for axis, (size, bits) in enumerate(zip(sizes, PLAN[num_dims], strict=True)):
        if not 1 <= size <= 1 << (bits - 1):
            _corrupt(word, "shape", f"its size {size} on axis {axis} is not in [1, {1 << (bits - 1)}]")
    return sizes


def _unsigned(value: SupportsIndex, kind: str) -> tuple[int, int]:
    """Return the word as an int, and its absolute value, which contains the bit fields."""
    word = _integer(value, f"a {kind} word")
    if not -(1 << 63) <= word < 0:
        raise CorruptReference(f"{word} is not a MindIE {kind} word: it is not in [-2^63, 0)")
    return word, -word


def _integer(value: SupportsIndex, what: str) -> int:
    """Convert an int, or an integer scalar of numpy or torch, to int. Raise InputError for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{what} is {value!r}; it must be an integer") from None


def _corrupt(word: int, kind: str, why: str) -> NoReturn:
    raise CorruptReference(f"{word} (-0x{-word:016x}) is not a MindIE {kind} word: {why}")
