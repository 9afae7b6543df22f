"""The media stage. It decodes media, writes them to shared memory, and writes handle words into prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import Planned
from mindie_mm.decode.decoding import Decoding
from mindie_mm.decode.inline import InlineDecoders
from mindie_mm.decode.jobs import Group
from mindie_mm.errors import InputError, OperationalError, SpoolFull, naming, os_errors_as
from mindie_mm.inputs import Embeddings, Kind, Media
from mindie_mm.media.audio.cuts import SAMPLES
from mindie_mm.media.guard.caps import Work
from mindie_mm.processes.alone import gather_in_order
from mindie_mm.processes.tasks import off_loop
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize.clips import Clips
from mindie_mm.tokenize.planning import PlannedItem, Planner
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.stores import Store, Writer


class MediaStage:
    """A stage that decodes the media of requests and writes them to a store."""

    def __init__(self, planner: Planner, decoders: Decoding[Any] | None, store: Store, caps: MediaCaps) -> None:
        """Create a stage.

        Args:
            planner: Planner of the checkpoint.
            decoders: Pool of decoder processes, or None to decode in this process.
            store: Store for the items.
            caps: Limits on media.

        """
        self.planner = planner
        self.inline = InlineDecoders(planner.processor, caps)
        """Decoding of embeddings, which need no decoder process."""
        self.decoders = decoders or self.inline
        self.store = store
        self.caps = caps

    async def num_pages(self, document: Media, domain: Hashable) -> int:
        """Return the number of pages of a PDF. `domain` has the same meaning as in `RequestMedia`.

        Raises:
            InputError: The model does not accept images, or the PDF cannot be read.

        """
        self.planner.counts([document])
        group, first = Group(domain), msgspec.structs.replace(document, is_document=False, page=0)
        try:
            source = await self.decoders.read(group, first, {"image": 1})
            num_pages = (await self.decoders.plan(group, source)).num_pages
        finally:
            group.files.close()
        if not num_pages:
            raise OperationalError("a decoder planned a page of a document with 0 pages; send the request again")
        return num_pages

    async def cut(
        self, speech: Media, folder: Path, max_bytes: int, domain: Hashable = (), *, always: bool = False
    ) -> Clips:
        """Cut speech at pauses into clips of at most `Media.cut_s`. If there are several, write each as a WAV file.

        No file is written if the clips have more than `max_bytes`. The caller compares `Clips.num_bytes`.

        Args:
            speech: The speech.
            folder: Folder for the files, which are named by `Clips.file`.
            max_bytes: Maximum number of bytes of the files at any time.
            domain: Same as in `RequestMedia`.
            always: Whether to write a file also if there is only one clip.

        Raises:
            InputError: The model does not accept audio, or the speech cannot be read or is too long.
            SpoolFull: The files cannot be written.

        """
        self.planner.counts([speech])
        group = Group(domain, keeps_decoder=True)
        try:
            source = await self.decoders.read(group, speech, {"audio": 1})
            plan = await self.decoders.plan(group, source)
            clips = Clips.of(plan)
            if clips.num_bytes <= max_bytes and (always or len(clips.starts) > 1):
                with (
                    os_errors_as(SpoolFull, "the clips of the speech cannot be written"),
                    clips.opened(folder) as array,
                ):
                    await self.decoders.write(group, source, {SAMPLES: array})
                    await off_loop(clips.num_bytes, lambda: clips.write(array, folder))
        finally:
            self.decoders.let_go(group)
            group.files.close()
        return clips


class RequestMedia(Writer):
    """The media of all prompts of one request. Close it at the end of the request."""

    def __init__(self, stage: MediaStage, domain: Hashable = ()) -> None:
        """Create an empty request. `domain` is the trust domain of the media (`PromptOptions.domain`)."""
        self._stage = stage
        self._group = Group(domain)
        self._sources: dict[PlannedItem, tuple[Decoding[Any], Any]] = {}
        """Decoding and source of each planned item."""
        self._known: dict[PlannedItem, bytes] = {}
        """Digests of the items that were planned before (`Media.known`)."""

    async def plan(
        self, prompts: Sequence[tuple[Sequence[Media], str]], *, alone: bool = False
    ) -> list[list[PlannedItem]]:
        """Read and plan all items of each prompt, in order. Call this method once.

        Each prompt is a pair of its media and the salt of their digests. With `alone`, each item is planned as if its
        prompt had no other items.

        Images of a prompt are not decoded until all items of the prompt have been checked against the limits.

        Raises:
            InputError: An item is invalid. The message says which item.

        """
        self._group.keeps_decoder = sum(len(media) for media, _ in prompts) == 1
        return await gather_in_order([self._plan_prompt(media, salt, alone=alone) for media, salt in prompts])

    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[PlannedItem], path_file: Path | None
    ) -> list[Prompt]:
        """Write planned items to the store, record them in `path_file`, and return the prompts with handle words.

        The items have the order of the spans of all prompts. Call this method once, because blocks for all items are
        allocated together. If anything fails, all blocks are freed.

        Raises:
            ArenaFull: Not enough memory became free in time.
            LimitExceeded: The items need more memory than a request may use.
            SharedMemoryError: Shared memory cannot be used.
            InputError: An item cannot be decoded, or `path_file` is missing. The message says which item.

        """
        if not items:
            return [*prompts]
        store = self._stage.store
        if path_file is None and store.needs_path_file:
            raise InputError("a prompt with media needs a path file, which records the blocks to free")
        return await store.fill(prompts, items, path_file, self)

    async def digest(self, item: PlannedItem) -> bytes:
        if item in self._known:
            return self._known[item]
        decoders, source = self._sources[item]
        plan = item.plan
        # Otherwise, a compromised decoder could store arrays of another shape under the digest of an honest item.
        settings = f"{plan.settings}, {plan.num_features} features, grid {plan.grid}, {plan.specs}"
        return await decoders.digest(settings, source, item.salt)

    async def write(self, item: PlannedItem, arrays: Mapping[str, NDArray[Any]]) -> bytes:
        stage, (decoders, source) = self._stage, self._sources[item]
        kept = stage.store.preprocessed
        if kept is None:
            await decoders.write(self._group, source, arrays)
            return b""
        num_bytes = sum(array.nbytes for array in arrays.values())
        digest = await self.digest(item)
        if digest in kept and await off_loop(num_bytes, lambda: kept.copy(digest, arrays)):
            return digest
        await decoders.write(self._group, source, arrays)
        if kept.fits(num_bytes):
            await off_loop(num_bytes, lambda: kept.keep(digest, arrays))
        return digest

    def close(self) -> None:
        """Close the files, and let other requests use the decoder."""
        self._stage.decoders.let_go(self._group)
        self._group.files.close()

    def let_go(self) -> None:
        self._stage.decoders.let_go(self._group)

    async def _plan_prompt(self, media: Sequence[Media], salt: str, *, alone: bool) -> list[PlannedItem]:
        counts = self._stage.planner.counts(media)
        if alone:
            counts = Counter(dict.fromkeys(counts, 1))
        names = [f"media item {index} ({item.kind})" for index, item in enumerate(media)]
        planning = [
            self._plan_item(item, name, salt, counts, alone=alone) for item, name in zip(media, names, strict=True)
        ]
        items = await gather_in_order(planning)
        of_prompt = Work(self._stage.caps)
        for item in items:
            with naming(item.name):
                of_prompt.add_image(item.plan.image_pixels)
                of_prompt.add_video(item.plan.video_pixels)
        return items

    async def _plan_item(
        self, media: Media, name: str, salt: str, counts: Mapping[Kind, int], *, alone: bool
    ) -> PlannedItem:
        stage = self._stage
        with naming(name):
            stage.planner.check_options(media.options)
            if (known := media.known) is not None:
                planned = stage.planner.item(name, media, msgspec.msgpack.decode(known.plan, type=Planned), salt)
                self._known[planned] = known.digest
                return planned
            decoders = stage.inline if isinstance(media.source, Embeddings) else stage.decoders
            source = await decoders.read(self._group, media, counts)
            plan = await decoders.plan(self._group, source)
            if alone:  # then the counts that it read are always 1
                plan = msgspec.structs.replace(plan, by_counts=False)
            stage.store.check(plan, media.kind)
            planned = stage.planner.item(name, media, plan, salt)
            self._sources[planned] = decoders, source
            return planned
