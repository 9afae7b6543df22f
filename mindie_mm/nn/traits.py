"""Traits by which a family tells the rest of the package how it differs from most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindie_mm.inputs import Kind
from mindie_mm.nn.mindie import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of a family. `Processor` and `Model` each state the traits that concern them."""

    chat_template: str | None = None
    """Processor: Jinja source for a checkpoint that has no template of its own."""
    inserted_at: int | None = None
    """Processor: index in the framed ids at which all items stand, in order. None if the text says where they stand."""
    bounds_pixels: bool = False
    """Processor: whether `min_pixels` and `max_pixels` bound images and frames. If not, they are refused."""
    max_items: Mapping[Kind, int] = field(default_factory=dict)
    """Processor: maximum number of items of a kind in one prompt. Kinds that are not named have no limit."""
    mixes_kinds: bool = True
    """Processor: whether one prompt may hold items of several kinds."""
    mindie_layouts: Mapping[Kind, Layout] = field(default_factory=dict)
    """Both: first slots of an item of each kind on MindIE's wire. If empty, that wire is refused."""
    vision_parts: tuple[str, ...] = ()
    """Model: names of the tower's modules, which `vision_device` and `vision_bits` move. If empty, both are refused.

    The model must call these modules themselves, not methods of theirs, because hooks move the tensors. A ModuleList
    stands for the modules in it.
    """
    projector_parts: tuple[str, ...] = ()
    """Model: names of the modules that project features to the decoder's width, inside the tower or after it.

    `projector_device` and `projector_bits` move them in the same way.
    """
    splice_adds: bool = False
    """Model: whether features are added to the embedding of the placeholder instead of replacing it."""
    joins_items: bool = False
    """Model: whether a bidirectional span may cover several items. One step then computes all tokens between them."""
    prefix_sees_later_media: bool = False
    """Model: whether the hidden states of prompt tokens depend on media after them."""
    prefix_sees_length: bool = False
    """Model: whether the hidden states of prompt tokens depend on the length of the prompt."""
