"""Names and shapes that the weights of transformers' modules have in their authors' own checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """The conversion of a published weight into one of the module."""

    apply: Callable[[Tensor], Tensor]
    """The weight, where it can be a view of the published one."""
    published: Callable[[Shape], Shape]
    """Shape of the published weight, given the module's."""


SAME = Change(lambda weight: weight, lambda shape: shape)
TRANSPOSED = Change(lambda weight: weight.T, lambda shape: shape[::-1])
UNBATCHED = Change(lambda weight: weight[0], lambda shape: (1, *shape))
"""For published weights with an additional first axis of length 1."""


def third(index: int) -> Change:
    """Return the change that takes one of three equal parts: the query, key or value of one matrix for all three."""
    return Change(lambda weight: weight.chunk(3)[index], lambda shape: (3 * shape[0], *shape[1:]))


def grouped(part: slice, queries: int, width: int) -> Change:
    """Return the change that takes one part of each group of a matrix for all of attention, as InternLM2 has it.

    Args:
        part: Which heads of a group: the first `queries`, the next one, its key, or the last one, its value.
        queries: Query heads of a group, which has as many as share a key.
        width: Rows of a head.

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
    """Regular expression of whole names in transformers' module."""
    published: str
    """The published name, with groups of the pattern as `re.Match.expand` takes them."""
    change: Change = SAME


@dataclass(frozen=True, slots=True)
class RenamedWeights:
    """A checkpoint's weights for transformers' module, by the module's names."""

    weights: dict[str, Any]
    """Tensors by their names in the module."""
    published: Mapping[str, str]
    """Published names by names in the module."""
    others: dict[str, Tensor]
    """Weights of the checkpoint that have no name in the module, by their published names."""
    misfits: Sequence[tuple[str, Shape, Shape]]
    """Published names of weights of another shape, with their shape and the one that the module needs."""


def rename(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape], renamings: Sequence[Renaming]
) -> RenamedWeights:
    """Return published `weights` under the names of a module whose weights have these `shapes`."""
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
    """Return the published name of the module's weight `name`, and its change, by the first rule that fits."""
    for renaming in renamings:
        if found := re.fullmatch(renaming.pattern, name):
            return found.expand(renaming.published), renaming.change
    return name, SAME
