"""The interface between a model family, which is a file in `mindie_mm/models`, and the rest of the package.

A family file defines one subclass of `Family`. The family's `Processor` runs in the tokenizer and decoder processes,
needs neither weights nor a device, and is cheap to import. The family's `Model` runs in the engine process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from mindie_mm.device import Device
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import Model
from mindie_mm.nn.model_inputs import ModelInputs
from mindie_mm.nn.pixels import as_bytes
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.vllm_items import PatchLayout
from mindie_mm.nn.vllm_tiles import TileLayout
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import ITEM


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The ids that represent one media item in a prompt: `before`, then `token` once per feature, then `after`."""

    before: tuple[int, ...]
    """Ids before the item, such as `<|vision_start|>`. The chat template adds them, or else `tokenize`."""
    token: int
    """The id repeated once per feature. Handle words replace the first of these ids."""
    after: tuple[int, ...]
    """Ids after the item."""
    marker: str | None = None
    """Text of one item in a rendered prompt: a control token or plain text. None means the text of `token`."""
    caption: tuple[str, str] = ("", "")
    """Text before and after an item in a prompt without a template. `{}` is its number in its kind, from 1."""
    control_ids: tuple[int, ...] = ()
    """Ids that text must never encode to, although they are ordinary vocabulary entries, not added tokens."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """The text and ids that replace the marker of one item in a prompt."""

    text: str | None = None
    """Text that replaces the marker before the prompt is encoded. None keeps the marker.

    The text contains the placeholder's token once for each entry of `runs`.
    """
    runs: Sequence[Sequence[int]] | None = None
    """Ids that replace each placeholder token of the text.

    The embedding of each placeholder id among them is replaced by a feature. Other ids keep their embeddings. None
    means that a single token is replaced by one placeholder id per feature.
    """
    number: tuple[str, str] | None = None
    """Texts around the number of the item among the items of its kind, counted from 0, which precede `text`. None means
    that the item is not numbered."""
    second_token: int | None = None
    """A second placeholder id in `runs`, such as that of a film's audio. Its embeddings are replaced, too."""


Write = Callable[[Mapping[str, np.ndarray[Any, Any]]], None]
"""Function that decodes and preprocesses an item into the arrays of `Plan.specs` or of `Plan.mindie_specs`."""


_Name = Annotated[str, msgspec.Meta(pattern=rf"^(?!{ITEM}\Z).{{1,100}}\Z")]
_Specs = Mapping[_Name, ArraySpec]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Plan(msgspec.Struct, frozen=True):
    """A plan for turning one media item into arrays in shared memory. The plan is made before anything is allocated.

    A decoder sends it to the tokenizer process as `Planned`. The types are validated on arrival, because the decoder
    may be compromised. `Planner.item` compares the plan with the model.
    """

    num_features: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    """Number of features of the item, which is also the number of its placeholder ids."""
    specs: Annotated[_Specs, msgspec.Meta(min_length=1, max_length=16)]
    """Arrays of the block, except `ITEM`, which the tokenizer process writes.

    The handle words contain the dtype and shape of the first array.
    """
    settings: Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*\Z")]
    """Every preprocessing setting that affects the arrays, as text.

    The digest is a hash of this text, the sizes of the plan and the source. A zero byte separates them from the source.
    """
    grid: tuple[_Number, ...] = ()
    """Geometry that only the family interprets, such as patches (t, h, w).

    The model reads it from `MediaShape.grid`.
    """
    mindie_specs: Annotated[_Specs, msgspec.Meta(max_length=16)] = {}
    """Arrays of the item in MindIE's wire format. The keys are the field names of the kind's layout.

    Empty if this format cannot describe the item.
    """
    left_out: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{0,300}\Z")] = ""
    """Warning about a part of the item that the model could use, but that is left out. Empty if there is none."""


