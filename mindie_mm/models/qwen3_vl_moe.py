"""Qwen3-VL with a mixture of experts in the decoder, such as Qwen3-VL-30B-A3B and Qwen3-VL-235B-A22B.

Source: arXiv 2511.21631. Everything but the decoder's layers is the same as in Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._qwen3 import Qwen3Model, Qwen3Processor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import Model
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.seq2seq import Seq2SeqModel


class Qwen3VLMoeProcessor(Qwen3Processor):
    """Processor for Qwen3-VL with a mixture of experts."""

    traits = replace(Qwen3Processor.traits, samples_like_vllm=True)
    config_name = "Qwen3VLMoeConfig"
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen3VLVideoProcessor",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        text = checkpoint.config.get("text_config") or {}
        if text.get("norm_topk_prob", True) is not True:  # transformers always divides by the sum
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: text_config.norm_topk_prob is {text['norm_topk_prob']!r}; only True is supported"
            )


class Qwen3VLMoe(PretrainedFamily):
    """Qwen3-VL with a mixture of experts (Bai et al., 2025, arXiv 2511.21631), run by transformers' modules."""

    model_types = ("qwen3_vl_moe",)
    published = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    kinds = ("image", "video")
    processor = Qwen3VLMoeProcessor
    module_name = "Qwen3VLMoeForConditionalGeneration"
    model_class = Qwen3Model
    default_theta = 5_000_000.0  # the default of transformers 4; transformers 5 has a tenth of this value
    other_keys = ("text_config.norm_topk_prob",)

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Model | Seq2SeqModel:
        """Load the model. The checkpoint may have separate weights for each expert.

        Programs that quantize or fine-tune a checkpoint save such weights.
        """
        from transformers import conversion_mapping as transformers  # imported late, because it is slow

        name = cls.model_types[0]
        joined, separate = map(transformers.get_checkpoint_conversion_mapping, (name, "qwen2_moe"))
        transformers.register_checkpoint_conversion_mapping(name, joined + separate, overwrite=True)
        try:
            return super().model(checkpoint, processor, device, dtype)
        finally:  # otherwise `save_pretrained` would convert the weights twice
            transformers.register_checkpoint_conversion_mapping(name, joined, overwrite=True)
