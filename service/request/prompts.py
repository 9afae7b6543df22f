"""Creates the prompts of a request: spools the media, tokenizes, and frees everything at the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from mindie_mm.errors import InputError, TokenOutOfRange, blaming
from mindie_mm.inputs import (
    Item,
    Media,
    MediaDefaults,
    Message,
    Paths,
    Text,
    parse_inputs,
    parse_messages,
    read_texts,
    require_within,
    with_defaults,
)
from mindie_mm.processes import faults
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.retry import PromptSource
from service.render.plans import KnownItem, KnownMedia
from service.request.kept_media import KeptMedia
from service.request.quota import room_to_spool
from service.request.spool_folders import spool_directory
from service.request.state import Service
from service.schemas.body import INT32_MAX
from service.schemas.choices import Clock
from service.telemetry import tracing

Part = TypeVar("Part", Item, Message)
Result = TypeVar("Result")

Parse = Callable[[], TokenizeRequest]
"""Function that parses a prompt as the client sent it."""


@dataclass(frozen=True, slots=True)
class Made(Generic[Result]):
    """The results for the prompts of one HTTP request, and their media."""

    results: list[Result]
    media: list[list[tuple[Media, Paths | str]]]
    """Media items of each prompt as the client sent them, in order, with their files in the spool. An item that was
    planned before has no file, but its hash."""


@asynccontextmanager
async def prompts(
    service: Service, given: Sequence[Parse], clock: Clock, owner: bytes, field: str | None
) -> AsyncIterator[list[PromptSource]]:
    """Tokenize the prompts of one HTTP request, and free their shared memory at exit.

    The limits for one request apply to all of its prompts together. The spooled files remain until the exit, because a
    preempted answer may need its prompt tokenized again. `owner` is the digest of the request's API key. `field` is the
    field that errors of the prompts name.
    """
    async with spooled_prompts(service, given, clock, owner, field, service.worker.tokenize) as made:
        yield made.results


@asynccontextmanager
async def spooled_prompts(
    service: Service,
    given: Sequence[Parse],
    clock: Clock,
    owner: bytes,
    field: str | None,
    make: Callable[[Sequence[TokenizeRequest]], Awaitable[list[Result]]],
    known_media: KnownMedia | None = None,
    *,
    fill: bool = True,
) -> AsyncIterator[Made[Result]]:
    """Parse the prompts of one HTTP request, spool their media, and yield what `make` returns for the prompts.

    Items in `known_media` are not spooled, so `make` must need only their plans. Without `fill`, `make` must not
    allocate shared memory. At exit, the spooled files and the shared memory of the request are removed. `prompts`
    describes the other arguments.
    """
    started = time.perf_counter()
    with blaming(field):
        requests = [_checked(parse) for parse in given]
        for request in requests:
            require_within(request.media, service.worker.config.limit_mm_per_prompt)
    media = [item for request in requests for item in request.media]
    with blaming(field):
        service.media.check(media)
    found: list[list[KnownItem | None]] = [[None] * len(request.media) for request in requests]
    if known_media is not None:
        found = await known_media.find(requests)
        service.metrics.count_plans(len(media), sum(one is not None for of_prompt in found for one in of_prompt))
    known = [one for of_prompt in found for one in of_prompt]
    with blaming(field):
        for request, of_prompt in zip(requests, found, strict=True):
            service.kept.require_sources(request.media, of_prompt)
    media = [item for item, one in zip(media, known, strict=True) if one is None]
    with ExitStack() as stack:
        changes: dict[str, Any] = {}
        spooled: list[Paths] = []
        if media:
            with room_to_spool(), blaming(field):
                if fill:
                    directory = stack.enter_context(spool_directory(service.spool))
                    place = directory.path, ""
                    changes["path_file"] = str(directory.path_file)
                else:
                    place = service.plan_folder.place()
                stack.callback(service.media.remove, *place)
                spooled = await service.media.spool(media, *place)
            clock.fetch_s = time.perf_counter() - started
            faults.point("spooled")
        files = iter(spooled)
        places = iter([next(files) if one is None else one for one in known])
        spooled_requests = [request.with_media(lambda one: _from_place(one, next(places))) for request in requests]
        complete = [
            msgspec.structs.replace(request, options=replace(request.options, owner=owner), **changes)
            for request in spooled_requests
        ]
        with blaming(field):
            results = await make(complete)
        with room_to_spool():
            await service.kept.keep(media, spooled, owner, requests[0].options.cache_salt)
        faults.point("tokenized")
        elapsed_s = time.perf_counter() - started
        clock.preprocess_s = elapsed_s - clock.fetch_s
        service.metrics.tokenize_s.observe(elapsed_s)
        if (trace := tracing.current.get()) is not None:
            trace.tokenized(started, clock.fetch_s, clock.preprocess_s)
        files = iter(spooled)
        sent = iter([next(files) if one is None else one.hash for one in known])
        yield Made(results, [[(item, next(sent)) for item in request.media] for request in requests])


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Parses the prompts of one HTTP request. Its methods raise InputError if a prompt is not valid."""

    config: ServiceConfig
    kept: KeptMedia
    owner: bytes
    """Digest of the request's API key."""
    salt: str
    """The request's `cache_salt`."""

    def messages(self, given: Sequence[Any], defaults: MediaDefaults) -> list[Message]:
        """Parse chat messages. `defaults` are options of media that do not set them."""
        parsed = parse_messages(given, strict=self.config.strict, by_uuid=True)
        return with_defaults(self.kept.filled(self._read(parsed), self.owner, self.salt), defaults)

    def items(self, given: Sequence[Any]) -> list[Item]:
        """Parse a `List[Dict]`."""
        return self._read(parse_inputs(given))

    def text(self, text: str) -> list[Item]:
        """Parse a prompt that is one text, with its images in the format of text-generation-webui."""
        return self._read([Text(text)], webui=True)

    def _read(self, prompt: Sequence[Part], *, webui: bool = False) -> list[Part]:
        webui = webui or self.config.webui_images
        return read_texts(prompt, webui=webui, max_images=self.config.max_media_items, refuses_urls=True)


