"""A media stage whose decoder processes write into an arena. The items of a request are decoded in parallel."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path

from mindie_mm.decode import Decoders, Group
from mindie_mm.decode.decoder_messages import Item
from mindie_mm.decode.digest import content_digest, parcel_digest
from mindie_mm.decode.parcel import Parcel, pack_copy, pack_file
from mindie_mm.decode.planning import plan_item
from mindie_mm.errors import InputError, LimitExceeded, naming
from mindie_mm.inputs import Embeddings, Kind, Media
from mindie_mm.media.guard import cancellation
from mindie_mm.media.guard.caps import Work, decodes_to_count, under
from mindie_mm.models import family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Processor
from mindie_mm.processes import faults
from mindie_mm.processes.tasks import gather_in_order, in_thread, off_loop
from mindie_mm.settings.config import ContentFormat, MediaCaps, Switch
from mindie_mm.settings.limits import PromptLimits
from mindie_mm.shm import Block
from mindie_mm.shm.format.item import ITEM
from mindie_mm.tokenize.media_stage import MediaStage, RequestMedia
from mindie_mm.tokenize.planning import PlannedItem, Planner
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.prompt import Prompt, put_words
from mindie_mm.tokenize.prompts import Prompts
from mindie_mm.tokenize.room import Room

_LEAST_FEATURE_BYTES = 16
"""Minimum size of an item's arrays in bytes per feature, in any family."""


def read_prompts(
    checkpoint: Checkpoint,
    family_name: str | None,
    content_format: ContentFormat,
    parse_special: Switch,
    caps: MediaCaps,
    decoders: Decoders,
    room: Room,
    preprocessed: Preprocessed,
    limits: PromptLimits,
) -> Prompts:
    """Create the `Prompts` of a checkpoint. The prompts use `decoders` for media.

    Raises:
        UnsupportedCheckpoint: The checkpoint is not supported.

    """
    family = family_of(checkpoint, family_name)

    def make_stage(processor: Processor) -> Decoded:
        return Decoded(Planner(processor, family.__name__, limits), decoders, room, caps, preprocessed)

    return Prompts(checkpoint, family, make_stage, content_format, parse_special)


class Decoded(MediaStage):
    """A media stage whose decoders plan and write the items of several requests at the same time."""

    def __init__(
        self, planner: Planner, decoders: Decoders, room: Room, caps: MediaCaps, preprocessed: Preprocessed
    ) -> None:
        self.planner = planner
        self.decoders = decoders
        self.room = room
        self.caps = caps
        self.preprocessed = preprocessed

    @asynccontextmanager
    async def request(self) -> AsyncIterator[RequestMedia]:
        media = _RequestMedia(self)
        try:
            yield media
        finally:
            media.close()

    async def num_pages(self, document: Media) -> int:
        media = _RequestMedia(self)
        try:
            return await media.num_pages(document)
        finally:
            media.close()

    def close(self) -> None:
        self.room.close()


