"""Documents (PDF or TIFF) in prompts. They are replaced with one image per page."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import msgspec

from mindie_mm.errors import LimitExceeded, naming
from mindie_mm.inputs import Item, Media
from mindie_mm.tokenize.media_stage import MediaStage
from mindie_mm.tokenize.requests import TokenizeRequest


class Pages:
    """The pages of all documents of the requests that are tokenized together."""

    def __init__(self, stage: MediaStage, domain: Hashable) -> None:
        """Count pages with `stage`, whose limit applies to all documents together.

        `domain` is the trust domain of the documents (`PromptOptions.domain`).
        """
        self._stage = stage
        self._domain = domain
        self._num_documents = self._num_pages = 0

    async def of(self, request: TokenizeRequest) -> TokenizeRequest:
        """Return `request` with each document replaced by the images of its pages, in order.

        Raises:
            InputError: A document cannot be read, or the model does not accept images. The message says which
                document.
            LimitExceeded: The documents have too many pages.

        """
        if request.messages is None:
            return msgspec.structs.replace(request, items=await self._of_items(request.items or ()))
        messages = [
            replace(message, content=tuple(await self._of_items(message.content)))
            if isinstance(message.content, tuple)
            else message
            for message in request.messages
        ]
        return msgspec.structs.replace(request, messages=messages)

    async def _of_items(self, items: Sequence[Item]) -> list[Item]:
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
