"""A function that tokenizes a request. All tokenizer stages use this function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindie_mm.errors import InputError
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
    template = (request.add_generation_prompt, request.chat_template_kwargs, request.options)
    if request.messages is not None:
        messages = await pages.of_messages(request.messages)
        return prompts.draft_messages(messages, *template, continue_final_message=request.continue_final_message)
    if request.continue_final_message:
        raise InputError(
            "continue_final_message is set, but there are no messages; send messages, or leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    return prompts.draft_turn(await pages.of_items(request.items or ()), *template, chat=request.chat)
