"""Stores that write MindIE's format (docs/wire-format.md, section 5), in which each array has its own segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import InputError, LimitExceeded, OperationalError, UnsupportedCheckpoint, naming
from mindie_mm.inputs import Kind
from mindie_mm.nn.family import Family, Plan, Processor
from mindie_mm.nn.mindie import InSegment, InWord, Joined, Layout, OfPrompt, PromptLayout
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.mindie import Segment, create_shm, encode_shape_to_int64, encode_shm_name_to_int64
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.prompt import MediaSpan, Prompt, Words, put_words
from mindie_mm.tokenize.stores import Store, Writer


def mindie_store(processor: Processor, family: type[Family], where: str) -> Store:
    """Return the store for a family.

    Raise UnsupportedCheckpoint if MindIE has no layout for one of the family's kinds of media.
    """
    layouts, whole = processor.traits.mindie_layouts, processor.traits.mindie_prompt_layout
    known = layouts.keys() if whole is None else whole.kinds
    if missing := ", ".join(kind for kind in family.kinds if kind not in known):
        raise UnsupportedCheckpoint(f"{where}: its family has no MindIE layout for {missing}")
    if whole is not None:
        return MindIEPromptStore(whole, processor.mindie_pad)
    return MindIEItemStore(layouts, processor.mindie_pad)


class MindIEItemStore(Store):
    """A store that keeps each array of an item in its own segment, without a digest."""

    def __init__(self, layouts: Mapping[Kind, Layout], pad: int) -> None:
        """Create a store.

        Args:
            layouts: Layouts of all kinds of media that the model supports.
            pad: See `Processor.mindie_pad`.

        """
        self._layouts = layouts
        self._pad = pad

    def check(self, plan: Plan, kind: Kind) -> None:
        layout = self._layouts[kind]
        _check_readable(plan, kind, layout.fields)
        runs = next(iter(plan.mindie_specs.values())).shape[0] if layout.per_run else 1
        _check_slots(plan.num_features // runs, layout.least_features, kind)

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Prompt]:
        words: list[Words] = []
        with ExitStack() as undo:
            for item in items:
                with naming(item.name):
                    words.append(await self._store(item, path_file, writer, undo))
            undo.pop_all()
        left = iter(words)
        return [put_words(prompt, islice(left, len(prompt.spans))) for prompt in prompts]

    async def _store(self, item: PlannedItem, path_file: Path | None, writer: Writer, undo: ExitStack) -> Words:
        """Write an item, and return its handle words and placeholders."""
        assert path_file is not None
        layout, specs = self._layouts[item.shape.kind], item.plan.mindie_specs
        if layout.per_run:
            ((name, spec),) = specs.items()
            rows = np.empty(spec.shape, spec.dtype)
            await writer.write(item, {name: rows})
            return [*_words_of_runs(item, rows, path_file, undo)]
        segments: dict[str, Segment] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for field in layout.fields:
            spec = specs[field.name]
            if isinstance(field, InSegment):
                segments[field.name], arrays[field.name] = _segment(spec, path_file, undo)
            else:
                arrays[field.name] = np.empty(spec.shape, spec.dtype)
        await writer.write(item, arrays)
        words = list(layout.words({name: segment.name for name, segment in segments.items()}, arrays))
        if layout.enclosed:
            token, num_pads = item.placeholder.token, item.plan.num_features - len(words) - 2
            return [token, *words, *[self._pad] * num_pads, token]
        return words


class MindIEPromptStore(Store):
    """A store that keeps the arrays of all items of a prompt together, without digests."""

    def __init__(self, layout: PromptLayout, pad: int) -> None:
        """Create a store. `pad` is `Processor.mindie_pad`."""
        self._layout = layout
        self._pad = pad

    def check(self, plan: Plan, kind: Kind) -> None:
        fields = [field for field in self._layout.fields if isinstance(field, Joined) and field.kind == kind]
        _check_readable(plan, kind, fields)

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None, writer: Writer
    ) -> list[Prompt]:
        left, filled = iter(items), list[Prompt]()
        with ExitStack() as undo:
            for prompt in prompts:
                own = [*islice(left, len(prompt.spans))]
                filled.append(await self._fill_prompt(prompt, own, path_file, writer, undo) if own else prompt)
            undo.pop_all()
        return filled

    async def _fill_prompt(
        self, prompt: Prompt, items: Sequence[PlannedItem], path_file: Path | None, writer: Writer, undo: ExitStack
    ) -> Prompt:
        assert path_file is not None
        prompt = self._unframed(prompt, items)
        start = self._start(prompt, items[0])
        parts: list[dict[str, NDArray[Any]]] = [{} for _ in items]
        words: list[int] = []
        for field in self._layout.fields:
            if isinstance(field, OfPrompt):
                words += _stored(_of_prompt(field, prompt), path_file, undo)
                continue
            own = [i for i, item in enumerate(items) if item.shape.kind == field.kind]
            if not own:
                words += [0, 0]
                continue
            shapes = [items[i].plan.mindie_specs[field.name].shape for i in own]
            stops = np.cumsum([shape[0] for shape in shapes]).tolist()
            segment, joined = _segment(ArraySpec((stops[-1], *shapes[0][1:]), field.dtype), path_file, undo)
            for i, shape, stop in zip(own, shapes, stops, strict=True):
                parts[i][field.name] = joined[stop - shape[0] : stop]
            words += [encode_shm_name_to_int64(segment.name), encode_shape_to_int64(joined.shape)]
        for item, arrays in zip(items, parts, strict=True):
            with naming(item.name):
                await writer.write(item, arrays)
        ids = np.full_like(prompt.ids, self._pad) if self._layout.replaces_ids else prompt.ids.copy()
        ids[start : start + len(words)] = words
        return replace(prompt, ids=ids)

    def _unframed(self, prompt: Prompt, items: Sequence[PlannedItem]) -> Prompt:
        """Drop the ids before and after items whose kind is in `PromptLayout.unframed`."""
        keep = np.ones(len(prompt), bool)
        spans: list[MediaSpan] = []
        for span, item in zip(prompt.spans, items, strict=True):
            before, after = item.placeholder.before, item.placeholder.after
            first, last = span.start - span.lead, span.stop + span.tail
            frame = np.r_[first : first + len(before), last - len(after) : last]
            start = span.start - int(np.count_nonzero(~keep))
            lead, tail = span.lead, span.tail
            if span.kind in self._layout.unframed and prompt.ids[frame].tolist() == [*before, *after]:
                keep[frame] = False
                start, lead, tail = start - len(before), lead - len(before), tail - len(after)
            spans.append(MediaSpan(start, start + span.stop - span.start, span.kind, span.token, lead, tail))
        return replace(prompt, ids=prompt.ids[keep], spans=tuple(spans))

    def _start(self, prompt: Prompt, first: PlannedItem) -> int:
        """Return the index of the first handle word. Raise LimitExceeded if the handle words do not fit."""
        if self._layout.replaces_ids:
            if len(prompt) < self._layout.num_slots:
                raise LimitExceeded(
                    f"the prompt has {len(prompt)} tokens; MindIE's wire format needs at least {self._layout.num_slots}"
                )
            return 0
        span = prompt.spans[0]
        own = prompt.ids[span.start : span.stop] == span.token
        start = span.start + int(np.flatnonzero(own)[0])
        run = prompt.ids[start : span.stop] == span.token
        with naming(first.name):
            _check_slots(len(run) if run.all() else int(np.flatnonzero(~run)[0]), self._layout.num_slots + 2, span.kind)
        return start + 1


def _check_readable(plan: Plan, kind: Kind, fields: Sequence[InSegment | InWord | Joined]) -> None:
    """Raise InputError if MindIE's format cannot represent an item, and OperationalError for arrays of other fields."""
    if not plan.mindie_specs:
        raise InputError(
            f"MindIE's workers cannot read this {kind}, because embeddings were given, or because the workers would "
            "compute a wrong number of features for its width and height; give an image, an audio clip or a video, and "
            "pad images to a square"
        )
    expected = {field.name: "int64" if isinstance(field, InWord) else field.dtype for field in fields}
    if (found := {name: spec.dtype for name, spec in plan.mindie_specs.items()}) != expected:
        raise OperationalError(f"a decoder planned the arrays {found}; the {kind} has the arrays {expected}")


