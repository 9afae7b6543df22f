"""Decoding in the caller's process, one item after another. The coroutines never wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import Planned
from mindie_mm.decode.decoding import Decoding
from mindie_mm.decode.digest import content_digest
from mindie_mm.decode.jobs import Group
from mindie_mm.decode.planning import plan_item
from mindie_mm.inputs import Embeddings, Kind, Media
from mindie_mm.media.guard.caps import under
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.source import read_source
from mindie_mm.nn.family import Processor, Write
from mindie_mm.settings.config import MediaCaps


@dataclass(slots=True, eq=False)
class Loaded:
    """A media item whose source is in memory."""

    media: Media
    counts: Mapping[Kind, int]
    data: Data | Embeddings
    write: Write | None = None
    """Function that writes the item's arrays, after the item has been planned."""


class InlineDecoders(Decoding[Loaded]):
    """Decoding in the caller's process. `max_decode_bytes` and `max_decode_s` do not apply."""

    def __init__(self, processor: Processor, caps: MediaCaps) -> None:
        self._processor = processor
        self._caps = caps

    async def read(self, group: Group, media: Media, counts: Mapping[Kind, int]) -> Loaded:
        if isinstance(media.source, Embeddings):
            return Loaded(media, counts, media.source)
        with under(self._caps):
            return Loaded(media, counts, read_source(media))

    async def plan(self, group: Group, source: Loaded) -> Planned:
        plan, source.write = plan_item(self._processor, source.media, source.data, source.counts, self._caps)
        return plan

    async def digest(self, settings: str, source: Loaded, salt: str) -> bytes:
        data = source.data
        return content_digest(settings, data.array if isinstance(data, Embeddings) else data, salt)

    async def write(self, group: Group, source: Loaded, arrays: Mapping[str, NDArray[Any]]) -> None:
        assert source.write is not None, "an item is planned before it is written"
        with under(self._caps, limits_request_pixels=False):  # planning has already counted all pixels
            source.write(arrays)

    def let_go(self, group: Group) -> None:
        pass
