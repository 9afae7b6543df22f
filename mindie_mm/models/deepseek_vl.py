"""DeepSeek-VL: an image padded to a square, a SigLIP tower and a projector of two layers.

Source: arXiv 2403.05525. Token ids, pixels and logits match transformers' `deepseek_vl`.

Checkpoints may have transformers' layout or the layout of deepseek-ai, whose model_type is multi_modality. The
second layout is translated in memory by the rules of transformers' convert_deepseek_vl_weights_to_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindie_mm.models._deepseek import DeepseekFamily, DeepseekModel, DeepseekProcessor
from mindie_mm.models._deepseek_original import (
    LANGUAGE_RENAMINGS,
    ORIGINAL,
    check_aligner,
    check_original,
    is_hybrid,
    normalization,
    original_pixels,
    siglip_config,
    siglip_renamings,
    translate,
)
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.renaming import Renaming

_RENAMINGS = (
    *siglip_renamings("vision_model.vision_tower"),
    Renaming(r"model\.aligner\.linear1\.(\w+)", r"aligner.layers.0.\1"),
    Renaming(r"model\.aligner\.linear2\.(\w+)", r"aligner.layers.2.\1"),
    *LANGUAGE_RENAMINGS,
)


class DeepseekVLProcessor(DeepseekProcessor):
    """Processor for DeepSeek-VL with one tower."""

    config_name = "DeepseekVLConfig"
    image_type = "DeepseekVLImageProcessor"

    @classmethod
    def translated_original(cls, checkpoint: Checkpoint) -> Checkpoint:
        where, config = str(checkpoint.path), checkpoint.config
        check_original(config, "CLIPVisionTower", "mlp_gelu", where)
        params = config["vision_config"]["params"]
        tower = siglip_config(params, where)
        check_aligner(config, tower, where)
        pixels = original_pixels(checkpoint)
        side = {"height": pixels["image_size"], "width": pixels["image_size"]}
        settings = {
            "image_processor_type": cls.image_type,
            "size": side,
            **{key: pixels[key] for key in ("min_size", "rescale_factor") if key in pixels},
            **normalization(pixels, {"": params}, where),
        }
        return translate(checkpoint, "deepseek_vl", {"vision_config": tower}, settings, _RENAMINGS)


class DeepseekVL(DeepseekFamily):
    """DeepSeek-VL 1.3B (Lu et al., 2024, arXiv 2403.05525), run by transformers' modules."""

    model_types = ("deepseek_vl", ORIGINAL)
    published = "deepseek-community/deepseek-vl-1.3b-chat"
    processor = DeepseekVLProcessor
    module_name = "DeepseekVLForConditionalGeneration"
    model_class = DeepseekModel
    other_keys = ("vision_config.params.ckpt_path", "vision_config.params.output_dim")

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return super().serves(config) and not is_hybrid(config)