def _check_slots(num_features: int, needed: int, kind: Kind) -> None:
    if num_features < needed:
        raise LimitExceeded(f"the {kind} has {num_features} features; MindIE's wire format needs at least {needed}")


def _words_of_runs(item: PlannedItem, rows: NDArray[Any], path_file: Path, undo: ExitStack) -> Iterator[int]:
    """Store each row of an item's array in its own segment.

    For each row, yield its handle words and the placeholders after them.
    """
    run_length = item.plan.num_features // len(rows)
    for i in range(len(rows)):
        segment, array = _segment(ArraySpec(rows[i : i + 1].shape, str(rows.dtype)), path_file, undo)
        array[...] = rows[i : i + 1]
        yield encode_shm_name_to_int64(segment.name)
        yield encode_shape_to_int64(array.shape)
        yield from [item.placeholder.token] * (run_length - 2)


def _segment(spec: ArraySpec, path_file: Path, undo: ExitStack) -> tuple[Segment, NDArray[Any]]:
    """Create a segment and return it with its array."""
    segment = create_shm(spec.nbytes, path_file)
    undo.callback(segment.unlink)
    return segment, np.ndarray(spec.shape, spec.dtype, segment.buf)


def _stored(array: NDArray[Any], path_file: Path, undo: ExitStack) -> tuple[int, int]:
    """Store an array in a segment and return its two handle words."""
    segment, place = _segment(ArraySpec(array.shape, str(array.dtype)), path_file, undo)
    place[...] = array
    return encode_shm_name_to_int64(segment.name), encode_shape_to_int64(array.shape)


def _of_prompt(field: OfPrompt, prompt: Prompt) -> NDArray[np.int64]:
    """Return the array of a field. The array treats the prompt as if each item had only one placeholder."""
    keep = np.ones(len(prompt), bool)
    for span in prompt.spans:
        keep[span.start + 1 : span.stop] = False
    ids = prompt.ids[keep][np.newaxis]
    return ids if field.name == "input_ids" else np.ones_like(ids)
