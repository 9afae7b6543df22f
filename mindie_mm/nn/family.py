"""What a model family answers: the contract between a file in `mindie_mm/models` and everything else.

A family file defines one subclass of `Family`. Its `Processor` runs in the tokenizer and its decoders (no weights, no
device, cheap to import); its `Model` runs next to the accelerator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import settle
from mindie_mm.nn.checkpoint.unused_keys import untranslated_keys, unused_keys
from mindie_mm.nn.model import Model
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.build import renamed_weights
from mindie_mm.nn.weights.pretrained import load_pretrained
from mindie_mm.shm import ArraySpec


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The ids that stand for one media item: `before`, then `token` once per feature, then `after`."""

    before: tuple[int, ...]
    """Ids in front of the item, such as `<|vision_start|>`; put there by `tokenize`, by the template in chat."""
    token: int
    """The id repeated once per feature; words stand on the first ones of an item."""
    after: tuple[int, ...]
    """Ids behind the item."""
    marker: str | None = None
    """What spells one item in a rendered prompt, a control token or plain text; None: the spelling of `token`."""
    caption: tuple[str, str] = ("", "")
    """Text before and after an item in a prompt that no template makes. `{}` is its number of its kind, from 1."""
    control_ids: tuple[int, ...] = ()
    """Ids that text must not make although they are pieces of the vocabulary, not added tokens."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """What stands in a prompt for one item, in place of its marker."""

    text: str | None = None
    """Replaces the marker before the prompt is encoded, and spells the placeholder's token once per run.

    None: the marker stays.
    """
    runs: Sequence[Sequence[int]] | None = None
    """The ids of each run. Those that are the placeholder's token take a feature, others keep their own embedding.

    None: one run, the token once per feature.
    """


@dataclass(frozen=True, slots=True)
class Plan:
    """How one media item becomes arrays in shared memory, known before anything is allocated."""

    num_features: int
    """Features of the item, and so slots that take one."""
    specs: Mapping[str, ArraySpec]
    """Arrays of the block, the first one is the one whose dtype and shape the words carry."""
    settings: str
    """Every preprocessing setting that shapes the arrays, as text; hashed with the source bytes into the digest."""
    write: Callable[[Mapping[str, np.ndarray[Any, Any]]], None]
    """Decodes and preprocesses the item in place: into the arrays of `specs`, or those of `mindie_specs`."""
    grid: tuple[int, ...] = ()
    """The family's own geometry, such as patches (t, h, w): the model finds it in `MediaShape.grid`."""
    mindie_specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    """Arrays on MindIE's wire, each field of the kind's layout by its name."""


class Processor(ABC):
    """A family's half on the tokenizer's side."""

    traits: ClassVar[Traits] = Traits()
    """How it differs from most."""

    feature_width: int
    """Columns of a feature: as many as `ModelSpec.hidden_size` and `extra_width`."""
    placeholders: Mapping[Kind, Placeholder]
    """The ids of an item of each kind that the family takes."""

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint) -> None:
        """UnsupportedCheckpoint if the checkpoint asks for what the family does not serve."""

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Jinja for a conversation with items of `kinds`, where the checkpoint's processor has the template `own`.

        `tokenizers` is its tokenizer's; None: the conversation has no template. Of both a family takes what the
        reference takes.
        """
        return own or tokenizers or self.traits.chat_template

    @abstractmethod
    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        """What the item `media` becomes. Reads headers where it can; MediaError, LimitExceeded.

        `data` is the source's bytes, or what was handed in decoded: pixels in RGB, uint8 [height, width, 3], of a
        video [frames, height, width, 3], or a tuple of its frames; samples of sound, float32 [samples]. `counts` are
        the items of each kind in the prompt.
        """

    @abstractmethod
    def max_tokens(self, kind: Kind) -> int:
        """Most features that one item of `kind` can take."""

    @abstractmethod
    def worst_case(self, kind: Kind) -> Data:
        """Data of an item of `kind` that takes `max_tokens`, or nearly: what start-up measures with."""

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        """Return what stands in the prompt for an item of `kind` with so many features and this `Plan.grid`.

        None: the model makes no such item. Features handed in are held to this. Unless the family says otherwise, all
        items of a kind have `max_tokens` features and no grid.
        """
        return Spelling() if not grid and num_features == self.max_tokens(kind) else None

    def prompt_text(self, text: str) -> str:
        """A rendered prompt's text as the reference's processor words it, before it is encoded; InputError."""
        return text

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """`ids` of an encoded prompt, items not expanded, with what the reference's processor puts around them."""
        return ids

    def pictures(self, arrays: Mapping[str, NDArray[Any]], grid: tuple[int, ...]) -> list[NDArray[np.uint8]]:
        """What an item's arrays show, for people: uint8 [height, width, 3] each; none where they hold no pixels."""
        shown = [array for array in arrays.values() if array.ndim >= 3 and array.shape[-1] == 3]
        return [picture for array in shown for picture in _as_bytes(array).reshape(-1, *array.shape[-3:])]


