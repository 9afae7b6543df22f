"""Traits that declare how a family differs from most other families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindie_mm.inputs import Kind
from mindie_mm.nn.mindie import Layout, PromptLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The traits of a family. `Processor` and `Model` each declare the traits that concern them."""

    chat_template: str | None = None
    """Processor: Jinja source of the chat template for a checkpoint without a template."""
    inserted_at: int | None = None
    """Processor: index in the result of `frame` at which all items are inserted, in order.

    None if markers in the text define the positions of the items.
    """
    bounds_pixels: bool = False
    """Processor: whether `min_pixels` and `max_pixels` are supported for images and frames.

    If not, they are refused.
    """
    hears_videos: bool = False
    """Processor: whether `use_audio_in_video` is supported. If not, it is refused."""
    has_grid_thw: bool = False
    """Processor: whether the grid of an image or a video begins with the numbers of transformers' `image_grid_thw`."""
    grids: Mapping[Kind, str] = field(default_factory=dict)
    """Processor: meaning of the grid, for each kind whose grid does not follow from the number of features.

    Embeddings of these kinds require the grid.
    """
    max_items: Mapping[Kind, int] = field(default_factory=dict)
    """Processor: maximum number of items of a kind in one prompt. Kinds that are not listed have no limit."""
    mixes_kinds: bool = True
    """Processor: whether one prompt may contain items of several kinds."""
    mindie_layouts: Mapping[Kind, Layout] = field(default_factory=dict)
    """Processor and model: layout of the handle words of each kind of item in MindIE's wire format.

    If empty, and without `mindie_prompt_layout`, items in that format are refused.
    """
    mindie_prompt_layout: PromptLayout | None = None
    """Processor and model: layout of the handle words of a whole prompt in MindIE's wire format, instead of
    `mindie_layouts`."""
    vision_parts: tuple[str, ...] = ()
    """Model: names of the tower's modules, to which `vision_device` and `vision_bits` apply.

    The model must call the modules themselves, not their methods, because hooks move the tensors. The name of a
    ModuleList means all modules in it. If this tuple is empty, both settings are refused.
    """
    projector_parts: tuple[str, ...] = ()
    """Model: names of the modules that project features to the decoder's width, inside the tower or after it.

    `projector_device` and `projector_bits` apply to these modules in the same way.
    """
    token_types: tuple[str, ...] = ()
    """Processor: names of transformers' arrays with the type of each token: text, or the kind of its item."""
    not_packed: str = ""
    """Processor: why trainers cannot pack several samples into one row for transformers' model. Empty if they can."""
    packs_apart: bool = False
    """Processor: whether a padding token must separate packed samples, and positions count the tokens of the row.

    transformers looks up by its position whether a token belongs to an image. With positions that begin again, it would
    look up a token of the first sample.
    """
    splice_adds: bool = False
    """Processor and model: whether features are added to the embedding of the placeholder instead of replacing it."""
    needs_ids: bool = False
    """Processor and model: whether the layers need the ids of text tokens in addition to their embeddings."""
    alone_in_vllm: bool = False
    """Processor: whether vLLM counts the tokens of each item as if it were alone in its prompt, and transformers does
    not."""
    frames_only_media_in_vllm: bool = False
    """Processor: whether vLLM adds the ids of `Processor.frame` only to prompts with media."""
    samples_like_vllm: bool = False
    """Processor: whether the frames of videos equal vLLM's if `Media.is_like_vllm` is true."""
    joins_items: bool = False
    """Model: whether a bidirectional span may cover several items. One step then computes all tokens of these items."""

    @property
    def takes_prompt_embeds(self) -> bool:
        """True if prompts may contain embeddings of text tokens, which replace the embeddings of placeholders."""
        return self.inserted_at is None and not self.splice_adds and not self.needs_ids
