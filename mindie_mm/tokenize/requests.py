"""Requests to tokenize a prompt, and the parsing of the prompts that a script or a command passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from mindie_mm.errors import InputError, TokenOutOfRange
from mindie_mm.inputs import (
    Item,
    Media,
    Message,
    media_of,
    media_of_messages,
    messages_with_media,
    parse_inputs,
    parse_messages,
    read_texts,
    type_of,
    with_media,
)
from mindie_mm.settings.paths import working_directory
from mindie_mm.tokenize.prompt import PromptOptions


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to tokenize, which was parsed where it came in. `messages`, `items`, or `ids` with `items` are given.

    Only paths, URLs and bytes can be sent to another process as sources of media.
    """

    messages: list[Message] | None = None
    """Chat messages."""
    items: list[Item] | None = None
    """Items in order. With `ids`, they are the media of the prompt."""
    ids: list[int] | None = None
    """Ids of an encoded prompt, with one placeholder per media item and page of a document, or without placeholders if
    the family inserts them."""
    ranges: list[tuple[int, int]] | None = None
    """Ranges [start, stop) of the ids that represent each item, in order, if `ids` have one placeholder per feature."""
    chat: bool = True
    """True if `items` are formatted as one user turn when the checkpoint has a chat template. Otherwise they are
    joined."""
    path_file: str = ""
    """Path file of the request. It may be empty only for a prompt without media."""
    add_generation_prompt: bool = True
    """True if the prompt ends with the header of the assistant's turn."""
    continue_final_message: bool = False
    """True if the prompt ends with the text of the last message."""
    chat_template_kwargs: dict[str, Any] = {}
    """More variables for the chat template, such as `tools`."""
    options: PromptOptions = PromptOptions()

    @property
    def media(self) -> list[Media]:
        """Media of the prompt, in order."""
        return media_of_messages(self.messages) if self.messages is not None else media_of(self.items or ())

    def with_media(self, change: Callable[[Media], Media]) -> TokenizeRequest:
        """Return the request with `change(media)` in place of each media item, in order."""
        messages = None if self.messages is None else messages_with_media(self.messages, change)
        items = None if self.items is None else with_media(self.items, change)
        return msgspec.structs.replace(self, messages=messages, items=items)


def request_of_items(
    inputs: Sequence[Mapping[str, Any]], *, webui: bool = False, folder: str | None = None, **fields: Any
) -> TokenizeRequest:
    """Return the request for a `List[Dict]`.

    Args:
        inputs: Items in order. Each item is a mapping such as {"text": ...} or {"image": ...}.
        webui: Whether texts may contain images in the format of text-generation-webui.
        folder: Base directory of relative media paths, by default the working directory.
        fields: Other fields of the request.

    Raises:
        InputError: An item is invalid.

    """
    items = read_texts(parse_inputs(inputs), webui=webui)
    return _located(TokenizeRequest(items=items, **fields), folder)


def request_of_messages(
    messages: Sequence[Mapping[str, Any]], *, webui: bool = False, folder: str | None = None, **fields: Any
) -> TokenizeRequest:
    """Return the request for chat messages. The arguments and errors are those of `request_of_items`."""
    read = read_texts(parse_messages(messages), webui=webui)
    return _located(TokenizeRequest(messages=read, **fields), folder)


def request_of_ids(ids: Sequence[int], media: Sequence[Mapping[str, Any]], **fields: Any) -> TokenizeRequest:
    """Return the request for the ids of an encoded prompt, with one placeholder for each item of `media`.

    A document has one placeholder for each page.

    Raises:
        InputError: The ids have no single axis, or an item is invalid.
        TokenOutOfRange: A value is not a token id. The engine checks that the ids are in the vocabulary.

    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) != 1:
        raise InputError(f"ids is {type_of(ids)}; it must be a list of token ids")
    items: list[Item] = [] if isinstance(media, list | tuple) and not media else [*media_of(parse_inputs(media))]
    return _located(TokenizeRequest(ids=[_token_id(index) for index in ids], items=items, **fields), None)


def _token_id(index: Any) -> int:
    """Convert a token id of any integer type to `int`. Raise TokenOutOfRange for any other value."""
    try:
        token = operator.index(index)
    except TypeError:
        token = -1
    if isinstance(index, bool) or not 0 <= token < 2**31:
        raise TokenOutOfRange(f"{index!r} is not a token id")
    return token


def _located(request: TokenizeRequest, folder: str | None) -> TokenizeRequest:
    from mindie_mm.media.source import located  # imported late, because the service must not load decoders

    base = working_directory() if folder is None else folder
    return request.with_media(partial(located, folder=Path(base))) if base else request
