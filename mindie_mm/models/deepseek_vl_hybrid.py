"""DeepSeek-VL with two towers: SAM for the padded image at high resolution, SigLIP at low resolution.

Source: arXiv 2403.05525. Token ids, pixels and logits match transformers' `deepseek_vl_hybrid`. deepseek-ai's
layout is translated by the rules of transformers' convert_deepseek_vl_hybrid_weights_to_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.media.image.encoded_image import Pixels, resize
from mindie_mm.media.image.preprocess import background_of, check_settings, resample_of
from mindie_mm.models._deepseek import DEFAULTS, DeepseekFamily, DeepseekModel, DeepseekProcessor
from mindie_mm.models._deepseek_original import (
    LANGUAGE_RENAMINGS,
    ORIGINAL,
    check_aligner,
    check_features,
    check_original,
    is_hybrid,
    normalization,
    original_pixels,
    siglip_config,
    siglip_renamings,
    translate,
)
from mindie_mm.models._sam import keep_positions
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.renaming import Renaming
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pixels import Normalization
from mindie_mm.shm import ArraySpec

_HIGH = "high_res_pixel_values"
_SAM: Mapping[str, Any] = {
    "width": 768,
    "layers": 12,
    "heads": 12,
    "patch_size": 16,
    "window_size": 14,
    "prompt_embed_dim": 256,
    "global_attn_indexes": [2, 5, 8, 11],
}
"""Sizes of `sam_b_downsample`, the only tower whose features match SigLIP's. Sizes in config.json take precedence."""
_TOWER = "vision_model.vision_tower_high.vision_tower"
_ENCODER = r"model\.high_res_vision_model\.vision_encoder\."


def _neck(module: str, published: str) -> tuple[Renaming, ...]:
    """Return the renamings of the weights of a neck, which has two convolutions, each followed by a norm."""
    return (
        Renaming(rf"{module}\.conv1\.weight", f"{_TOWER}.{published}.0.weight"),
        Renaming(rf"{module}\.layer_norm1\.(\w+)", rf"{_TOWER}.{published}.1.\1"),
        Renaming(rf"{module}\.conv2\.weight", f"{_TOWER}.{published}.2.weight"),
        Renaming(rf"{module}\.layer_norm2\.(\w+)", rf"{_TOWER}.{published}.3.\1"),
    )


_RENAMINGS = (
    Renaming(rf"{_ENCODER}pos_embed", f"{_TOWER}.pos_embed"),
    Renaming(rf"{_ENCODER}patch_embed\.projection\.(\w+)", rf"{_TOWER}.patch_embed.proj.\1"),
    Renaming(rf"{_ENCODER}layers\.(\d+)\.layer_norm(\d)\.(\w+)", rf"{_TOWER}.blocks.\1.norm\2.\3"),
    Renaming(rf"{_ENCODER}layers\.(\d+)\.(.+)", rf"{_TOWER}.blocks.\1.\2"),
    *_neck(rf"{_ENCODER}neck", "neck"),
    *_neck(r"model\.high_res_vision_neck", "neck_hd"),
    Renaming(r"model\.high_res_vision_proj\.conv1\.weight", f"{_TOWER}.downsamples.0.weight"),
    Renaming(r"model\.high_res_vision_proj\.conv2\.weight", f"{_TOWER}.downsamples.1.weight"),
    Renaming(r"model\.high_res_vision_alpha", f"{_TOWER}.hd_alpha_downsamples"),
    *siglip_renamings("vision_model.vision_tower_low.vision_tower"),
    Renaming(r"model\.aligner\.vision_proj\.(\w+)", r"aligner.low_up_proj.\1"),
    Renaming(r"model\.aligner\.high_res_vision_proj\.(\w+)", r"aligner.high_up_proj.\1"),
    Renaming(r"model\.aligner\.proj\.(\w+)", r"aligner.layers.1.\1"),
    *LANGUAGE_RENAMINGS,
)


