"""A function that tokenizes a request. All tokenizer stages use this function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindie_mm.errors import InputError
from mindie_mm.inputs import Text, parse_inputs, parse_messages, webui_items, webui_messages, with_defaults
from mindie_mm.media.source import located_items, located_messages
from mindie_mm.tokenize.documents import Pages
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.prompts import Draft, Prompts
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest


async def answer(prompts: Prompts, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
    """Return the prompts of `requests`, whose blocks are allocated together. `Prompts.make` describes the errors."""
    path_files = {request.path_file for request in requests}
    if len(path_files) != 1:
        raise InputError(f"prompts that are tokenized together must share one path file; found {sorted(path_files)}")
    pages = Pages(prompts.stage)
    drafts = [await _draft(prompts, request, pages) for request in requests]
    (path_file,) = path_files
    return await prompts.make(drafts, Path(path_file) if path_file else None)


async def _draft(prompts: Prompts, request: TokenizeRequest, pages: Pages) -> Draft:
    given = [name for name in ("messages", "items", "text") if getattr(request, name) is not None]
    if len(given) != 1:
        raise InputError(f"a request must have exactly one of messages, items and text; found {given or 'none'}")
    template = (request.add_generation_prompt, request.chat_template_kwargs, request.options)
    folder = Path(request.folder) if request.folder else None
    if request.messages is not None:
        parsed = webui_messages(parse_messages(request.messages), webui=request.webui)
        messages = with_defaults(parsed, request.media_defaults)
        messages = messages if folder is None else located_messages(messages, folder)
        return prompts.draft_messages(
            await pages.of_messages(messages), *template, continue_final_message=request.continue_final_message
        )
    if request.continue_final_message:
        raise InputError(
            "continue_final_message is set, but there are no messages; send messages, or leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    given_items = [Text(request.text)] if request.text is not None else parse_inputs(request.items or [])
    items = webui_items(given_items, webui=request.webui)
    items = items if folder is None else located_items(items, folder)
    return prompts.draft_turn(await pages.of_items(items), *template, chat=request.chat and request.text is None)
