"""Tokenization of a request, shared by all tokenizer stages."""

from __future__ import annotations

from pathlib import Path

from mindie_mm.errors import InputError
from mindie_mm.inputs import Text, parse_inputs, parse_messages
from mindie_mm.media.source import located_items, located_messages
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.prompts import Prompts
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest


async def answer(prompts: Prompts, request: TokenizeRequest) -> Prompt:
    """Return the prompt of `request`. Errors are those of Prompts."""
    given = [name for name in ("messages", "items", "text") if getattr(request, name) is not None]
    if len(given) != 1:
        raise InputError(f"a request has exactly one of messages, items and text; found {given or 'none'}")
    path_file = Path(request.path_file) if request.path_file else None
    template = (request.add_generation_prompt, request.chat_template_kwargs, request.options)
    folder = Path(request.folder) if request.folder else None
    if request.messages is not None:
        messages = parse_messages(request.messages)
        messages = messages if folder is None else located_messages(messages, folder)
        return await prompts.from_messages(messages, path_file, *template)
    items = [Text(request.text)] if request.text is not None else parse_inputs(request.items or [])
    items = items if folder is None else located_items(items, folder)
    return await prompts.from_turn(items, path_file, *template, chat=request.chat and request.text is None)
