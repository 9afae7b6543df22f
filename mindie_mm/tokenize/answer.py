"""Tokenization of requests, whose documents (PDF or TIFF) are replaced with one image per page."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from mindie_mm.errors import InputError, LimitExceeded, naming
from mindie_mm.inputs import Item, Media, Message
from mindie_mm.tokenize.media_stage import MediaStage
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.prompts import Draft, Prompts
from mindie_mm.tokenize.requests import TokenizeRequest


class Pages:
    """The pages of all documents of one request."""

    def __init__(self, stage: MediaStage, domain: Hashable) -> None:
        """Count pages with `stage`, whose limit applies to all documents together.

        `domain` is the trust domain of the documents (`PromptOptions.domain`).
        """
        self._stage = stage
        self._domain = domain
        self._num_documents = self._num_pages = 0

    async def of_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return `messages` with documents replaced as in `of_items`, which also lists the errors."""
        return [
            replace(message, content=tuple(await self.of_items(message.content)))
            if isinstance(message.content, tuple)
            else message
            for message in messages
        ]

    async def of_items(self, items: Sequence[Item]) -> list[Item]:
        """Return `items` with each document replaced by the images of its pages, in order.

        Raises:
            InputError: A document cannot be read, or the model does not accept images. The message says which
                document.
            LimitExceeded: The documents have too many pages.

        """
        expanded: list[Item] = []
        for item in items:
            expanded += await self._pages(item) if isinstance(item, Media) and item.is_document else [item]
        return expanded

    async def _pages(self, document: Media) -> list[Item]:
        limit = self._stage.caps.max_pdf_pages
        self._num_documents += 1
        with naming(f"document {self._num_documents}"):
            if not limit:
                raise LimitExceeded("this service does not accept documents (--max-pdf-pages is 0)")
            num_pages = await self._stage.num_pages(document, self._domain)
            self._num_pages += num_pages
            if self._num_pages > limit:
                raise LimitExceeded(
                    f"the request's documents have {self._num_pages} pages or more; the limit is {limit} "
                    "(--max-pdf-pages)"
                )
        return [msgspec.structs.replace(document, is_document=False, page=index) for index in range(num_pages)]


async def answer(prompts: Prompts, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
    """Return the prompts of `requests`, whose blocks are allocated together. `Prompts.make` describes the errors."""
    path_files = {request.path_file for request in requests}
    if len(path_files) != 1:
        raise InputError(f"prompts that are tokenized together must share one path file; found {sorted(path_files)}")
    pages = Pages(prompts.stage, requests[0].options.domain)
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
