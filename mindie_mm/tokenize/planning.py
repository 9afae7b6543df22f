"""What each media item of a prompt will be: its features, its arrays, what names its content. No array is made yet."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindie_mm.config import MediaCaps
from mindie_mm.errors import InputError, LimitExceeded, naming
from mindie_mm.inputs import Embeddings, Kind, Media, MediaOptions
from mindie_mm.media.caps import under
from mindie_mm.media.image import Data
from mindie_mm.media.source import read_source
from mindie_mm.nn.family import Plan, Processor
from mindie_mm.nn.model import EMBEDDINGS
from mindie_mm.nn.splice import MediaShape
from mindie_mm.salt import salted
from mindie_mm.shm import ArraySpec
from mindie_mm.tokenize.placeholders import Expansion
from mindie_mm.tokenize.wires import Wire

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """A media item, read and planned, not preprocessed yet."""

    expansion: Expansion
    plan: Plan
    data: Data

    @property
    def shape(self) -> MediaShape:
        item = self.expansion
        return MediaShape(item.kind, item.placeholder.token, item.num_features, self.plan.grid)


class Planner:
    """Reads and plans the media items of one checkpoint's prompts."""

    def __init__(self, processor: Processor, family: str, wire: Wire, caps: MediaCaps) -> None:
        """`family`: what errors call it."""
        self._processor = processor
        self._family = family
        self._wire = wire
        self._caps = caps

    def plan(self, media: Sequence[Media]) -> list[PlannedItem]:
        """All items of a prompt, in order. InputError and below, naming the item; LimitExceeded for too many.

        No picture, and no video but for a frame of a turned one, is decoded before all of them are known to be within
        the caps. A clip of sound is decoded as it is planned, for the number of its features, up to its own caps.
        """
        counts: Counter[Kind] = Counter(item.kind for item in media)
        for kind in counts:
            self._processor.placeholder(kind)
        for kind, limit in self._processor.limits().items():
            if counts[kind] > limit:
                raise LimitExceeded(f"the prompt has {counts[kind]} items of kind {kind}; the model's limit is {limit}")
        self._processor.check_kinds(counts.keys())
        with under(self._caps):
            return [self._plan_item(item, index, counts) for index, item in enumerate(media)]

    def _plan_item(self, media: Media, index: int, counts: Mapping[Kind, int]) -> PlannedItem:
        processor, kind = self._processor, media.kind
        with naming(f"media item {index} ({kind})"):
            self._check_options(media.options)
            if isinstance(media.source, Embeddings):
                plan, data = self._plan_embeddings(kind, media.source)
            else:
                data = read_source(media)
                plan = processor.plan(media, data, counts)
            self._wire.check(plan, kind)
        plan = self._under_caps(plan)
        spelling = processor.spelling(kind, plan.num_features, plan.grid)
        return PlannedItem(Expansion(kind, processor.placeholder(kind), plan.num_features, spelling), plan, data)

    def _under_caps(self, plan: Plan) -> Plan:
        """Return `plan` with the caps applied to its preprocessing, which opens frames that are images again.

        A background other than the default becomes part of the settings, because it changes the arrays of pictures.
        """
        counted = replace(self._caps, max_request_pixels=sys.maxsize)  # planning has counted all pixels

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            with under(counted):
                plan.write(arrays)

        background = tuple(self._caps.rgba_background_color)
        is_usual = background == MediaCaps().rgba_background_color
        return replace(plan, write=write, settings=plan.settings if is_usual else f"{plan.settings}, on {background}")

    def _check_options(self, options: MediaOptions) -> None:
        for name in ("min_pixels", "max_pixels"):
            if getattr(options, name) is not None and not self._processor.bounds_pixels:
                raise InputError(f"{name} is given; {self._family} resizes to sizes of its own, and does not take it")

    def _plan_embeddings(self, kind: Kind, source: Embeddings) -> tuple[Plan, Data]:
        """Features handed in instead of media: stored as they are, and spliced without a tower. InputError."""
        array = np.ascontiguousarray(source.array)
        num_features, width = array.shape
        if width != self._processor.feature_width:
            raise InputError(f"the embeddings are {width} wide, the model takes {self._processor.feature_width}")
        if not self._processor.makes(kind, num_features, source.grid):
            raise InputError(f"the model makes no {kind} of {num_features} features that has the grid {source.grid}")

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays[EMBEDDINGS][...] = array

        spec = ArraySpec(array.shape, str(array.dtype))
        return Plan(num_features, {EMBEDDINGS: spec}, f"embeddings {spec} {source.grid}", write, source.grid), array


def content_digest(settings: str, data: Data, salt: str = "") -> bytes:
    """Names the content of an item's block: equal sources under equal settings (`Plan.settings`) make equal arrays.

    Under another `salt` equal contents have other names.
    """
    digest = salted(salt)
    digest.update(settings.encode())
    if isinstance(data, tuple):
        digest.update(f"\0frames {len(data)}\0".encode())
        for frame in data:
            digest.update(content_digest("", frame))
    elif isinstance(data, np.ndarray):
        digest.update(f"\0array {data.dtype} {data.shape}\0".encode())
        digest.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    else:
        digest.update(b"\0bytes\0")
        digest.update(data)
    return digest.digest(DIGEST_BYTES)
