"""Published names and shapes of weights in checkpoints that do not have transformers' layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """The conversion of a published weight into a weight of the module."""

    apply: Callable[[Tensor], Tensor]
    """Function that converts the published weight, without a copy if possible."""
    published: Callable[[Shape], Shape]
    """Function from the shape of the module's weight to the shape of the published weight."""


SAME = Change(lambda weight: weight, lambda shape: shape)
TRANSPOSED = Change(lambda weight: weight.T, lambda shape: shape[::-1])
UNBATCHED = Change(lambda weight: weight[0], lambda shape: (1, *shape))
"""Conversion of published weights that have an additional first axis of length 1."""


def third(index: int) -> Change:
    """Return the change that selects the query (0), key (1) or value (2) part of a fused projection matrix."""
    return Change(lambda weight: weight.chunk(3)[index], lambda shape: (3 * shape[0], *shape[1:]))


def grouped(part: slice, queries: int, width: int) -> Change:
    """Return the change that selects one part of each head group of a fused projection matrix, as in InternLM2.

    Args:
        part: Heads to select from a group. A group has `queries` query heads, then a key head, then a value head.
        queries: Number of query heads in a group. They share the key head and the value head.
        width: Number of rows of a head.

    """
    heads = queries + 2
    taken = len(range(*part.indices(heads)))
    return Change(
        lambda weight: weight.unflatten(0, (-1, heads, width))[:, part].flatten(0, 2),
        lambda shape: (shape[0] // taken * heads, *shape[1:]),
    )


@dataclass(frozen=True, slots=True)
class Renaming:
    """A rule for the published names of some weights."""

    pattern: str
    """Regular expression that must match the full name in the transformers module."""
    published: str
    """Template of the published name for `re.Match.expand`."""
    change: Change = SAME


@dataclass(frozen=True, slots=True)
class RenamedWeights:
    """The weights of a checkpoint under their names in a transformers module."""

    weights: dict[str, Any]
    """Tensors by their names in the module."""
    published: Mapping[str, str]
    """Published name of each weight, by its name in the module."""
    others: dict[str, Tensor]
    """Weights of the checkpoint that the module does not have, by their published names."""
    misfits: Sequence[tuple[str, Shape, Shape]]
    """Published name of each weight of the wrong shape, its shape, and the shape that the module needs."""


def rename(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape], renamings: Sequence[Renaming]
) -> RenamedWeights:
    """Convert published weights to the weights of a module.

    Args:
        weights: Published names and tensors.
        shapes: Shapes of the module's weights by their names.
        renamings: Rules, in order of precedence. A weight without a matching rule keeps its name.

    """
    rules = {name: _rule(name, renamings) for name in shapes}
    wanted: dict[str, list[str]] = {}
    for name, (published, _) in rules.items():
        wanted.setdefault(published, []).append(name)
    renamed = RenamedWeights({}, {name: published for name, (published, _) in rules.items()}, {}, misfits := [])
    for published, weight in weights:
        if published not in wanted:
            renamed.others[published] = weight
        for name in wanted.get(published, ()):
            change = rules[name][1]
            if tuple(weight.shape) == (needed := change.published(shapes[name])):
                renamed.weights[name] = change.apply(weight)
            else:
                misfits.append((published, tuple(weight.shape), needed))
    return renamed


def _rule(name: str, renamings: Sequence[Renaming]) -> tuple[str, Change]:
    """Return the published name and the change of the module's weight `name`, by the first rule that matches."""
    for renaming in renamings:
        if match := re.fullmatch(renaming.pattern, name):
            return match.expand(renaming.published), renaming.change
    return name, SAME
