"""Planning of media items. A plan contains the number of features of an item and the specs of its arrays."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import Planned
from mindie_mm.errors import InputError, LimitExceeded, OperationalError
from mindie_mm.inputs import PROMPT, Embeddings, Kind, Media, MediaOptions, require_within
from mindie_mm.nn.family import Placeholder, Processor, Spelling
from mindie_mm.nn.model_inputs import EMBEDDINGS
from mindie_mm.settings.limits import PromptLimits
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import ITEM, MediaShape

_log = logging.getLogger(__name__)

_MAX_WARNINGS = 16
"""Maximum number of different warnings about plans, so that a compromised decoder cannot fill memory and the log."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedItem:
    """A media item that has been read and planned, but not preprocessed, and the ids that represent it in a prompt."""

    name: str
    """Name of the item in error messages."""
    shape: MediaShape
    placeholder: Placeholder
    plan: Planned
    spelling: Spelling
    specs: Mapping[str, ArraySpec]
    """Array specs of the item's block."""
    salt: str = ""
    """Salt of the item's digest. Items with different salts have different digests."""

    @property
    def runs(self) -> Sequence[Sequence[int] | NDArray[np.int64]]:
        """For each placeholder of the item, the run of ids that replaces the placeholder."""
        if self.spelling.runs is None:
            return (np.full(self.plan.num_features, self.placeholder.token, np.int64),)
        return self.spelling.runs


def text_placeholder(processor: Processor) -> Placeholder:
    """Return the placeholder of embeddings of text tokens: that of the first kind of media, without its ids around."""
    first = next(iter(processor.placeholders.values()))
    return replace(first, before=(), after=(), caption=("", ""))


class Planner:
    """A planner of media items, which checks the model's limits."""

    def __init__(self, processor: Processor, family: str, limits: PromptLimits) -> None:
        """Create a planner.

        Args:
            processor: Processor of the checkpoint.
            family: Name of the family for error messages.
            limits: Maximum number of items in a prompt, in addition to the model's own limits.

        """
        self.processor = processor
        self._family = family
        self._limits = limits
        self._warnings: set[str] = set()

    def counts(self, media: Sequence[Media]) -> Counter[Kind]:
        """Return the number of items of each kind in a prompt.

        Raises:
            InputError: The model does not support one of the kinds, or does not support these kinds in one prompt.
            LimitExceeded: There are more items than the model supports, or than the limits allow.

        """
        counts: Counter[Kind] = Counter(item.kind for item in media if item.kind != PROMPT)
        if len(media) > counts.total() and not self.processor.traits.takes_prompt_embeds:
            raise InputError("prompt_embeds are not supported for this model; send text or token ids")
        taken, traits = self.processor.placeholders, self.processor.traits
        for kind in counts:
            if kind not in taken:
                raise InputError(
                    f"this model does not accept {kind} inputs; it accepts {', '.join(taken) or 'text only'}"
                )
        require_within(media, self._limits)
        for kind, limit in traits.max_items.items():
            if counts[kind] > limit:
                raise LimitExceeded(f"the prompt has {counts[kind]} items of kind {kind}; the model's limit is {limit}")
        if len(counts) > 1 and not traits.mixes_kinds:
            raise InputError(
                f"the prompt has media of the kinds {' and '.join(counts)}; this model accepts only one kind per prompt"
            )
        return counts

    def check_options(self, options: MediaOptions) -> None:
        """Raise InputError if the family does not support the options."""
        for name in ("min_pixels", "max_pixels"):
            if getattr(options, name) is not None and not self.processor.traits.bounds_pixels:
                raise InputError(
                    f"{name} is set, but {self._family} does not support it, because the model determines the "
                    "image size; leave it out"
                )
        if options.use_audio_in_video and not self.processor.traits.hears_videos:
            raise InputError(
                f"use_audio_in_video is set, but {self._family} does not hear the audio of videos; leave it out"
            )

    def item(self, name: str, media: Media, plan: Planned, salt: str) -> PlannedItem:
        """Create the planned item for `plan`. Log each warning of plans once.

        `PlannedItem` describes `name` and `salt`.

        Raise OperationalError if the model cannot have an item with this grid, these features and these arrays. The
        plan may come from a compromised decoder, and the engine does not check it again.
        """
        processor, kind = self.processor, media.kind
        spelling = Spelling() if kind == PROMPT else processor.spelling(kind, plan.num_features, plan.grid)
        if media.is_embeddings or isinstance(media.source, Embeddings):
            width = processor.feature_width - (processor.extra_width if kind == PROMPT else 0)
            dtype = next(iter(plan.specs.values())).dtype
            expected: Mapping[str, ArraySpec] | None = {EMBEDDINGS: ArraySpec((plan.num_features, width), dtype)}
        else:
            expected = None if spelling is None else processor.specs_of(kind, plan.grid)
        is_unknown = expected is None and EMBEDDINGS not in plan.specs
        if spelling is None or not (is_unknown or (expected and [*plan.specs.items()] == [*expected.items()])):
            arrays = ", ".join(f"{name} {spec.dtype} {spec.shape}" for name, spec in plan.specs.items())
            raise OperationalError(
                f"a decoder planned {plan.num_features} features, the grid {plan.grid} and the arrays {arrays}, which "
                "is not possible for this model"
            )
        if plan.left_out and plan.left_out not in self._warnings and len(self._warnings) < _MAX_WARNINGS:
            self._warnings.add(plan.left_out)
            _log.warning(plan.left_out)
        placeholder = text_placeholder(processor) if kind == PROMPT else processor.placeholders[kind]
        shape = MediaShape(kind, placeholder.token, plan.num_features, plan.grid)
        return PlannedItem(name, shape, placeholder, plan, spelling, {**plan.specs, ITEM: shape.spec}, salt)
