"""LLaVA: an image of one size through a CLIP or SigLIP tower and a projector of two layers.

Source: arXiv 2310.03744; transformers' llava, whose ids, pixels and logits these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.media.image.preprocess import (
    Preprocess,
    Size,
    background_of,
    check_output_size,
    check_settings,
    resample_of,
)
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, PretrainedFamily
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.pictures import PictureModel
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, HALF, Normalization
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config

_CLIP: Mapping[str, Any] = {
    "resample": 3,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
# transformers' classes of image processors that such checkpoints name, and what they do where a file does not say.
_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "LlavaImageProcessor": _CLIP,
    "CLIPImageProcessor": _CLIP,
    "SiglipImageProcessor": {
        "resample": 3,
        "size": {"height": 224, "width": 224},
        "image_mean": HALF,
        "image_std": HALF,
    },
}
_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Tokens that a tower puts before those of its patches."""


def tokens_of_tower(config: Any, where: str) -> int:
    """Features that the tower of a LLaVA's configuration makes of one square picture. UnsupportedCheckpoint."""
    vision = config.vision_config
    if vision.model_type not in _TOWERS:
        raise UnsupportedCheckpoint(f"{where}: the tower is {vision.model_type!r}, only {', '.join(_TOWERS)} is served")
    # Of every tower `default` leaves the first token out; only CLIP's has one that is no patch's.
    dropped = config.vision_feature_select_strategy == "default"
    return int((vision.image_size // vision.patch_size) ** 2 + _TOWERS[vision.model_type] - dropped)


def check_stated(stated: Mapping[str, Any], config: Any, where: str) -> None:
    """What processor_config.json says of the tower is what config.json says. UnsupportedCheckpoint."""
    made = {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": _TOWERS[config.vision_config.model_type],
    }
    check_settings(stated, made, f"{where} (processor_config.json)")


class LlavaProcessor(OneSizeProcessor):
    """The tokenizer's half."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("LlavaConfig", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.num_features = tokens_of_tower(config, where)
        check_stated(checkpoint.json("processor_config.json"), config, where)
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        settings = checkpoint.preprocessor("image", _PROCESSORS)
        padded = settings.get("do_pad", False)
        if padded and settings["image_processor_type"] != "LlavaImageProcessor":
            raise UnsupportedCheckpoint(f"{where}: do_pad is True, which is served of a LlavaImageProcessor alone")
        check_settings(settings, {"do_resize": True}, where)
        size = Size.read(settings["size"], where)
        cropped = settings.get("do_center_crop", False)
        crop = Size.read(settings["crop_size"], where, square=True).fixed if cropped else None
        background = background_of(settings["image_mean"]) if padded else None
        self.steps = Preprocess(size, resample_of(settings, where), crop, background)
        self.normalizations = {"image": Normalization.read(settings)}
        side: int = config.vision_config.image_size
        check_output_size(self.steps.output_size, side, where)
        self.size = side, side


class _Normalizing(Protocol):
    normalizations: Mapping[Kind, Normalization]


class LlavaModel(PictureModel, PretrainedModel):
    """Tower and decoder of LLaVA and its kin; `module` is transformers' LlavaForConditionalGeneration or the like."""

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: _Normalizing) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self.normalizations = processor.normalizations

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features: list[Tensor] = self.module.model.get_image_features(self.pixels(items)).pooler_output
        return list(features)


class Llava(PretrainedFamily):
    """LLaVA 1.5 (Liu et al., 2023, arXiv 2310.03744) over transformers' own modules."""

    model_types = ("llava",)
    published = "llava-hf/llava-1.5-7b-hf"
    kinds = ("image",)
    processor = LlavaProcessor
    module_name = "LlavaForConditionalGeneration"
    other_keys = ("vision_config.vocab_size",)  # of CLIP's texts
    model_class = LlavaModel
