"""The tokenizer for scripts and batches. It returns ids with handle words, and writes media to shared memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import torch
from msgspec import structs
from transformers.utils import get_json_schema

from mindie_mm.errors import InputError
from mindie_mm.inputs import Media, require_switches, type_of
from mindie_mm.media.source import source_path
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Processor
from mindie_mm.processes.alone import run_alone
from mindie_mm.processes.loop_thread import LoopThread
from mindie_mm.settings.config import ContentFormat, MediaCaps, Switch, WorkerConfig
from mindie_mm.settings.limits import PromptLimits, converted
from mindie_mm.settings.paths import absolute
from mindie_mm.shm import PATH_FILE_NAME, Arena
from mindie_mm.shm.owner.arena import DEFAULT_TIMEOUT_S
from mindie_mm.tokenize.mindie_stores import mindie_store
from mindie_mm.tokenize.prompt import PlannedPrompt, Prompt, PromptOptions
from mindie_mm.tokenize.prompts import Prompts
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_ids, request_of_items, request_of_messages
from mindie_mm.tokenize.setup import Setup
from mindie_mm.tokenize.stores import ARENA_BYTES, ArenaStore, Store, WireName

T = TypeVar("T")


class Tokenizer:
    """A checkpoint's tokenizer and media preprocessing. Use it as a context manager.

    Only one thread may use it at a time. Without `with`, its decoders run until `close` is called or the interpreter
    exits.
    """

    def __init__(
        self, prompts: Prompts, loop: LoopThread | None = None, resources: AsyncExitStack | None = None
    ) -> None:
        """Take ownership of the arguments. Call `from_pretrained` instead."""
        self.prompts = prompts
        """Maker of prompts."""
        self._loop = loop
        self._end_decoders: Callable[[], object] = lambda: None
        if loop is not None and resources is not None:
            self._end_decoders = weakref.finalize(self, loop.close, resources.aclose)
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        wire: WireName | Store = "native",
        arena: Arena | None = None,
        family: str | None = None,
        caps: MediaCaps | None = None,
        content_format: ContentFormat = "auto",
        parse_special: Switch = "on",
        decoders: int = 0,
        limit_mm_per_prompt: PromptLimits | None = None,
        max_item_bytes: int = ARENA_BYTES,
    ) -> Self:
        """Return the tokenizer of a checkpoint.

        Args:
            path: Checkpoint directory, or None for the embedded checkpoint.
            wire: "native" stores items in an arena. "mindie" stores each array in a separate shared-memory segment,
                which MindIE's workers can read. A `Store` object is used directly.
            arena: Arena of the native wire. If it is None, the tokenizer creates an arena at the first media item, and
                removes it on `close` or at a normal exit.
            family: Same as in `family_of`.
            caps: Limits on media items.
            content_format: Format in which the chat template receives the content of messages.
            parse_special: Default of this argument of `tokenize`: "on" or "off".
            decoders: Number of processes that decode the items of a prompt in parallel. With 0, this process decodes,
                and `caps.max_decode_bytes` and `caps.max_decode_s` do not apply.
            max_item_bytes: Maximum total size of the arrays of an item in decoder processes, if `wire` is a `Store`.
                An arena limits the arrays itself.
            limit_mm_per_prompt: Maximum number of items in one prompt, such as {"image": 4, "video": 1}.

        Raises:
            InputError: An argument is invalid, or the arguments contradict each other.
            UnsupportedCheckpoint: The checkpoint is not supported.
            ProcessDied: The decoders cannot be started.

        """
        if not isinstance(wire, Store) and not (isinstance(wire, str) and wire in get_args(WireName)):
            raise InputError(f"wire={wire!r} must be one of {', '.join(get_args(WireName))}")
        if not isinstance(arena, Arena | None):
            raise InputError(f"arena is {type_of(arena)}; it must be an Arena")
        if not isinstance(caps, MediaCaps | None):
            raise InputError(f"caps is {type_of(caps)}; it must be MediaCaps")
        converted("content_format", content_format, ContentFormat)
        converted("parse_special", parse_special, Switch)
        if arena is not None and wire != "native":
            raise InputError(
                f"arena is given, but the wire {wire!r} stores every array in its own segment; leave arena out"
            )
        if decoders and wire == "mindie":
            raise InputError(f"decoders={decoders} must be 0 with the wire {wire!r}, which has no arena")
        limits = converted(
            "limit_mm_per_prompt", {} if limit_mm_per_prompt is None else limit_mm_per_prompt, PromptLimits
        )
        checkpoint = Checkpoint.open(path)
        store: Store | Callable[[Processor], Store]
        if wire == "mindie":
            model_family = family_of(checkpoint, family)
            store = partial(mindie_store, family=model_family, where=str(checkpoint.path))
        elif isinstance(wire, Store):
            store = wire
        else:
            # Threads that share decoders may wait as long as the requests of a service.
            store = ArenaStore(arena, wait_s=WorkerConfig().arena_wait_s if decoders else DEFAULT_TIMEOUT_S)
            max_item_bytes = store.capacity_bytes
        setup = Setup(
            model=str(checkpoint.path),
            family=family,
            num_decoders=decoders,
            arena_bytes=max_item_bytes,
            chat_template_content_format=content_format,
            parse_special=parse_special,
            media=caps or MediaCaps(),
            limit_mm_per_prompt=limits,
        )
        if not decoders:
            return cls(Prompts(setup, store))
        assert isinstance(store, Store)
        loop, resources = LoopThread("tokenizer"), AsyncExitStack()
        try:
            prompts = loop.run(Prompts.open(setup, store, resources))
        except BaseException:
            loop.close(resources.aclose)
            raise
        return cls(prompts, loop, resources)

    @property
    def has_template(self) -> bool:
        """True if the checkpoint has a chat template."""
        return self.prompts.has_template

    def tokenize(
        self,
        inputs: Sequence[Mapping[str, Any]],
        shm_name_save_path: str | Path | None = None,
        *,
        webui: bool = False,
        parse_special: bool | None = None,
    ) -> torch.Tensor:
        """Join items without a template, and return their ids.

        Args:
            inputs: Items in order. Each item is a mapping such as {"text": ...} or {"image": ...}.
            shm_name_save_path: Path file that records the references to media. The caller must release it when the ids
                are no longer needed. The default is dirname(dirname(first media path))/shm_name.txt.
            webui: Whether texts may contain images in the format of text-generation-webui, `<img
                src="data:image/jpeg;base64,...">`.
            parse_special: Whether the spelling of a control token in a text, such as `<|im_start|>`, becomes the token,
                except for tokens of media items. If not, it is encoded as plain text. By default, the value that
                `from_pretrained` got.

        Returns:
            int64 [T] on the CPU. The first placeholders of each media item are replaced with its handle words.

        Raises:
            InputError: An input is invalid. After any error, no shared memory stays allocated.
            ArenaFull: The arena has no free memory for the media.
            SharedMemoryError: Shared memory cannot be used.

        """
        require_switches(webui=webui)
        if parse_special is not None:
            require_switches(parse_special=parse_special)
        options = PromptOptions(parse_special=parse_special)
        request = request_of_items(inputs, webui=webui, chat=False, options=options)
        return self._ids(request, shm_name_save_path)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        shm_name_save_path: str | Path | None = None,
        add_generation_prompt: bool = True,
        *,
        webui: bool = False,
        **template_kwargs: Any,
    ) -> torch.Tensor:
        """Return the ids of chat messages, which are formatted with the checkpoint's chat template.

        Args:
            messages: Messages as in OpenAI's chat API.
            shm_name_save_path: Has the same meaning as in `tokenize`.
            add_generation_prompt: Whether the prompt ends with the header of the assistant's turn.
            webui: Has the same meaning as in `tokenize`.
            template_kwargs: More variables for the template. `tools` may contain Python functions. For each function,
                transformers derives a description from the docstring.

        Returns:
            int64 [T] on the CPU, as `tokenize` returns it.

        Raises:
            InputError, ArenaFull, SharedMemoryError: The same conditions as in `tokenize`.

        """
        request = _chat(messages, add_generation_prompt, template_kwargs, webui=webui)
        return self._ids(request, shm_name_save_path)

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        webui: bool = False,
        **template_kwargs: Any,
    ) -> PlannedPrompt:
        """Return the ids and spans that `tokenize_chat` would return, without preprocessing media.

        Usually, only the headers of media are read, so that this takes a small part of the time of `tokenize_chat`, and
        no shared memory. Files that are broken behind their header are not noticed.

        Args:
            messages: Messages as in OpenAI's chat API.
            add_generation_prompt: Has the same meaning as in `tokenize_chat`.
            webui: Has the same meaning as in `tokenize`.
            template_kwargs: Has the same meaning as in `tokenize_chat`.

        Returns:
            Ids without handle words, and a span with size and digest for each media item.

        Raises:
            InputError: An input is invalid.

        """
        request = _chat(messages, add_generation_prompt, template_kwargs, webui=webui)
        (planned,) = self.run(self.prompts.plan([request]))
        return planned

    def tokenize_ids(
        self,
        ids: Sequence[int],
        media: Sequence[Mapping[str, Any]] = (),
        shm_name_save_path: str | Path | None = None,
    ) -> torch.Tensor:
        """Add media to the ids of an encoded prompt. The result is the same as if the prompt's text were encoded.

        Args:
            ids: Ids with one placeholder for each item of `media`.
            media: Media items, in order.
            shm_name_save_path: Has the same meaning as in `tokenize`.

        Returns:
            int64 [T] on the CPU, as `tokenize` returns it.

        Raises:
            InputError, ArenaFull, SharedMemoryError: The same conditions as in `tokenize`.

        """
        return self._ids(request_of_ids(ids, media), shm_name_save_path)

    def _ids(self, request: TokenizeRequest, path_file: str | Path | None) -> torch.Tensor:
        recorded = _path_file(request.media, path_file)
        request = structs.replace(request, path_file="" if recorded is None else str(recorded))
        return torch.from_numpy(self.answer(request).ids)

    def answer(self, request: TokenizeRequest) -> Prompt:
        """Return the prompt of `request`. `Prompts.make` describes the errors."""
        (prompt,) = self.run(self.prompts.make([request]))
        return prompt

    def close(self) -> None:
        """Remove the arena that this tokenizer created, and end its decoders. This may be called repeatedly.

        MindIE segments remain until their path file is released. Later calls to other methods raise InputError.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._end_decoders()
        finally:
            self.prompts.stage.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, making: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Without decoders, the coroutine must not wait for events."""
        if self._closed:
            making.close()
            raise InputError("the tokenizer is closed")
        return run_alone(making) if self._loop is None else self._loop.run(making)


def _chat(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, template_kwargs: dict[str, Any], *, webui: bool
) -> TokenizeRequest:
    """Parse the arguments of `tokenize_chat`."""
    require_switches(add_generation_prompt=add_generation_prompt, webui=webui)
    if (tools := template_kwargs.get("tools")) is not None:
        if not isinstance(tools, list | tuple):
            raise InputError(f"tools is {type_of(tools)}; it must be a list of functions or dicts")
        # Before escaping, because control tokens in docstrings are text.
        template_kwargs["tools"] = [_described(tool) if callable(tool) else tool for tool in tools]
    return request_of_messages(
        messages, webui=webui, add_generation_prompt=add_generation_prompt, chat_template_kwargs=template_kwargs
    )


def _described(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the description of a Python function. Raise InputError if it has no type hints or no docstring."""
    try:
        described: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers raises several kinds of errors
        raise InputError(f"a function in tools cannot be described: {error}") from error
    return described


def _path_file(media: Sequence[Media], given: str | Path | None) -> Path | None:
    if given is not None:
        return absolute(given)
    if not media:
        return None
    for item in media:
        if (path := source_path(item)) is not None:
            return absolute(path).parent.parent / PATH_FILE_NAME
    raise InputError(
        f"shm_name_save_path is None, and none of the {len(media)} media items is a file whose folder could "
        f"contain {PATH_FILE_NAME}; set shm_name_save_path"
    )
