"""Rotary embeddings of Phi-4 (LongRoPE, arXiv 2402.13753), whose frequencies depend on the length of a sequence.

transformers chooses the frequencies by the longest sequence of a batch. Here, the last axis of the positions states
them for each sequence, so that a sequence does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import Positions

_TYPES = ("longrope", "su", "yarn")
"""Names of these frequencies in config.json. Phi had earlier names for them."""
_PLACES = ("rope_parameters", "rope_scaling")
_ORIGINAL = 4096
LONG_ROPE = "long_rope"
"""Key of a translated config.json with the published settings."""


@dataclass(frozen=True, slots=True)
class LongRope:
    """Settings of frequencies that depend on the length."""

    original: int
    """The short factors apply if prompt and output together have at most this number of tokens."""
    parameters: Mapping[str, Any]
    """The published settings."""

    @classmethod
    def read(cls, translated: Checkpoint) -> LongRope | None:
        """Read a checkpoint that `separated` returned. Return None if its frequencies do not depend on the length."""
        if (rope := translated.config.get(LONG_ROPE)) is None:
            return None
        stated = translated.config.get("original_max_position_embeddings")
        return cls(rope.get("original_max_position_embeddings") or stated or _ORIGINAL, rope)

    def positions(self, positions: Tensor) -> Positions:
        """Return positions with a further axis, which states whether the long factors apply.

        Args:
            positions: Positions of a prompt on the other axes, int64 [axes, length]. Only the first axis advances
                after the prompt.

        """
        held, length = positions.shape
        short, longer = (
            Positions(torch.cat([positions, torch.full((1, length), is_long)]), held_axes=held) for is_long in (0, 1)
        )
        return longer if length > self.original else replace(short, longer=longer, most_tokens=self.original)


def separated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with default frequencies, and the published settings under `LONG_ROPE`.

    A checkpoint whose frequencies do not depend on the length stays the same.
    """
    config = checkpoint.config
    name = next((name for name in _PLACES if isinstance(config.get(name), Mapping)), None)
    if name is None or (rope := config[name]).get("rope_type", rope.get("type")) not in _TYPES:
        return checkpoint
    plain = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    changed = {**config, name: {**plain, "rope_type": "default"}, LONG_ROPE: dict(rope)}
    return checkpoint.translated(changed, {}, checkpoint.renamings or ())


class ChosenRotary(nn.Module):
    """A rotary embedding with short and long factors."""

    def __init__(self, rotary: Any, rope: LongRope) -> None:
        """Take the frequencies of a rotary embedding with default frequencies, and apply the factors.

        Args:
            rotary: transformers' module.
            rope: The settings.

        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # late: only a loaded model needs it

        super().__init__()
        config = deepcopy(rotary.config)
        config.rope_parameters = {
            **config.rope_parameters,
            **rope.parameters,
            "rope_type": "longrope",
            "original_max_position_embeddings": rope.original,
        }
        found = [ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=rope.original + extra) for extra in (0, 1)]
        device = rotary.inv_freq.device
        self.frequencies = nn.Buffer(torch.stack([one for one, _ in found]).to(device), persistent=False)
        self.scaling: float = found[0][1]
        self._is_long: Tensor | None = None

    def choose(self, is_long: Tensor) -> None:
        """Set which rows have the long factors, int64 [T], 0 or 1."""
        self._is_long = is_long

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [1, T, rotated width] each, for positions int64 [1, T]."""
        assert self._is_long is not None
        angles = position_ids.unsqueeze(-1).float() * self.frequencies.index_select(0, self._is_long)
        both = torch.cat([angles, angles], -1)
        return (both.cos() * self.scaling).to(hidden.dtype), (both.sin() * self.scaling).to(hidden.dtype)
