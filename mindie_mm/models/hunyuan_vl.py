"""HunyuanOCR: patches of each image at its own resolution, and a decoder with positions on four axes (XD-RoPE).

Source: arXiv 2511.19575. Token ids, grids and pixels match transformers' `hunyuan_vl`. The features of an image include
one at the end of each row, one before the image and one after the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.models._qwen import QwenModel, QwenProcessor
from mindie_mm.models._qwen_pixels import PixelSettings
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Spelling
from mindie_mm.nn.model import ModelSpec, Positions
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.nn.weights.shares import DECODER_PLAN

_IMAGE_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 512 * 512, "longest_edge": 2048 * 2048},
    "patch_size": 16,
    "temporal_patch_size": 1,
}
_ONLY: Mapping[str, Any] = {"mlp_bias": False, "num_experts": 1, "use_cla": False, "use_qk_norm": True}
"""Values of keys of the first HunyuanOCR that transformers does not read."""
_BICUBIC = 3
_MIN_AXES = 3


class HunYuanVLProcessor(QwenProcessor):
    """Processor for HunyuanOCR. Blocks are the same as in Qwen2-VL, with the patches row by row."""

    traits = replace(
        QwenProcessor.traits,
        grids={"image": QwenProcessor.traits.grids["image"]},
        mindie_layouts={},
        not_packed="transformers' model refuses the positions of packed rows",
    )
    config_name = "HunYuanVLConfig"
    image_types = ("HunYuanVLImageProcessor",)
    image_defaults = _IMAGE_DEFAULTS
    groups_patches = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = read_config(self.config_name, checkpoint)
        check_settings(checkpoint.config, _ONLY, f"{checkpoint.path} (config.json)")
        processor = checkpoint.json("processor_config.json")
        check_settings(processor, {"cat_extra_token": True}, f"{checkpoint.path} (processor_config.json)")
        sections = (config.text_config.rope_parameters or {}).get("mrope_section") or ()
        if len(sections) < _MIN_AXES:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: xdrope_section={list(sections)} must have at least {_MIN_AXES} numbers"
            )
        # HunyuanOCR 1.5 and transformers have different names for these keys.
        before, after = (
            checkpoint.config.get(f"image_{name}_token_id", getattr(config, f"im_{name}_id"))
            for name in ("start", "end")
        )
        self.placeholders = {"image": Placeholder((before,), config.image_token_id, (after,))}

    def image_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        # The reference ignores `resample`.
        return super().image_settings({**config, "resample": _BICUBIC}, where)

    def num_features(self, kind: Kind, grid: tuple[int, ...]) -> int:
        rows, columns = (side // self.image.merge_size for side in grid[1:3])
        return rows * (columns + 1) + 2

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        return super().spelling(kind, num_features, grid) if grid[:1] == (1,) else None


class HunYuanVLModel(QwenModel):
    """The HunyuanOCR model. `module` is transformers' `HunYuanVLForConditionalGeneration`."""

    traits = replace(
        QwenModel.traits,
        mindie_layouts={},
        vision_parts=("model.vision_tower",),
        projector_parts=("model.vision_tower.patch_merger",),
    )
    patch_projection = "model.vision_tower.embeddings.patch_embedding"

    def __init__(self, module: Any, spec: ModelSpec, processor: HunYuanVLProcessor) -> None:
        super().__init__(module, spec, processor)
        self._num_axes = len(self.text_model.rotary_emb.mrope_section)

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        """Return the positions of a prompt on the axes index, width, height and image.

        The last three axes of an image count its columns, its rows and the images of the prompt, each from 0. All other
        positions are the index of the token. A checkpoint with more axes repeats the first one.
        """
        positions = torch.arange(length).repeat(self._num_axes, 1)
        for index, item in enumerate(items):
            height, width = (side // self._merge for side in item.shape.grid[1:3])
            rows, columns = torch.from_numpy(np.indices((height, width + 1)).reshape(2, -1))
            # The features before and after the image have the positions of text.
            positions[-3:, item.start + 1 : item.stop - 1] = torch.stack([columns, rows, torch.full_like(rows, index)])
        return Positions(positions)

    def call_visual(self, patches: Tensor, grids: Tensor) -> Any:
        out = self.module.model.vision_tower(patches, grid_thw=grids)
        out.pooler_output = out.pooler_output[0]
        return out


class HunYuanVL(PretrainedFamily):
    """HunyuanOCR (Tencent, 2025, arXiv 2511.19575), run by transformers' modules."""

    model_types = ("hunyuan_vl",)
    published = "tencent/HunyuanOCR"
    kinds = ("image",)
    processor = HunYuanVLProcessor
    module_name = "HunYuanVLForConditionalGeneration"
    model_class = HunYuanVLModel
    tp_plan = DECODER_PLAN
    other_keys = (
        # HunyuanOCR 1.5 has these names of the ids before and after an image, and of one that is not used.
        *words("image_start_token_id image_end_token_id image_newline_token_id"),
        # Keys of the first HunyuanOCR.
        *_ONLY,
        *words("norm_type routed_scaling_factor text_start_id text_end_id vision_config.hidden_dropout"),
    )