def _checked(parse: Parse) -> TokenizeRequest:
    """Return a parsed request. Raise InputError if it is not valid, or cannot be encoded as MessagePack."""
    try:
        request = parse()
        msgspec.msgpack.encode(request.with_media(partial(_from_file, file=Path())))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InputError(
            "the request contains an integer of more than 64 bits or a lone surrogate, or is nested too deeply"
        ) from error
    return request


def _from_place(media: Media, place: Paths | KnownItem) -> Media:
    if isinstance(place, KnownItem):
        return msgspec.structs.replace(media, source=None, uuid=None, known=place.plan)
    return _from_file(media, place)


def _from_file(media: Media, file: Paths) -> Media:
    source = tuple(map(str, file)) if isinstance(file, list) else str(file)
    return msgspec.structs.replace(media, source=source, uuid=None)


def prompt_of_ids(service: Service, ids: Sequence[int], field: str, *, accept_handles: bool = False) -> Prompt:
    """Return a prompt that consists of the token ids in the body's `field`.

    With `accept_handles`, any negative int64 is passed to the engine, which checks the handle words.

    Raises:
        TokenOutOfRange: An id is not in [0, vocabulary size).

    """
    vocab_size = service.worker.engine.info.vocab_size
    lowest = np.iinfo(np.int64).min if accept_handles else 0
    if (bad := next((i for i in ids if not lowest <= i < vocab_size), None)) is not None:
        message = f"token id {bad} is outside the vocabulary, [0, {vocab_size})"
        if bad < -INT32_MAX:
            message += "; handles are accepted only on the socket of --uds, with --accept-handles"
        raise TokenOutOfRange(message, param=field)
    return Prompt(np.array(ids, np.int64))