class _RequestMedia(RequestMedia):
    """The media of one request. All files stay open until the request is done, so that an item can be read again."""

    def __init__(self, stage: Decoded) -> None:
        self._stage = stage
        self._group = Group()
        self._files = ExitStack()
        self._sources: dict[PlannedItem, tuple[Item, Parcel] | Embeddings] = {}
        """Source data of the planned items. Embeddings do not need a decoder."""

    async def plan(self, prompts: Sequence[Sequence[Media]]) -> list[list[PlannedItem]]:
        self._group.keeps_decoder = sum(map(len, prompts)) == 1
        return await gather_in_order([self._plan_prompt(media) for media in prompts])

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[tuple[PlannedItem, str]], path_file: Path | None
    ) -> list[Prompt]:
        words = iter(await self._store(items, path_file) if items else ())
        return [put_words(prompt, islice(words, len(prompt.spans))) for prompt in prompts]

    async def num_pages(self, document: Media) -> int:
        """Return the number of pages of a PDF. Raise the same errors as `MediaStage.num_pages`."""
        self._stage.planner.counts([document])
        parcel = await self._packed(document)
        first = Item("image", document.options, {"image": 1}, parcel.parts, parcel.is_list, decodes_to_count(), page=0)
        return (await self._stage.decoders.plan(self._group, first, parcel.descriptor)).num_pages

    def close(self) -> None:
        """Close the files, and let other requests use the decoder."""
        self._stage.decoders.let_go(self._group)
        self._files.close()

    async def _store(self, items: Sequence[tuple[PlannedItem, str]], path_file: Path | None) -> list[Sequence[int]]:
        if path_file is None:
            raise InputError("a prompt with media needs a path file, which records the blocks to free")
        room, all_specs = self._stage.room, [item.specs for item, _ in items]
        blocks = room.arena.try_allocate(all_specs, path_file=path_file)
        if blocks is None:
            self._stage.decoders.let_go(self._group)
            blocks = await room.arena.allocate_together(all_specs, path_file=path_file, timeout_s=room.wait_s)
        try:
            faults.point("allocated")
            pairs = zip(items, blocks, strict=True)
            await gather_in_order([self._fill(item, salt, block) for (item, salt), block in pairs])
        except BaseException:
            for block in blocks:
                room.arena.discard(block)
            raise
        faults.point("published")
        return [block.ref.to_words() for block in blocks]

    async def _plan_prompt(self, media: Sequence[Media]) -> list[PlannedItem]:
        counts = self._stage.planner.counts(media)
        plans = await gather_in_order([self._plan_item(item, index, counts) for index, item in enumerate(media)])
        of_prompt = Work(self._stage.caps)
        for item in plans:
            with naming(item.name):
                of_prompt.add_picture(item.plan.picture_pixels)
                of_prompt.add_video(item.plan.video_pixels)
        return plans

    async def _plan_item(self, media: Media, index: int, counts: Mapping[Kind, int]) -> PlannedItem:
        stage, planner = self._stage, self._stage.planner
        with naming(f"media item {index} ({media.kind})"):
            planner.check_options(media.options)
            if isinstance(media.source, Embeddings):
                planned = planner.item(
                    index, media.kind, *plan_item(planner.processor, media, media.source, counts, stage.caps)
                )
                self._sources[planned] = media.source
                return planned
            parcel = await self._packed(media)
            counting = decodes_to_count()
            item = Item(
                *(media.kind, media.options, {**counts}, parcel.parts, parcel.is_list, counting),
                page=media.page,
                is_embeddings=media.is_embeddings,
            )
            plan = await stage.decoders.plan(self._group, item, parcel.descriptor)
            # A compromised decoder could return so many features that the prompt's ids use all memory.
            planner.require_makes(media.kind, plan.num_features, plan.grid)
            if plan.num_features > (most := stage.room.arena.capacity_bytes // _LEAST_FEATURE_BYTES):
                raise LimitExceeded(f"the item has {plan.num_features} features; the arena has room for at most {most}")
            planned = planner.item(index, media.kind, plan)
            self._sources[planned] = item, parcel
            return planned

    async def _packed(self, media: Media) -> Parcel:
        if (parcel := pack_file(media)) is not None:
            self._files.callback(os.close, parcel.descriptor)
            return parcel

        given_up = threading.Event()

        def pack() -> Parcel:
            with cancellation.until(given_up), under(self._stage.caps):
                copied = pack_copy(media)
            self._files.callback(os.close, copied.descriptor)
            return copied

        return await in_thread(pack, given_up.set)  # fetching and reading may take a long time

    async def _fill(self, item: PlannedItem, salt: str, block: Block) -> None:
        """Write the arrays of an item, and publish its block."""
        block[ITEM][...] = item.shape.values
        faults.point("mid-fill")
        with naming(item.name):
            digest = await self._write(item, salt, block)
        faults.point("filled")
        block.publish(digest)

    async def _write(self, item: PlannedItem, salt: str, block: Block) -> bytes:
        """Write the arrays of an item, and return the digest of its content."""
        stage, source, settings = self._stage, self._sources[item], item.plan.settings
        if isinstance(source, Embeddings):
            assert item.write is not None
            item.write(block)
            return content_digest(settings, source.array, salt)
        request, parcel = source
        arrays = {name: block[name] for name in item.plan.specs}
        source_bytes = sum(part.nbytes for part in parcel.parts)
        digest = await off_loop(source_bytes, lambda: parcel_digest(settings, parcel, salt))
        kept = stage.preprocessed
        if digest in kept and await off_loop(block.nbytes, lambda: kept.copy(digest, arrays)):
            return digest
        await stage.decoders.write(self._group, request, parcel.descriptor, arrays)
        if kept.fits(block.nbytes):
            await off_loop(block.nbytes, lambda: kept.keep(digest, arrays))
        return digest
