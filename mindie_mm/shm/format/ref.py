"""A reference to a block in an arena: what its words carry, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from mindie_mm.errors import InputError
from mindie_mm.shm.format import words


@dataclass(frozen=True, slots=True)
class Ref:
    """Names one block at one generation, with dtype and shape of its first array. Equal by value."""

    arena: int
    """The arena's number, 0 to 65,535: the file `mindie_mm-<4 hex digits>`."""
    block: int
    """The entry in the arena's table, 0 to 16,383."""
    generation: int
    """How the entry was numbered when the block was allocated, 1 to 2^24 - 1; it differs at each reuse."""
    dtype: str | None = None
    """Dtype of the block's first array; None if the Ref was read from a name word alone."""
    shape: tuple[int, ...] | None = None
    """Its shape; None as above."""

    @property
    def name_word(self) -> int:
        """The word that stands alone where an item has one slot."""
        return words.encode_name(self.arena, self.block, self.generation)

    def to_words(self) -> tuple[int, int]:
        """(name word, shape word): two negative int64. LimitExceeded for what does not fit."""
        if self.dtype is None or self.shape is None:
            raise InputError(f"{self} was read from a name word alone: it has no shape word")
        name_word = self.name_word
        return name_word, words.encode_shape(name_word, self.dtype, self.shape)

    @classmethod
    def from_words(cls, name_word: SupportsIndex, shape_word: SupportsIndex | None) -> Ref:
        """The Ref that the words carry; CorruptReference if one is damaged, or none of ours."""
        try:
            name_word = index(name_word)
            shape_word = None if shape_word is None else index(shape_word)
        except TypeError as error:
            raise InputError(f"words {name_word!r} and {shape_word!r} must be integers") from error
        arena, block, generation = words.decode_name(name_word)
        if shape_word is None:
            return cls(arena, block, generation)
        return cls(arena, block, generation, *words.decode_shape(name_word, shape_word))
