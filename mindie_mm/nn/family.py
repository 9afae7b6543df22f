"""What a model family answers: the contract between a file in `mindie_mm/models` and everything else.

A family file defines one subclass of `Family`. Its `Processor` runs in the tokenizer processes (no weights, no
device, cheap to import); its `Model` runs next to the accelerator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mindie_mm.device import Device
from mindie_mm.inputs import Kind, Media
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.mindie import Layout
from mindie_mm.nn.model import Model
from mindie_mm.shm import ArraySpec


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The ids that stand for one media item: `before`, then `token` once per feature, then `after`."""

    before: tuple[int, ...]
    """Ids in front of the run, such as <|vision_start|>; put there by `tokenize`, by the template in chat."""
    token: int
    """The id repeated once per feature; words stand on the first ones of the run."""
    after: tuple[int, ...]
    """Ids behind the run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one media item becomes arrays in shared memory, known before anything is allocated."""

    num_tokens: int
    """Placeholder tokens (features) that the item takes."""
    specs: Mapping[str, ArraySpec]
    """Arrays of the block, the first one is the one whose dtype and shape the words carry."""
    settings: str
    """Every preprocessing setting that shapes the arrays, as text; hashed with the source bytes into the digest."""
    write: Callable[[Mapping[str, np.ndarray[Any, Any]]], None]
    """Decodes and preprocesses the item in place: into the arrays of `specs`, or those of `mindie_specs`."""
    mindie_specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    """Arrays on MindIE's wire, each field of the kind's layout by its name."""


class Processor(ABC):
    """A family's half on the tokenizer's side."""

    mindie_layouts: ClassVar[Mapping[Kind, Layout]] = MappingProxyType({})
    """The slots of each kind on MindIE's wire, as its model's; none, and that wire is refused."""

    @abstractmethod
    def placeholder(self, kind: Kind) -> Placeholder:
        """The ids of an item of `kind`; InputError for a kind that the family does not take."""

    @abstractmethod
    def plan(self, media: Media, data: bytes | NDArray[np.uint8]) -> Plan:
        """What the item `media` becomes. Reads headers only; MediaError, LimitExceeded.

        `data` is the source's bytes, or RGB pixels handed in as such: uint8 [height, width, 3], of a video
        [frames, height, width, 3].
        """

    @abstractmethod
    def max_tokens(self, kind: Kind) -> int:
        """Most placeholder tokens that one item of `kind` can take."""

    def limits(self) -> Mapping[Kind, int]:
        """Most items of each kind in one prompt; none named, none limited."""
        return {}


class Family(ABC):
    """One model family: the classes of this contract are found by it."""

    model_types: ClassVar[tuple[str, ...]]
    """`model_type`s of config.json that this family serves."""
    kinds: ClassVar[tuple[Kind, ...]]
    """Media that it takes."""

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is of this family; False unless sure."""
        return config.get("model_type") in cls.model_types

    @classmethod
    @abstractmethod
    def processor(cls, checkpoint: Checkpoint) -> Processor:
        """The tokenizer's half; UnsupportedCheckpoint if the checkpoint uses what the family refuses."""

    @classmethod
    @abstractmethod
    def model(cls, checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> Model:
        """The model's half, weights loaded on `device` as `dtype`."""


__all__ = ["Family", "Placeholder", "Plan", "Processor"]
