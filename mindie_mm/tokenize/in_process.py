"""A media stage that decodes one item after another in the caller's process. Its coroutines never suspend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from mindie_mm.decode.digest import content_digest
from mindie_mm.decode.planning import page_of, plan_item
from mindie_mm.errors import InputError, naming
from mindie_mm.inputs import Embeddings, Kind, Media
from mindie_mm.media.document.pages import DocumentPage
from mindie_mm.media.guard.caps import Work, under
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.source import read_source
from mindie_mm.nn.family import Processor
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize.media_stage import MediaStage, RequestMedia
from mindie_mm.tokenize.planning import PlannedItem, Planner
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.wires import Wire


class InProcess(MediaStage):
    """A media stage that decodes items in this process and stores them through a wire."""

    def __init__(self, processor: Processor, planner: Planner, wire: Wire, caps: MediaCaps) -> None:
        self._processor = processor
        self._planner = planner
        self._wire = wire
        self.caps = caps

    @asynccontextmanager
    async def request(self) -> AsyncIterator[RequestMedia]:
        yield _RequestMedia(self._processor, self._planner, self._wire, self.caps)

    async def num_pages(self, document: Media) -> int:
        self._planner.counts([document])
        with under(self.caps):
            page = page_of(replace(document, page=0), read_source(document))
        assert isinstance(page, DocumentPage)
        return page.num_pages

    def close(self) -> None:
        self._wire.close()


class _RequestMedia(RequestMedia):
    def __init__(self, processor: Processor, planner: Planner, wire: Wire, caps: MediaCaps) -> None:
        self._processor = processor
        self._planner = planner
        self._wire = wire
        self._caps = caps
        self._data: dict[PlannedItem, Data] = {}
        """Source data of the planned items."""

    async def plan(self, prompts: Sequence[Sequence[Media]]) -> list[list[PlannedItem]]:
        return [self._plan_prompt(media) for media in prompts]

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[tuple[PlannedItem, str]], path_file: Path | None
    ) -> list[Prompt]:
        if items and path_file is None and self._wire.needs_path_file:
            raise InputError("a prompt with media needs a path file, which records the blocks to free")
        left = ((item, self._digest(item, salt)) for item, salt in items)
        with ExitStack() as undo:
            filled = [self._wire.fill(p, list(islice(left, len(p.spans))), path_file, undo) for p in prompts]
            undo.pop_all()
        return filled

    def _digest(self, item: PlannedItem, salt: str) -> Callable[[], bytes]:
        return partial(content_digest, item.plan.settings, self._data[item], salt)

    def _plan_prompt(self, media: Sequence[Media]) -> list[PlannedItem]:
        counts = self._planner.counts(media)
        of_prompt, items = Work(self._caps), []
        for index, item in enumerate(media):
            with naming(f"media item {index} ({item.kind})"):
                items.append(planned := self._plan_item(item, index, counts))
                of_prompt.add_picture(planned.plan.picture_pixels)
                of_prompt.add_video(planned.plan.video_pixels)
        return items

    def _plan_item(self, media: Media, index: int, counts: Mapping[Kind, int]) -> PlannedItem:
        self._planner.check_options(media.options)
        with under(self._caps):
            data = media.source if isinstance(media.source, Embeddings) else read_source(media)
        plan, write = plan_item(self._processor, media, data, counts, self._caps)
        self._wire.check(plan, media.kind)
        item = self._planner.item(index, media.kind, plan, write)
        self._data[item] = np.ascontiguousarray(data.array) if isinstance(data, Embeddings) else data
        return item
