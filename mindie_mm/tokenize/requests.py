"""Parsing of the prompts that a script or a command passes, into requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindie_mm.inputs import parse_inputs, parse_messages, webui_items, webui_messages
from mindie_mm.media.source import located
from mindie_mm.settings.paths import working_directory
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest


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
    items = webui_items(parse_inputs(inputs), webui=webui)
    return _located(TokenizeRequest(items=[*items], **fields), folder)


def request_of_messages(
    messages: Sequence[Mapping[str, Any]], *, webui: bool = False, folder: str | None = None, **fields: Any
) -> TokenizeRequest:
    """Return the request for chat messages. The arguments and errors are those of `request_of_items`."""
    read = webui_messages(parse_messages(messages), webui=webui)
    return _located(TokenizeRequest(messages=[*read], **fields), folder)


def _located(request: TokenizeRequest, folder: str | None) -> TokenizeRequest:
    base = working_directory() if folder is None else folder
    return request.with_media(lambda media: located(media, Path(base))) if base else request
