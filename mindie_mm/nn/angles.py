"""Angles of rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_POSITIONS, _MOST_POSITIONS = 2**10, 2**14
"""Initial and maximum length of a table. With heads of 128 dimensions, a table of the maximum length takes 16 MiB."""
_MOST_RESIDENT = 2**17
"""Maximum length of a table on an accelerator. In bfloat16, such a table takes 64 MiB for heads of 128 dimensions."""
MOST_ROWS = 64
"""Maximum number of rows that are looked up in a table. In larger steps, the layers determine the time."""


@dataclass(frozen=True, slots=True)
class Angles:
    """Angles of rotary embeddings in the form that needs the fewest operators."""

    cos: Tensor
    """[T, 1, head_dim]."""
    sin: Tensor
    """[T, 1, head_dim]. The first half is negated."""

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Angles:
        """Return the angles for transformers' cosines and sines, [1, T, head_dim] each."""
        first, second = sin[0].unsqueeze(1).chunk(2, -1)
        return cls(cos[0].unsqueeze(1), torch.cat([-first, second], -1))

    def rotate(self, values: Tensor) -> Tensor:
        """Rotate [T, heads, head_dim]. Each element of the first half of a head pairs with an element of the second."""
        return torch.addcmul(values * self.cos, values.roll(values.shape[-1] // 2, -1), self.sin)


class AngleTable:
    """A rotary embedding of transformers that is computed once for each position.

    Tokens of decode steps have the same position on all axes, so a table over one axis is sufficient.
    """

    def __init__(self, rotary_emb: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        """Create an empty table.

        Args:
            rotary_emb: Function from hidden states, [1, T, hidden], and positions, int64 [1, T] or [axes, 1, T], to
                cosines and sines. The angles of a position must not depend on the other positions.

        """
        self._rotary_emb = rotary_emb
        self._table: Angles | None = None

    def angles(self, hidden: Tensor, positions: Tensor, top: int | None = None) -> Angles:
        """Return the angles of positions, int64 [axes, T].

        The hidden states, [T, hidden], determine the dtype. `top` is not used, because reading positions is fast here.
        """
        if hidden.device.type != "cpu" or positions.shape[1] > MOST_ROWS:
            return self._computed(hidden, positions)
        first, *others = positions.tolist()
        if (top := max(first)) >= _MOST_POSITIONS or any(other != first for other in others):
            return self._computed(hidden, positions)
        table = self._table
        if table is None or top >= len(table.cos):
            length = max(_FIRST_POSITIONS, 1 << top.bit_length())
            table = self._table = self._computed(hidden, torch.arange(length).expand(len(positions), -1))
        return Angles(table.cos.index_select(0, positions[0]), table.sin.index_select(0, positions[0]))

    def _computed(self, hidden: Tensor, positions: Tensor) -> Angles:
        axes = positions if len(positions) == 1 else positions.unsqueeze(1)
        return Angles.of(*self._rotary_emb(hidden.unsqueeze(0), axes))


class ResidentAngles:
    """A rotary embedding on an accelerator, with the angles of all positions in a table."""

    def __init__(self, rotary_emb: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], num_axes: int, size: int) -> None:
        """Create an empty table.

        Args:
            rotary_emb: As in `AngleTable`.
            num_axes: Number of axes of the positions.
            size: Number of positions in the table. It is limited to `_MOST_RESIDENT`.

        """
        self._rotary_emb = rotary_emb
        self._positions = torch.arange(min(size, _MOST_RESIDENT)).expand(num_axes, -1)
        self._table: tuple[Tensor, Tensor] | None = None

    def angles(self, hidden: Tensor, positions: Tensor, top: int | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [T, head_dim] each.

        Args:
            hidden: Hidden states, [T, hidden], which determine the dtype.
            positions: int64 [axes, T].
            top: `PagedBatch.top_position`.

        """
        if top is None or top >= self._positions.shape[1]:
            return self._computed(hidden, positions)
        if self._table is None:
            self._table = self._computed(hidden, self._positions.to(hidden.device))
        cos, sin = self._table
        return cos.index_select(0, positions[0]), sin.index_select(0, positions[0])

    def _computed(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary_emb(hidden.unsqueeze(0), positions if len(positions) == 1 else positions.unsqueeze(1))
        return cos[0], sin[0]
