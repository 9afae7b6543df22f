"""LLaVA: images of one size, a CLIP or SigLIP tower and a projector of two layers.

Source: arXiv 2310.03744. Token ids, pixels and logits match transformers' `llava`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from mindie_mm.models._anyres import check_stated, tokens_of_tower
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.vllm_tiles import TileLayout, dtype_of
from mindie_mm.nn.weights.pretrained import read_config

_CLIP: Mapping[str, Any] = {
    "resample": 3,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
# Names of transformers' image processor classes in these checkpoints, with the defaults of each class.
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


class LlavaProcessor(OneSizeProcessor):
    """Processor for LLaVA."""

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
            raise UnsupportedCheckpoint(f"{where}: do_pad is True, which is supported only with LlavaImageProcessor")
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
        layout = TileLayout(self.normalizations["image"].table(), self.size, dtype_of(checkpoint.config))
        self.vllm_items = {"image": layout}

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return self.num_features, ()


class Llava(PretrainedFamily):
    """LLaVA 1.5 (Liu et al., 2023, arXiv 2310.03744), run by transformers' modules."""

    model_types = ("llava",)
    published = "llava-hf/llava-1.5-7b-hf"
    kinds = ("image",)
    processor = LlavaProcessor
    module_name = "LlavaForConditionalGeneration"
    other_keys = ("vision_config.vocab_size",)  # of CLIP's text encoder
    model_class = TowerModel

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        # Pixtral has this model_type, too.
        return super().serves(config) and (config.get("vision_config") or {}).get("model_type") != "pixtral"