class Processor(ModelInputs, ABC):
    """The part of a family that runs in the tokenizer and decoder processes."""

    traits: ClassVar[Traits] = Traits()
    """The ways in which this family differs from most other families."""

    feature_width: int
    """Number of columns of a feature: the sum of `ModelSpec.hidden_size` and `ModelSpec.extra_width`."""
    extra_width: int = 0
    """`ModelSpec.extra_width`, by which a feature is wider than the embedding of a text token."""
    placeholders: Mapping[Kind, Placeholder]
    """Placeholder of each kind of media that the family supports."""
    num_embeddings: int | None = None
    """`ModelSpec.embedding_size`. None means `vocab_size` of transformers' configuration of the text model."""
    vllm_items: Mapping[Kind, PatchLayout | TileLayout] = {}
    """Layout of an item's tensors in vLLM's payloads, by kind. Items of other kinds are neither sent nor read."""
    vllm_tokens: Mapping[Kind, int] = {}
    """Placeholder id in vLLM's prompts, for each kind in which it is not that of `placeholders`."""
    mindie_pad: int = -1
    """Id that MindIE writes over further placeholders in its wire format: `pad_token_id` of the text config, or -1."""

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the settings of the checkpoint.

        Raises:
            UnsupportedCheckpoint: The checkpoint needs a feature that the family does not support.

        """

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template for a conversation with media. Choose the same template as the reference processor.

        Args:
            own: Jinja source in the checkpoint's processor files, or None.
            tokenizers: Jinja source in the checkpoint's tokenizer files, or None.
            kinds: Kinds of the items in the conversation.

        Returns:
            Jinja source, or None if the conversation has no template.

        """
        return own or tokenizers or self.traits.chat_template

    @abstractmethod
    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        """Plan the arrays of one item, and return the plan with the function that writes the arrays.

        Read only the headers of the source if they suffice.

        Args:
            media: The item.
            data: Bytes of the source, or decoded media. Images are RGB, uint8 [height, width, 3]. Videos are uint8
                [frames, height, width, 3] or a tuple of frames. Audio is float32 [samples].
            counts: Number of items of each kind in the prompt.

        Raises:
            MediaError: The source cannot be decoded.
            LimitExceeded: The item is larger than a limit allows.

        """

    @abstractmethod
    def max_tokens(self, kind: Kind) -> int:
        """Return the maximum number of features of one item of `kind`."""

    @abstractmethod
    def worst_case(self, kind: Kind) -> Data:
        """Return the data of an item of `kind` that has `max_tokens` features or nearly as many.

        The engine measures its memory use with this item when it starts.
        """

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        """Return the spelling of an item in the prompt, or None if no item can have these features and this grid.

        This method also validates requests with precomputed embeddings. By default, every item of a kind has
        `max_tokens` features and no grid.

        Args:
            kind: Kind of the item.
            num_features: Number of features of the item.
            grid: The item's `Plan.grid`.

        """
        return Spelling() if not grid and num_features == self.max_tokens(kind) else None

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec] | None:
        """Return `Plan.specs` of an item with this grid, or None if they do not follow from the grid.

        The default is None.

        The tokenizer compares the result with the plan of a decoder process, because a hostile file may have taken over
        that process. The result is empty if only embeddings can have this grid.

        Args:
            kind: Kind of the item.
            grid: The item's `Plan.grid`, which `spelling` has accepted.

        """
        return None

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        """Return the grid of embeddings that were given without a grid.

        Return None if it does not follow from their number.

        Args:
            kind: Kind of the item.
            num_features: Number of features of the item.

        """
        return None if self.spelling(kind, num_features, ()) is None else ()

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number of features and the grid of an item that comes as tensors of vLLM.

        Families with `vllm_items` implement this method.

        Args:
            kind: Kind of the item.
            stated: Numbers that the tensors state: `Patches.stated` or `Tiles.stated`.

        """
        raise NotImplementedError

    @property
    def speech(self) -> SpeechTraits:
        """How the checkpoint is asked to transcribe speech, if it accepts audio."""
        return SpeechTraits()

    def prompt_text(self, text: str) -> str:
        """Rewrite the text of a rendered prompt as the reference processor does before encoding.

        Raises:
            InputError: The reference processor does not accept the text.

        """
        return text

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Add the ids that the reference processor puts around an encoded prompt. Items are not expanded yet."""
        return ids

    def images(self, arrays: Mapping[str, NDArray[Any]], grid: tuple[int, ...]) -> list[NDArray[np.uint8]]:
        """Return the pixels of an item for display.

        Args:
            arrays: Arrays of the item's block.
            grid: The item's `Plan.grid`.

        Returns:
            Images, uint8 [height, width, 3] each. Empty if the arrays contain no pixels.

        """
        shown = [array for array in arrays.values() if array.ndim >= 3 and array.shape[-1] == 3]
        return [image for array in shown for image in as_bytes(array).reshape(-1, *array.shape[-3:])]


class Family(ABC):
    """A model family. It creates the processor and the model for the rest of the package."""

    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in config.json that this family supports."""
    published: ClassVar[str] = ""
    """Hugging Face Hub repository whose layout the family reads. Similar repositories may have other layouts."""
    kinds: ClassVar[tuple[Kind, ...]]
    """Kinds of media that the family supports."""
    reference: ClassVar[str]
    """Implementation whose results the tests expect, such as `transformers' LlavaForConditionalGeneration`."""
    processor: ClassVar[type[Processor]]
    """Class of the family's processor."""

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        """Return the keys of config.json that the family does not use.

        A key in a section is returned as `section.key`.
        """
        return []

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this config.json certainly belongs to this family."""
        return config.get("model_type") in cls.model_types

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint in the layout that the family reads. Translate other layouts in memory.

        Code that reads other files of the checkpoint must read them from the returned checkpoint.

        Raises:
            UnsupportedCheckpoint: The checkpoint cannot be translated.

        """
        return checkpoint

    @classmethod
    @abstractmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Model | Seq2SeqModel:
        """Return the model with its weights loaded.

        Args:
            checkpoint: Where the weights are.
            processor: An instance of `cls.processor`. Its constructor has already refused unsupported settings.
            device: Where the model runs.
            dtype: The dtype of the weights.

        """

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        """Return the checkpoint's tokenizer as a transformers fast tokenizer.

        Raises:
            UnsupportedCheckpoint: The checkpoint has no readable tokenizer, or no fast tokenizer.

        """
        return checkpoint.fast_tokenizer()
