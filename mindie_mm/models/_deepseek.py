"""Shared parts of the DeepSeek-VL families, which pad an image to a square and project its features with two layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, Pixels, Resample, open_image, resize
from mindie_mm.media.image.preprocess import Size, background_of, check_settings, pad, resample_of
from mindie_mm.models._deepseek_original import CHAT_TEMPLATE, ORIGINAL, UNUSED_WEIGHTS
from mindie_mm.models._original_tokenizer import original_tokenizer
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "min_size": 14,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}


class DeepseekProcessor(Processor):
    """Base class of the processors for DeepSeek-VL. A block contains `pixel_values`, uint8 [side, side, 3]."""

    config_name: ClassVar[str]
    image_type: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint in transformers' layout.

        Raise UnsupportedCheckpoint for settings that this layout cannot express.
        """
        if checkpoint.renamings is not None or checkpoint.config.get("model_type") != ORIGINAL:
            return checkpoint
        return cls.translated_original(checkpoint)

    @classmethod
    @abstractmethod
    def translated_original(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Translate a checkpoint from deepseek-ai's layout.

        Raise UnsupportedCheckpoint for settings that transformers' layout cannot express.
        """

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = self.translated(checkpoint)
        self._original = checkpoint.renamings is not None
        where = self.where = str(checkpoint.path)
        config = self.config = read_config(self.config_name, checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        vision = config.vision_config
        if vision.model_type != "siglip_vision_model":
            raise UnsupportedCheckpoint(
                f"{where}: vision_config.model_type is {vision.model_type!r}; only siglip_vision_model is supported"
            )
        self._num_features: int = (vision.image_size // vision.patch_size) ** 2
        check_settings(checkpoint.json("processor_config.json"), {"num_image_tokens": self._num_features}, where)
        self.settings = checkpoint.preprocessor("image", {self.image_type: self.defaults})
        check_settings(self.settings, {"do_resize": True, "do_pad": True}, where)
        self._min_size: int = self.settings["min_size"]
        self.side = self.read_side("size", vision.image_size)
        self.resample = resample_of(self.settings, where)
        self._background = background_of(self.settings["image_mean"])
        self.normalized_arrays = {"pixel_values": Normalization.read(self.settings)}
        """Normalization of each array of a block."""

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template.

        In deepseek-ai's layout, the tokenizer's template is ignored, because the original processor does not read it.
        """
        return (own or CHAT_TEMPLATE) if self._original else super().template(own, tokenizers, kinds)

    def max_tokens(self, kind: Kind) -> int:
        return self._num_features

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self.side, self.side, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            self.write(image.decode(), arrays)

        return Plan(
            self._num_features, self.specs_of(media.kind, ()), f"deepseek {sorted(self.settings.items())}"
        ), write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"pixel_values": ArraySpec((self.side, self.side, 3), "uint8")}

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the normalized arrays of a block, float32 [1, 3, side, side]."""
        return {
            name: normalize(to_device(item.view, name, device).unsqueeze(0))
            for name, normalize in self.normalized_arrays.items()
        }

    def write(self, rgb: Pixels, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Preprocess an image into `arrays`."""
        arrays["pixel_values"][...] = self.squared(rgb, self.side, self.resample, self._background)

    def squared(self, rgb: Pixels, side: int, resample: Resample, background: tuple[int, int, int]) -> Pixels:
        """Resize an image so that its longer side becomes `side`, and pad it to a square with the image centered."""
        scale = side / max(rgb.shape[:2])
        height, width = (max(round(length * scale), self._min_size) for length in rgb.shape[:2])
        return pad(resize(rgb, height, width, resample), side, side, background)

    def read_side(self, name: str, expected: Any) -> int:
        """Return the side in pixels of the square that the setting `name` specifies.

        Raise UnsupportedCheckpoint if the tower expects a different side.
        """
        size = Size.read(self.settings[name], self.where).fixed
        if size != (expected, expected) or self._min_size > expected:
            raise UnsupportedCheckpoint(
                f"{self.where}: {name} is {self.settings[name]} and min_size is {self._min_size}, but the tower takes "
                f"images of {expected}x{expected} pixels"
            )
        return int(expected)


class DeepseekModel(PretrainedModel):
    """The DeepSeek-VL model.

    `module` is transformers' `DeepseekVLForConditionalGeneration`, or its hybrid variant.
    """

    traits = Traits(vision_parts=("model.vision_model",), projector_parts=("model.aligner",))

    def __init__(self, module: Any, spec: ModelSpec, processor: DeepseekProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._processor = processor

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        inputs = self._processor.media_inputs([items], self.spec.device)
        pixels = {name: values.to(self.spec.dtype) for name, values in inputs.items()}
        features: Tensor = self.module.model.get_image_features(**pixels, return_dict=True).pooler_output
        return list(features)


class DeepseekFamily(PretrainedFamily):
    """A family whose checkpoints may also have deepseek-ai's layout."""

    kinds = ("image",)
    processor: ClassVar[type[DeepseekProcessor]]
    unused_weights = UNUSED_WEIGHTS

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return cls.processor.translated(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        checkpoint = cls.translated(checkpoint)
        return checkpoint.fast_tokenizer() if checkpoint.renamings is None else original_tokenizer(checkpoint)
