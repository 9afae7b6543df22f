"""The tokenizer stage: items or messages in, ids with words out, pixels in shared memory."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any, ParamSpec, Self, get_args

import numpy as np
import torch
from transformers.utils import get_json_schema

from mindie_mm import faults
from mindie_mm.config import ContentFormat, MediaCaps
from mindie_mm.errors import (
    ContextLengthExceeded,
    FramesMiscounted,
    InputError,
    TokenOutOfRange,
    UnsupportedCheckpoint,
    naming,
)
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
from mindie_mm.media.caps import decoding_to_count
from mindie_mm.media.source import source_path
from mindie_mm.models import family_of, reading
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Family, Placeholder
from mindie_mm.paths import absolute
from mindie_mm.shm import PATH_FILE_NAME, Arena
from mindie_mm.tokenize.placeholders import Expansion, expand, insert
from mindie_mm.tokenize.planning import PlannedItem, Planner, content_digest
from mindie_mm.tokenize.prompt import Prompt, PromptOptions, put_words
from mindie_mm.tokenize.spelling import Rendered
from mindie_mm.tokenize.text import Encoded, TextEncoder
from mindie_mm.tokenize.truncate import truncate
from mindie_mm.tokenize.wires import MindIEWire, NativeWire, Wire, WireName

_PLAIN = PromptOptions()
_Args = ParamSpec("_Args")


def _counting_anew(make: Callable[_Args, Prompt]) -> Callable[_Args, Prompt]:
    """Decorate a method to make its prompt a second time after FramesMiscounted.

    The second time, videos are decoded to count their frames, so that the sampled frames depend on the true count.
    """

    @wraps(make)
    def made(*args: _Args.args, **kwargs: _Args.kwargs) -> Prompt:
        try:
            return make(*args, **kwargs)
        except FramesMiscounted:
            with decoding_to_count():
                return make(*args, **kwargs)

    return made


class Tokenizer:
    """A checkpoint's tokenizer and preprocessing, with shared memory to preprocess into. A context manager.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: type[Family],
        wire: WireName | Wire,
        caps: MediaCaps | None,
        content_format: ContentFormat = "auto",
    ) -> None:
        """Create a tokenizer. Use `from_pretrained` instead."""
        self._closed = False
        with reading(checkpoint, family):
            checkpoint = family.translated(checkpoint)
            self._processor = family.processor(checkpoint)
            tokenizer = family.tokenizer(checkpoint)
        placeholders = [self._processor.placeholder(kind) for kind in family.kinds]
        self._tokens = {placeholder.token for placeholder in placeholders}
        media_ids = {index for p in placeholders for index in (*p.before, p.token, *p.after)}
        plain = {token.content for token in tokenizer.added_tokens_decoder.values() if not token.special}
        stated = checkpoint.json("tokenizer.json").get("added_tokens", ())
        self.shown_tokens = [token["content"] for token in stated if token["special"] and token["content"] in plain]
        """Tokens that tokenizer.json calls special and the family does not: text, in prompts and in answers."""
        if self._processor.inserted:  # nothing spells them, so the tokenizer need not know them by name
            media_ids = self._tokens & tokenizer.added_tokens_decoder.keys()
        self._text = TextEncoder(checkpoint, tokenizer, media_ids, self._processor, content_format)
        spelled = [] if self._processor.inserted else placeholders
        self._marker_of = {placeholder: self._spelled_marker(placeholder) for placeholder in spelled}
        self._markers = frozenset(self._marker_of.values())
        if wire == "mindie":
            layouts = self._processor.mindie_layouts
            if missing := ", ".join(kind for kind in family.kinds if kind not in layouts):
                raise UnsupportedCheckpoint(f"{checkpoint.path}: its family has no MindIE layout of {missing}")
            wire = MindIEWire(layouts)
        self._wire = NativeWire() if wire == "native" else wire
        self._planner = Planner(self._processor, family.__name__, self._wire, caps or MediaCaps())

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        wire: WireName | Wire = "native",
        arena: Arena | None = None,
        family: str | None = None,
        caps: MediaCaps | None = None,
        content_format: ContentFormat = "auto",
    ) -> Self:
        """The tokenizer of the checkpoint directory `path`, None for the embedded one; `family` as in `family_of`.

        On the native wire items lie in `arena`; without one it makes its own at the first media item, and removes it
        on `close` or when the process ends well. With "mindie" each array lies in a segment of its own, as a worker of
        MindIE's reads it, and there is no arena. A `Wire` is one that the caller made. `caps`: of its media items.
        `content_format` is the form in which the chat template gets the content of messages.
        InputError, UnsupportedCheckpoint.
        """
        if not isinstance(wire, Wire) and wire not in get_args(WireName):
            raise InputError(f"wire is {wire!r}, it must be one of {', '.join(get_args(WireName))}")
        if arena is not None:
            if wire != "native":
                raise InputError(f"an arena was given; on the wire {wire!r} every array has a segment of its own")
            wire = NativeWire(arena)
        checkpoint = Checkpoint.open(path)
        return cls(checkpoint, family_of(checkpoint, family), wire, caps, content_format)

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
        """int64 [T], cpu: chat messages through the checkpoint's template; else as `tokenize`.

        `tools` may be Python functions, described by transformers from their docstrings.
        """
        parsed = parse_messages(messages)
        if tools := template_kwargs.get("tools"):  # described before they are escaped: what a docstring says is text
            template_kwargs["tools"] = [get_json_schema(tool) if callable(tool) else tool for tool in tools]
        path_file = _path_file(media_of_messages(parsed), shm_name_save_path)
        prompt = self.prompt_from_messages(parsed, path_file, add_generation_prompt, template_kwargs)
        return torch.from_numpy(prompt.ids)

    def tokenize_ids(
        self,
        ids: Sequence[int],
        media: Sequence[Mapping[str, Any]] = (),
        shm_name_save_path: str | Path | None = None,
    ) -> torch.Tensor:
        """int64 [T], cpu: a prompt that is encoded already, one placeholder for each of `media`, not expanded.

        The same as the prompt's text would make. Else as `tokenize`.
        """
        items = media_of(parse_inputs(media)) if media else []
        return torch.from_numpy(self.prompt_from_ids(ids, items, _path_file(items, shm_name_save_path)).ids)

    @_counting_anew
    def prompt_from_items(
        self, items: Sequence[Item], path_file: Path | None, options: PromptOptions = _PLAIN
    ) -> Prompt:
        """Return the prompt of `items`, joined without a template."""
        if options.max_prompt_tokens:
            self._text.check_items(items, options.max_prompt_tokens)
        planned = self._plan(media_of(items))
        spelled = self._spell(planned)
        pieces = [item if isinstance(item, Text) else next(spelled) for item in items]
        rendered = self._text.render_items(pieces)
        if not (options.add_special_tokens or planned):
            return self._bounded(Prompt(np.array(self._text.bare_ids(rendered), np.int64)), options)
        return self._prompt(self._encode(rendered, planned), planned, path_file, options)

    @_counting_anew
    def prompt_from_messages(
        self,
        messages: Sequence[Message],
        path_file: Path | None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        options: PromptOptions = _PLAIN,
    ) -> Prompt:
        """Return the prompt of chat messages, formatted with the chat template."""
        template_kwargs = template_kwargs or {}
        if options.max_prompt_tokens:
            self._text.check_messages(messages, template_kwargs, options.max_prompt_tokens)
        planned = self._plan(media_of_messages(messages))
        items = list(self._spell(planned))
        rendered = self._text.render_messages(messages, add_generation_prompt, template_kwargs, items)
        if options.max_prompt_tokens:
            self._text.check_rendered(rendered, options.max_prompt_tokens)
        return self._prompt(self._encode(rendered, planned), planned, path_file, options)

    def prompt_from_turn(
        self,
        items: Sequence[Item],
        path_file: Path | None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        options: PromptOptions = _PLAIN,
        *,
        chat: bool = True,
    ) -> Prompt:
        """Return the prompt of `items` as one user turn. Without `chat` or a chat template, join the items.

        Raises InputError if there are variables for a template but no template is used.
        """
        if chat and self.has_template:
            messages = [Message("user", tuple(items))]
            return self.prompt_from_messages(messages, path_file, add_generation_prompt, template_kwargs, options)
        if template_kwargs or not add_generation_prompt:
            raise InputError("there are variables of a chat template, and the prompt goes through none")
        return self.prompt_from_items(items, path_file, options)

    @_counting_anew
    def prompt_from_ids(self, ids: Sequence[int], media: Sequence[Media], path_file: Path | None) -> Prompt:
        """Return the prompt of ids with one placeholder per media item, or with none if the family inserts them.

        Raises TokenOutOfRange for an id that is not a token id. The engine checks that ids are in the vocabulary.
        """
        ids = [_token_id(index) for index in ids]
        planned = self._plan(media)
        encoded = self._text.replace_marker_ids(ids, self._markers, *self._spellings(planned))
        return self._prompt(encoded, planned, path_file)

    def close(self) -> None:
        """Remove the arena that this tokenizer made. Idempotent.

        MindIE segments remain until their path file is released. Later calls raise InputError.
        """
        self._closed = True
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(self, media: Sequence[Media]) -> list[PlannedItem]:
        if self._closed:
            raise InputError("the tokenizer is closed")
        return self._planner.plan(media)

    def _encode(self, rendered: Rendered, planned: Sequence[PlannedItem]) -> Encoded:
        rendered = Rendered(self._processor.prompt_text(rendered.text), rendered.restore)
        if self._markers:
            rendered = self._text.replace_markers(rendered, self._markers, *self._spellings(planned))
        return self._text.encode(rendered)

    def _prompt(
        self,
        encoded: Encoded,
        planned: Sequence[PlannedItem],
        path_file: Path | None,
        options: PromptOptions = _PLAIN,
    ) -> Prompt:
        faults.point("planned")
        processor, tokens = self._processor, self._tokens
        ids = processor.frame([*encoded.ids], len(planned))
        opening = _in_common(ids, processor.frame([*self._text.opening], len(planned)))
        if processor.inserted:
            items = [item.expansion for item in planned]
            prompt = insert(ids, processor.insert_at(ids), items, tokens, opening)
        else:
            reaches = zip(planned, encoded.items, strict=True)
            items = [_reaching(item.expansion, encoded.ids, *reach) for item, reach in reaches]
            prompt = expand(ids, items, tokens, opening)
        prompt = self._bounded(prompt, options)
        kept = planned[len(planned) - len(prompt.spans) :]
        return put_words(prompt, self._preprocess(kept, path_file, options.cache_salt))

    def _bounded(self, prompt: Prompt, options: PromptOptions) -> Prompt:
        """Return the prompt, truncated to its limit if allowed. Raise ContextLengthExceeded otherwise."""
        if not 0 < options.max_prompt_tokens < len(prompt):
            return prompt
        if not options.truncate:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; the limit is {options.max_prompt_tokens}"
            )
        return truncate(prompt, options.max_prompt_tokens)

    def _preprocess(self, planned: Sequence[PlannedItem], path_file: Path | None, salt: str) -> list[Sequence[int]]:
        """Write the items to shared memory and return the words of each. On any failure, free all of them."""
        if not planned:
            return []
        if path_file is None and self._wire.needs_path_file:
            raise InputError("media need a path file, to record what is to be freed")
        with ExitStack() as undo:
            words = [self._store(item, index, path_file, salt, undo) for index, item in enumerate(planned)]
            undo.pop_all()
        return words

    def _store(
        self, item: PlannedItem, index: int, path_file: Path | None, salt: str, undo: ExitStack
    ) -> Sequence[int]:
        digest = partial(content_digest, item.plan.settings, item.data, salt)
        with naming(f"media item {index} ({item.shape.kind})"):
            return self._wire.store(item.plan, item.shape, digest, path_file, undo)

    def _spell(self, planned: Sequence[PlannedItem]) -> Iterator[str]:
        """Yield the spelling of each item in a prompt."""
        numbers: Counter[Kind] = Counter()
        for item in planned:
            if self._processor.inserted:
                yield ""
                continue
            numbers[item.shape.kind] += 1
            head, tail = self._processor.caption(item.shape.kind, numbers[item.shape.kind])
            placeholder = item.expansion.placeholder
            before, after = self._text.spell(placeholder.before), self._text.spell(placeholder.after)
            marker = self._marker_of[placeholder]
            framed = marker if before and marker.startswith(before) else before + marker + after
            yield head + framed + tail

    def _spelled_marker(self, placeholder: Placeholder) -> str:
        return placeholder.marker or self._text.spell((placeholder.token,))

    def _spellings(self, planned: Sequence[PlannedItem]) -> tuple[list[str], list[str]]:
        """The marker of each item that the prompt spells, and the text that takes its place."""
        items = [] if self._processor.inserted else [item.expansion for item in planned]
        markers = [self._marker_of[item.placeholder] for item in items]
        texts = [item.spelling.text for item in items]
        return markers, [marker if text is None else text for marker, text in zip(markers, texts, strict=True)]


def _reaching(item: Expansion, ids: Sequence[int], start: int, stop: int) -> Expansion:
    """`item`, spelled in ids [start, stop)."""
    own = [index for index in range(start, stop) if ids[index] == item.placeholder.token]
    return replace(item, lead=own[0] - start, tail=stop - 1 - own[-1]) if own else item


def _in_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix of both."""
    equal = (one == other for one, other in zip(ids, others, strict=False))
    return sum(1 for _ in takewhile(bool, equal))


def _token_id(index: Any) -> int:
    """`index`, of any type of integers, as Python's. TokenOutOfRange."""
    try:
        token = operator.index(index)
    except TypeError:
        token = -1
    if isinstance(index, bool) or not 0 <= token < 2**31:
        raise TokenOutOfRange(f"{index!r} is no token id")
    return token


def _path_file(media: Sequence[Media], given: str | Path | None) -> Path | None:
    if given is not None:
        return absolute(given)
    if not media:
        return None
    for item in media:
        if (path := source_path(item)) is not None:
            return absolute(path).parent.parent / PATH_FILE_NAME
    raise InputError(
        f"shm_name_save_path is None and none of the {len(media)} media items is a file to put {PATH_FILE_NAME} near"
    )
