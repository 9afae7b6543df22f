"""The tokenizer stage: items or messages in, ids with words out, pixels in shared memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
import torch

from mindie_mm import faults
from mindie_mm.errors import ContextLengthExceeded, InputError, LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import (
    Item,
    Kind,
    Media,
    Message,
    Text,
    media_of,
    media_of_messages,
    parse_inputs,
    parse_messages,
)
from mindie_mm.media.image import Data
from mindie_mm.media.source import read_source, source_path
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Family, Plan
from mindie_mm.shm import PATH_FILE_NAME, Arena
from mindie_mm.tokenize.placeholders import Run, expand
from mindie_mm.tokenize.prompt import Prompt, put_words
from mindie_mm.tokenize.text import Rendered, TextEncoder
from mindie_mm.tokenize.truncate import truncate
from mindie_mm.tokenize.wires import MindIEWire, NativeWire, Wire, WireName

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Planned:
    """A media item, read and planned, not preprocessed yet."""

    run: Run
    plan: Plan
    data: Data


class Tokenizer:
    """A checkpoint's tokenizer and preprocessing, with shared memory to preprocess into. A context manager.

    Not for use by several threads at once.
    """

    def __init__(self, checkpoint: Checkpoint, family: type[Family], wire: WireName, arena: Arena | None) -> None:
        """For `from_pretrained`."""
        self._processor = family.processor(checkpoint)
        placeholders = [self._processor.placeholder(kind) for kind in family.kinds]
        media_ids = {index for p in placeholders for index in (*p.before, p.token, *p.after)}
        self._text = TextEncoder(checkpoint, media_ids)
        self._wire: Wire
        if wire == "native":
            self._wire = NativeWire(arena)
            return
        layouts = self._processor.mindie_layouts
        if missing := set(family.kinds) - set(layouts):
            raise UnsupportedCheckpoint(f"{checkpoint.path}: its family has no MindIE layout of {', '.join(missing)}")
        self._wire = MindIEWire(layouts)

    @classmethod
    def from_pretrained(
        cls, path: str | Path | None = None, wire: WireName = "native", arena: Arena | None = None
    ) -> Self:
        """The tokenizer of the checkpoint directory `path`, None for the embedded one.

        On the native wire items lie in `arena`; without one it makes its own at the first media item, and removes it
        on `close` or at the interpreter's exit. With "mindie" each array lies in a segment of its own, as a worker of
        MindIE's reads it, and there is no arena. InputError, UnsupportedCheckpoint.
        """
        if wire not in get_args(WireName):
            raise InputError(f"wire is {wire!r}, it must be one of {', '.join(get_args(WireName))}")
        if wire != "native" and arena is not None:
            raise InputError(f"an arena was given; on the wire {wire!r} every array has a segment of its own")
        checkpoint = Checkpoint.open(path)
        return cls(checkpoint, family_of(checkpoint), wire, arena)

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._text.has_template

    def tokenize(
        self, inputs: Sequence[Mapping[str, Any]], shm_name_save_path: str | Path | None = None
    ) -> torch.Tensor:
        """int64 [T], cpu: the items one after another, no template, words on the first slots of each media run.

        References are recorded in the file `shm_name_save_path`; None means
        dirname(dirname(first media path))/shm_name.txt. Whoever is done with the ids releases that file.
        Raises InputError and below, ArenaFull, SharedMemoryError; then nothing stays allocated.
        """
        items = parse_inputs(inputs)
        media = media_of(items)
        prompt = self.prompt_from_items(items, _path_file(media, shm_name_save_path))
        return torch.from_numpy(prompt.ids)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        shm_name_save_path: str | Path | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> torch.Tensor:
        """int64 [T], cpu: chat messages through the checkpoint's template; else as `tokenize`."""
        parsed = parse_messages(messages)
        path_file = _path_file(media_of_messages(parsed), shm_name_save_path)
        prompt = self.prompt_from_messages(parsed, path_file, add_generation_prompt, template_kwargs)
        return torch.from_numpy(prompt.ids)

    def prompt_from_items(
        self, items: Sequence[Item], path_file: Path | None, *, max_tokens: int = 0, truncating: bool = False
    ) -> Prompt:
        """The prompt of `items`, one after another. `max_tokens` 0 is no limit; ContextLengthExceeded above it."""
        media = media_of(items)
        self._check_counts(media)
        rendered = self._text.render_items([item if isinstance(item, Text) else self._spell(item) for item in items])
        return self._prompt(rendered, media, path_file, max_tokens, truncating, add_special_tokens=True)

    def prompt_from_messages(
        self,
        messages: Sequence[Message],
        path_file: Path | None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        max_tokens: int = 0,
        truncating: bool = False,
    ) -> Prompt:
        """The prompt of chat messages, through the checkpoint's template."""
        media = media_of_messages(messages)
        self._check_counts(media)
        rendered = self._text.render_messages(messages, add_generation_prompt, template_kwargs or {})
        return self._prompt(rendered, media, path_file, max_tokens, truncating, add_special_tokens=False)

    def close(self) -> None:
        """Removes the arena that this tokenizer made; segments go when their path file is released. Idempotent."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompt(
        self,
        rendered: Rendered,
        media: Sequence[Media],
        path_file: Path | None,
        max_tokens: int,
        truncating: bool,
        add_special_tokens: bool,
    ) -> Prompt:
        planned = [self._plan(item, index) for index, item in enumerate(media)]
        faults.point("planned")
        ids = self._text.encode(rendered, add_special_tokens)
        prompt = expand(ids, [item.run for item in planned])
        if max_tokens and len(prompt) > max_tokens:
            if not truncating:
                raise ContextLengthExceeded(f"the prompt has {len(prompt)} tokens; the limit is {max_tokens}")
            prompt = truncate(prompt, max_tokens)
        kept = planned[len(planned) - len(prompt.spans) :]
        return put_words(prompt, self._preprocess(kept, path_file))

    def _plan(self, media: Media, index: int) -> _Planned:
        try:
            data = read_source(media)
            plan = self._processor.plan(media, data)
            self._wire.check(plan, media.kind)
        except InputError as error:
            raise type(error)(f"media item {index} ({media.kind}): {error}") from error
        return _Planned(Run(media.kind, self._processor.placeholder(media.kind), plan.num_tokens), plan, data)

    def _preprocess(self, planned: Sequence[_Planned], path_file: Path | None) -> list[Sequence[int]]:
        """The words of each item, now in shared memory; on any failure nothing of them stays there."""
        if not planned:
            return []
        if path_file is None:
            raise InputError("media need a path file, to record what is to be freed")
        with ExitStack() as undo:
            words = [self._store(item, index, path_file, undo) for index, item in enumerate(planned)]
            undo.pop_all()
        return words

    def _store(self, item: _Planned, index: int, path_file: Path, undo: ExitStack) -> Sequence[int]:
        digest = partial(content_digest, item.plan.settings, item.data)
        try:
            return self._wire.store(item.plan, item.run.kind, digest, path_file, undo)
        except InputError as error:
            raise type(error)(f"media item {index} ({item.run.kind}): {error}") from error

    def _spell(self, media: Media) -> str:
        placeholder = self._processor.placeholder(media.kind)
        return self._text.spell((*placeholder.before, placeholder.token, *placeholder.after))

    def _check_counts(self, media: Sequence[Media]) -> None:
        limits: Mapping[Kind, int] = self._processor.limits()
        for kind, limit in limits.items():
            number = sum(item.kind == kind for item in media)
            if number > limit:
                raise LimitExceeded(f"the prompt has {number} items of kind {kind}; the model's limit is {limit}")
        for item in media:
            self._processor.placeholder(item.kind)


def content_digest(settings: str, data: Data) -> bytes:
    """Names the content of an item's block: equal sources under equal settings (`Plan.settings`) make equal arrays."""
    digest = hashlib.blake2b(settings.encode(), digest_size=DIGEST_BYTES)
    if isinstance(data, np.ndarray):
        digest.update(f"\0pixels {data.shape}\0".encode())
        digest.update(np.ascontiguousarray(data).data)
    else:
        digest.update(b"\0bytes\0")
        digest.update(data)
    return digest.digest()


def _path_file(media: Sequence[Media], given: str | Path | None) -> Path | None:
    if given is not None:
        return Path(given)
    if not media:
        return None
    for item in media:
        if (path := source_path(item)) is not None:
            return path.absolute().parent.parent / PATH_FILE_NAME
    raise InputError(
        f"shm_name_save_path is None and none of the {len(media)} media items is a file to put {PATH_FILE_NAME} near"
    )
