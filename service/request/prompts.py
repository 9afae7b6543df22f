"""Creates the prompts of a request: spools the media, tokenizes, and frees everything at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mindie_mm.errors import InputError, SharedMemoryError, TokenOutOfRange, blaming
from mindie_mm.inputs import (
    EMBEDDINGS_KEYS,
    PROMPT,
    Item,
    Media,
    Message,
    Paths,
    WebuiImages,
    long_data_url,
    media_of,
    media_of_messages,
    messages_with_paths,
    parse_inputs,
    parse_messages,
    require_within,
    with_defaults,
    with_paths,
)
from mindie_mm.processes import faults
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.shm import RequestDirectory, request_directory
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.retry import PromptSource
from service.request.kept_media import KeptMedia
from service.request.quota import room_to_spool
from service.request.state import Service
from service.schemas.body import INT32_MAX
from service.schemas.choices import Clock
from service.telemetry import tracing

_log = logging.getLogger(__name__)

_Parsed = tuple[list[Media], Callable[[Iterator[Paths]], TokenizeRequest]]
"""The media of a request, and a function that returns the request with file paths in place of the media."""


@asynccontextmanager
async def prompts(
    service: Service, requests: Sequence[TokenizeRequest], clock: Clock, owner: bytes
) -> AsyncIterator[list[PromptSource]]:
    """Tokenize the prompts of one HTTP request, and free their shared memory at exit.

    The limits for one request apply to all of its prompts together. `requests` contain the media as the client sent
    them. The spooled files remain until the exit, because a preempted answer may need its prompt tokenized again.
    `owner` is the digest of the request's API key.
    """
    started = time.perf_counter()
    fields = {_field(request) for request in requests}
    field = fields.pop() if len(fields) == 1 else None
    with blaming(field):
        parsed = [_checked(request, service.config, service.kept, owner) for request in requests]
        for items, _ in parsed:
            require_within(items, service.worker.config.limit_mm_per_prompt)
    media = [item for items, _ in parsed for item in items]
    with ExitStack() as stack:
        changes: dict[str, Any] = {}
        spooled: list[Paths] = []
        if media:
            with room_to_spool(), blaming(field):
                directory = stack.enter_context(_directory(service.spool))
                stack.callback(service.media.remove, directory.path)
                spooled = await service.media.spool(media, directory.path)
            changes["path_file"] = str(directory.path_file)
            clock.fetch_s = time.perf_counter() - started
            faults.point("spooled")
        paths = iter(spooled)
        complete = [msgspec.structs.replace(with_files(paths), **changes) for _, with_files in parsed]
        with blaming(field):
            sources = await service.worker.tokenize(complete)
        with room_to_spool():
            await service.kept.keep(media, spooled, owner, requests[0].options.cache_salt)
        faults.point("tokenized")
        elapsed_s = time.perf_counter() - started
        clock.preprocess_s = elapsed_s - clock.fetch_s
        service.metrics.tokenize_s.observe(elapsed_s)
        if (trace := tracing.current.get()) is not None:
            trace.tokenized(started, clock.fetch_s, clock.preprocess_s)
        yield sources


@contextmanager
def _directory(spool: Path) -> Iterator[RequestDirectory]:
    """Open a `request_directory`. If it cannot be removed, only log the error, which does not affect the answer."""
    with ExitStack() as stack:
        directory = stack.enter_context(request_directory(spool))
        try:
            yield directory
        finally:
            try:
                stack.close()
            except SharedMemoryError as error:
                _log.error("%s; it is removed at the next reclaim", error)


def _field(request: TokenizeRequest) -> str | None:
    """Return the name of the field that contains the prompt, or None for a text, whose field depends on the route."""
    if request.messages is not None:
        return "messages"
    if request.items is None:
        return None
    first = request.items[0] if request.items else None
    is_embeddings = not request.chat and isinstance(first, dict) and EMBEDDINGS_KEYS[PROMPT] in first
    return EMBEDDINGS_KEYS[PROMPT] if is_embeddings else "inputs"


def _checked(request: TokenizeRequest, config: ServiceConfig, kept: KeptMedia, owner: bytes) -> _Parsed:
    """Return the result of `_parsed`. Raise InputError also if the request cannot be encoded as MessagePack."""
    try:
        media, with_files = _parsed(request, config, kept, owner)
        msgspec.msgpack.encode(with_files(repeat(Path())))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InputError(
            "the request contains an integer of more than 64 bits or a lone surrogate, or is nested too deeply"
        ) from error
    return media, with_files


def _parsed(request: TokenizeRequest, config: ServiceConfig, kept: KeptMedia, owner: bytes) -> _Parsed:
    """Parse the media of a request. Raise InputError if they are not valid."""
    replace = msgspec.structs.replace
    images = WebuiImages(config.max_media_items)
    if request.messages is not None:
        parsed = parse_messages(request.messages, strict=config.strict, by_uuid=True)
        parsed = images.of_messages(parsed) if config.webui_images else parsed
        _require_no_data_url(parsed)
        filled = kept.filled(parsed, owner, request.options.cache_salt)
        messages = with_defaults(filled, request.media_defaults)
        return media_of_messages(messages), lambda paths: replace(
            request, messages=messages_with_paths(messages, paths), media_defaults={}
        )
    if request.items is not None:
        items = parse_inputs(request.items)
        items = images.of_items(items) if config.webui_images else items
        _require_no_data_url(items)
        return media_of(items), lambda paths: replace(request, items=with_paths(items, paths))
    pieces = images.of_text(request.text or "")
    _require_no_data_url(pieces)
    if media := media_of(pieces):
        return media, lambda paths: replace(request, text=None, items=with_paths(pieces, paths), chat=False)
    return [], lambda _: request


def _require_no_data_url(prompt: Sequence[Item | Message]) -> None:
    """Raise InputError if a text has a long data: URL, which would take thousands of tokens."""
    if found := long_data_url(prompt):
        raise InputError(
            f'{found}. Send the media as an item, such as {{"type": "image_url", "image_url": {{"url": "data:..."}}}}. '
            'Pictures of the form <img src="data:image/jpeg;base64,..."> are read in a prompt that is one text, and '
            "with --webui-images also in messages and items"
        )


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