class Family(ABC):
    """One model family: the classes of this contract are found by it."""

    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in config.json that this family serves."""
    published: ClassVar[str] = ""
    """A repository of huggingface.co that is laid out as the family reads it; others of its name may not be."""
    kinds: ClassVar[tuple[Kind, ...]]
    """Media that it takes."""
    reference: ClassVar[str]
    """What its tests hold it against, such as `transformers' LlavaForConditionalGeneration`."""
    processor: ClassVar[type[Processor]]
    """The tokenizer's half."""

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        """Return the keys of config.json that the family does not use, those of a section as `section.key`."""
        return []

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is of this family; False unless sure."""
        return config.get("model_type") in cls.model_types

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint as the family reads it. One in its authors' own layout is translated in memory.

        Whoever reads other files of a family's checkpoint reads them here. UnsupportedCheckpoint.
        """
        return checkpoint

    @classmethod
    @abstractmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Model | Seq2SeqModel:
        """The model's half, weights loaded on `device` as `dtype`.

        `processor` is the other half, a `cls.processor`: what the family refuses, it has refused by now.
        """

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        """transformers' fast tokenizer of the checkpoint; UnsupportedCheckpoint where it has none."""
        from transformers import AutoTokenizer  # late: it takes a second, and those who only send requests do without

        checkpoint.check_tokenizer()
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            checkpoint.json("tokenizer.json")  # which names the file if it is cut
            raise UnsupportedCheckpoint(f"{checkpoint.path} has no tokenizer that can be read: {error}") from error
        if not tokenizer.is_fast:
            checkpoint.tokenizer_json()  # which says what to do if it is missing
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: its tokenizer, {type(tokenizer).__name__}, does not read tokenizer.json; correct "
                "tokenizer_class in tokenizer_config.json"
            )
        return tokenizer


class PretrainedFamily(Family):
    """A family whose network is a class of transformers': it names that, and its own two halves."""

    module_name: ClassVar[str]
    """transformers' class of the whole model."""
    model_class: ClassVar[type[Any]]
    """The model's half, a `Model` made of the loaded module, its sizes and the processor."""
    unused_weights: ClassVar[tuple[str, ...]] = ()
    """Patterns (fnmatch) of weights that published checkpoints have and the module does not."""
    default_theta: ClassVar[float | None] = None
    """Base of rotary frequencies where config.json states none; None: that of the installed transformers."""
    other_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that transformers' class lacks: the family reads them itself, or they change no answer."""

    def __init_subclass__(cls) -> None:
        """`reference` is that class, unless the family says otherwise."""
        cls.reference = vars(cls).get("reference", f"transformers' {cls.module_name}")

    @classmethod
    def module_class(cls) -> type[Any]:
        """The class `module_name`."""
        import transformers  # late: its layers take seconds to import, and a tokenizer process never needs them

        found: type[Any] = getattr(transformers, cls.module_name)
        return found

    @classmethod
    def config_class(cls) -> type[Any]:
        """The configuration class of `module_class`, found without its layers where transformers maps a model type."""
        from transformers import CONFIG_MAPPING  # late, as above

        found: type[Any]
        for model_type in reversed(cls.model_types):  # the last one is that of the module, if there are several
            if model_type in CONFIG_MAPPING:
                found = CONFIG_MAPPING[model_type]
                return found
        found = cls.module_class().config_class
        return found

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        translated = cls.translated(checkpoint)

        def resolve(stated: dict[str, Any]) -> Any:
            config = cls.config_class().from_dict(dict(stated))
            settle(replace(translated, config=stated), config, cls.default_theta)
            return config

        found = unused_keys(translated.config, resolve)
        if translated.renamings is not None:
            found = [_published(name, checkpoint, translated) for name in found]
            found = [*_untranslated(cls, checkpoint, translated), *found]
        return [name for name in found if name not in cls.other_keys]

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Model | Seq2SeqModel:
        checkpoint = cls.translated(checkpoint)
        module_class = cls.module_class()
        module, spec = load_pretrained(
            module_class,
            checkpoint,
            device,
            dtype,
            unused=cls.unused_weights,
            renamed=renamed_weights(module_class, checkpoint),
            default_theta=cls.default_theta,
        )
        model: Model = cls.model_class(module, spec, processor)
        return model


def _untranslated(family: type[Family], checkpoint: Checkpoint, translated: Checkpoint) -> Iterator[str]:
    """Yield the keys of the original config.json of `translated` that change nothing in it."""
    files = {"tokenizer.json": translated.json("tokenizer.json")}  # made once: that may take a second

    def translate(stated: dict[str, Any]) -> Any:
        return family.translated(replace(checkpoint.with_files(files), config=stated)).contents

    yield from untranslated_keys(checkpoint.config, translate)


def _published(name: str, checkpoint: Checkpoint, translated: Checkpoint) -> str:
    """Return a key of a translated config.json as the original calls it, whose sections may have other names."""
    section, _, key = name.partition(".")
    if not key or section in checkpoint.config:
        return name
    keys = translated.config[section].keys()
    sections = {own: value.keys() for own, value in checkpoint.config.items() if isinstance(value, Mapping)}
    return f"{max(sections, key=lambda own: len(keys & sections[own]))}.{key}"


def _as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels that were normalised before they were stored, from their least to their greatest value."""
    if pixels.dtype == np.uint8:
        return pixels
    least, most = pixels.min(), pixels.max()
    scaled = (pixels - least) * (255 / max(float(most - least), 1e-9))
    return np.asarray(scaled, np.uint8)
