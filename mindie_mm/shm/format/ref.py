"""The reference to a shared-memory block that an item's handle words encode."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from mindie_mm.errors import InputError
from mindie_mm.shm.format import words


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
        """Name word of the block. For an item with a single placeholder, the prompt contains only this word."""
        return words.encode_name(self.arena, self.block, self.generation)

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
        return name_word, words.encode_shape(name_word, self.dtype, self.shape)

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
        arena, block, generation = words.decode_name(name_word)
        if shape_word is None:
            return cls(arena, block, generation)
        return cls(arena, block, generation, *words.decode_shape(name_word, shape_word))
