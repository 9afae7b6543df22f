"""DeepSeek-VL: an image padded to a square, through a SigLIP tower and a projector of two layers.

Source: arXiv 2403.05525; transformers' deepseek_vl, whose ids, pixels and logits these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image import Data, Pixels, Resample, open_image, resize
from mindie_mm.media.preprocess import Size, background_of, check_settings, pad, resample_of
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, PretrainedFamily, Processor
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization, joined
from mindie_mm.nn.pretrained import PretrainedModel, read_config
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.shm import ArraySpec

DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "min_size": 14,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}


class DeepseekVLProcessor(Processor):
    """The tokenizer's half. A block holds `pixel_values`, uint8 [side, side, 3]."""

    config_name: ClassVar[str] = "DeepseekVLConfig"
    image_type: ClassVar[str] = "DeepseekVLImageProcessor"
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = self.where = str(checkpoint.path)
        config = self.config = read_config(self.config_name, checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        vision = config.vision_config
        if vision.model_type != "siglip_vision_model":
            raise UnsupportedCheckpoint(
                f"{where}: the tower is {vision.model_type!r}, only siglip_vision_model is served"
            )
        self._num_features: int = (vision.image_size // vision.patch_size) ** 2
        check_settings(checkpoint.json("processor_config.json"), {"num_image_tokens": self._num_features}, where)
        self.settings = checkpoint.preprocessor("image", {self.image_type: self.defaults})
        check_settings(self.settings, {"do_resize": True, "do_pad": True}, where)
        self._min_size: int = self.settings["min_size"]
        self.side = self.read_side("size", vision.image_size)
        self.resample = resample_of(self.settings, where)
        self._background = background_of(self.settings["image_mean"])
        self.normalizations = {"pixel_values": Normalization.read(self.settings)}

    def max_tokens(self, kind: Kind) -> int:
        return self._num_features

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self.side, self.side, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        image = open_image(data)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            self.write(image.decode(), arrays)

        return Plan(self._num_features, self.specs(), f"deepseek_vl {sorted(self.settings.items())}", write)

    def specs(self) -> Mapping[str, ArraySpec]:
        """Arrays of a block."""
        return {"pixel_values": ArraySpec((self.side, self.side, 3), "uint8")}

    def write(self, rgb: Pixels, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Preprocesses an image into `arrays`."""
        arrays["pixel_values"][...] = self.squared(rgb, self.side, self.resample, self._background)

    def squared(self, rgb: Pixels, side: int, resample: Resample, background: tuple[int, int, int]) -> Pixels:
        """An image whose longer side becomes `side`, in the middle of a square."""
        scale = side / max(rgb.shape[:2])
        height, width = (max(round(length * scale), self._min_size) for length in rgb.shape[:2])
        return pad(resize(rgb, height, width, resample), side, side, background)

    def read_side(self, name: str, expected: Any) -> int:
        """Pixels along one side of the square that the setting `name` makes, those that its tower takes."""
        size = Size.read(self.settings[name], self.where).fixed
        if size != (expected, expected) or self._min_size > expected:
            raise UnsupportedCheckpoint(
                f"{self.where}: {name} is {self.settings[name]} and min_size {self._min_size}, "
                f"the tower takes {expected} pixels a side"
            )
        return int(expected)


class DeepseekVLModel(PretrainedModel):
    """Tower and decoder of DeepSeek-VL; `module` is transformers' DeepseekVLForConditionalGeneration or its sibling."""

    vision_parts: ClassVar[tuple[str, ...]] = ("model.vision_model",)
    projector_parts = ("model.aligner",)

    def __init__(self, module: Any, spec: ModelSpec, processor: DeepseekVLProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._normalizations = processor.normalizations

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        pixels = {
            name: joined([self.normalized(item, name) for item in items]).to(self.spec.dtype)
            for name in self._normalizations
        }
        features: Tensor = self.module.model.get_image_features(**pixels, return_dict=True).pooler_output
        return list(features)

    def normalized(self, item: MediaItem, name: str) -> Tensor:
        """float32 [1, 3, side, side], on the device, of the array `name`."""
        return self._normalizations[name](to_device(item.view, name, self.spec.device).unsqueeze(0))


class DeepseekVL(PretrainedFamily):
    """DeepSeek-VL 1.3B (Lu et al., 2024, arXiv 2403.05525) over transformers' own modules."""

    model_types = ("deepseek_vl",)
    published = "deepseek-community/deepseek-vl-1.3b-chat"
    kinds = ("image",)
    processor = DeepseekVLProcessor
    module_name = "DeepseekVLForConditionalGeneration"
    model_class = DeepseekVLModel
