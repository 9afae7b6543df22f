"""Where a media item goes, and what words stand for it: an arena's block, or segments as MindIE has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import numpy as np

from mindie_mm import faults
from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Kind
from mindie_mm.nn.family import Plan
from mindie_mm.nn.mindie import InSegment, Layout
from mindie_mm.nn.splice import ITEM, MediaShape
from mindie_mm.shm import Arena, ArraySpec, free
from mindie_mm.shm.mindie import Segment, create_shm

WireName = Literal["native", "mindie"]
ARENA_BYTES = 256 * 2**20
"""Capacity of the arena that a tokenizer makes for itself."""


class Wire(ABC):
    """Stores media items."""

    @abstractmethod
    def check(self, plan: Plan, kind: Kind) -> None:
        """LimitExceeded for an item that has too few slots for its words."""

    @abstractmethod
    def store(
        self, plan: Plan, shape: MediaShape, digest: Callable[[], bytes], path_file: Path, undo: ExitStack
    ) -> Sequence[int]:
        """Allocates, writes and publishes an item; its words. What frees it again is pushed on `undo`.

        `digest` computes what names the content, for a wire that carries it.
        Raises what `plan.write` raises, ArenaFull, SharedMemoryError.
        """

    def close(self) -> None:
        """Gives up what is the wire's own. Idempotent."""


class NativeWire(Wire):
    """One block an item: a name word and a shape word; where there is one slot, the name word will do."""

    def __init__(self, arena: Arena | None) -> None:
        """Without `arena` it makes one at the first item, and removes it on `close` or at the interpreter's exit.

        Its own is replaced should another program take it away.
        """
        self._arena = arena
        self._close_arena: finalize[..., Any] | None = None

    def check(self, plan: Plan, kind: Kind) -> None:
        """A single slot will do."""

    def store(
        self, plan: Plan, shape: MediaShape, digest: Callable[[], bytes], path_file: Path, undo: ExitStack
    ) -> Sequence[int]:
        item = shape.to_array()
        specs = {**plan.specs, ITEM: ArraySpec(item.shape, "int64")}
        with self._own_arena().allocate(specs, path_file=path_file) as block:
            faults.point("allocated")
            block[ITEM][...] = item
            plan.write(block)
            faults.point("filled")
            ref = block.publish(digest())
        faults.point("published")
        undo.callback(free, ref)
        return ref.to_words()

    def close(self) -> None:
        if self._close_arena is not None:
            self._close_arena()
            self._close_arena, self._arena = None, None

    def _own_arena(self) -> Arena:
        if self._arena is not None and self._close_arena is not None and self._arena.lost:
            self.close()
        if self._arena is None:
            self._arena = Arena.create(ARENA_BYTES)
            self._close_arena = finalize(self, self._arena.close)
        return self._arena


class MindIEWire(Wire):
    """A segment an array, and the words that the family's layout says. It carries no digest."""

    def __init__(self, layouts: Mapping[Kind, Layout]) -> None:
        """`layouts` has every kind that the model takes."""
        self._layouts = layouts

    def check(self, plan: Plan, kind: Kind) -> None:
        if plan.num_features < (needed := self._layouts[kind].num_slots):
            raise LimitExceeded(f"the {kind} has {plan.num_features} features, MindIE's wire needs {needed} of them")

    def store(
        self, plan: Plan, shape: MediaShape, digest: Callable[[], bytes], path_file: Path, undo: ExitStack
    ) -> Sequence[int]:
        layout = self._layouts[shape.kind]
        segments: dict[str, Segment] = {}
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for field in layout.fields:
            spec = plan.mindie_specs[field.name]
            if isinstance(field, InSegment):
                segment = segments[field.name] = create_shm(spec.nbytes, path_file)
                undo.callback(segment.unlink)
                arrays[field.name] = np.ndarray(spec.shape, spec.dtype, segment.buf)
            else:
                arrays[field.name] = np.empty(spec.shape, spec.dtype)
        plan.write(arrays)
        return list(layout.words({name: segment.name for name, segment in segments.items()}, arrays))