class DeepseekVLHybridProcessor(DeepseekProcessor):
    """Processor for DeepSeek-VL with two towers.

    A block contains `pixel_values`, uint8 [side, side, 3], and `high_res_pixel_values`, uint8 [high side, high side,
    3].
    """

    config_name = "DeepseekVLHybridConfig"
    image_type = "DeepseekVLHybridImageProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DEFAULTS,
        "high_res_resample": DEFAULTS["resample"],
        "high_res_size": {"height": 1024, "width": 1024},
        "high_res_image_mean": DEFAULTS["image_mean"],
        "high_res_image_std": DEFAULTS["image_std"],
    }

    @classmethod
    def translated_original(cls, checkpoint: Checkpoint) -> Checkpoint:
        where, config = str(checkpoint.path), checkpoint.config
        check_original(config, "HybridVisionTower", "low_high_hybrid_split_mlp_gelu", where)
        params = config["vision_config"]["params"]
        check_settings(params, {"concat_type": "tuple"}, f"{where} (vision_config.params)")
        high, low = params["high_res_cfg"], params["low_res_cfg"]
        check_features(high, f"{where} (vision_config.params.high_res_cfg)")
        towers = {"vision_config": siglip_config(low, where), "high_res_vision_config": _sam_config(high, where)}
        check_aligner(config, towers["vision_config"], where)
        pixels = original_pixels(checkpoint)
        settings = {
            "image_processor_type": cls.image_type,
            "high_res_size": {"height": pixels["image_size"], "width": pixels["image_size"]},
            "size": {"height": low["image_size"], "width": low["image_size"]},
            "resample": 2,  # the original code downscales the high-resolution image bilinearly
            **{key: pixels[key] for key in ("min_size", "rescale_factor") if key in pixels},
            **normalization(pixels, {"high_res_": high, "": low}, where),
        }
        return translate(checkpoint, "deepseek_vl_hybrid", towers, settings, _RENAMINGS)

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = self.translated(checkpoint)
        super().__init__(checkpoint)
        tower = self.config.high_res_vision_config
        if tower.model_type != "sam_vision_model":
            raise UnsupportedCheckpoint(
                f"{self.where}: the high-resolution tower is {tower.model_type!r}; only sam_vision_model is supported"
            )
        self._high_side = self.read_side("high_res_size", tower.image_size)
        self._high_resample = resample_of(self.settings, self.where, "high_res_resample")
        self._high_background = background_of(self.settings["high_res_image_mean"])
        self.normalized_arrays[_HIGH] = Normalization.read(self.settings, "high_res_")

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {**super().specs_of(kind, grid), _HIGH: ArraySpec((self._high_side, self._high_side, 3), "uint8")}

    def write(self, rgb: Pixels, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        high = self.squared(rgb, self._high_side, self._high_resample, self._high_background)
        arrays[_HIGH][...] = high
        arrays["pixel_values"][...] = resize(high, self.side, self.side, self.resample)


class DeepseekVLHybridModel(DeepseekModel):
    """The DeepSeek-VL model with two towers. `module` is transformers' `DeepseekVLHybridForConditionalGeneration`."""

    traits = replace(
        DeepseekModel.traits,
        vision_parts=(
            "model.vision_model",
            "model.high_res_vision_model",
            "model.high_res_vision_neck",
            "model.high_res_vision_proj",
        ),
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: DeepseekVLHybridProcessor) -> None:
        super().__init__(module, spec, processor)
        keep_positions(module.model.high_res_vision_model)


class DeepseekVLHybrid(DeepseekFamily):
    """DeepSeek-VL 7B (Lu et al., 2024, arXiv 2403.05525), run by transformers' modules."""

    model_types = ("deepseek_vl_hybrid", ORIGINAL)
    published = "deepseek-community/deepseek-vl-7b-chat"
    processor = DeepseekVLHybridProcessor
    module_name = "DeepseekVLHybridForConditionalGeneration"
    model_class = DeepseekVLHybridModel
    other_keys = (
        *(f"vision_config.params.freeze_{part}" for part in ("high", "low")),
        *(
            f"vision_config.params.{part}_res_cfg.{key}"
            for part in ("high", "low")
            for key in ("ckpt_path", "output_dim")
        ),
        "vision_config.params.high_res_cfg.select_layer",  # the original code passes select_layer to SigLIP only
    )

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == cls.model_types[0] or is_hybrid(config)


def _sam_config(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original parameters of a SAM tower into transformers' configuration.

    Raise UnsupportedCheckpoint if the tower is not supported.
    """
    if (name := params.get("model_name")) != "sam_b_downsample":
        raise UnsupportedCheckpoint(
            f"{where}: the high-resolution tower is {name!r}; only sam_b_downsample is supported"
        )
    sizes = {key: params.get(key, size) for key, size in _SAM.items()}
    return {
        "model_type": "sam_vision_model",
        "hidden_size": sizes["width"],
        "mlp_dim": 4 * sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "output_channels": sizes["prompt_embed_dim"],
        "image_size": params.get("image_size", 336),
        "patch_size": sizes["patch_size"],
        "window_size": sizes["window_size"],
        "global_attn_indexes": sizes["global_attn_indexes"],
        "hidden_act": "gelu",
    }
