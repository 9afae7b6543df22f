"""BLIP-2: images as outputs of Q-Former queries. In the prompt, images precede the text and its BOS token.

Source: arXiv 2301.12597. Token ids, pixels and logits match transformers' `blip_2`. The text model is a
decoder (OPT) or an encoder-decoder (T5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image.preprocess import Preprocess, Size, check_output_size, check_settings, resample_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.seq2seq import Seq2SeqModel, load_seq2seq
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, load_pretrained, read_config

_DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 384, "width": 384},
    "resample": 3,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'Answer' if message.role == 'assistant' else 'Question' %}{{ role }}:"
    "{% if message.content is string %} {{ message.content }}"
    "{% else %}{% for part in message.content if part.type == 'text' %} {{ part.text }}{% endfor %}{% endif %}"
    "{% if not loop.last %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %} Answer:{% endif %}"
)
"""Chat template in the paper's format for questions about an image."""
_T5_POSITIONS = 512
"""Number of tokens that T5 was trained with. T5 has relative positions and therefore no hard limit."""


class Blip2Processor(OneSizeProcessor):
    """Processor for BLIP-2."""

    traits = Traits(
        chat_template=_CHAT_TEMPLATE,
        inserted_at=0,
        max_items={"image": 1},
        not_packed="it may have an encoder, which attends to the whole row",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Blip2Config", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        if config.image_token_id is None:
            raise UnsupportedCheckpoint(f"{where}: config.json has no image_token_index")
        settings = checkpoint.preprocessor("image", {"BlipImageProcessor": _DEFAULTS})
        check_settings(settings, {"do_resize": True}, where)
        size = Size.read(settings["size"], where, square=True)
        side: int = config.vision_config.image_size
        self.steps = Preprocess(size, resample_of(settings, where))
        check_output_size(self.steps.output_size, side, where)
        self.size = side, side
        self.normalizations = {"image": Normalization.read(settings)}
        self.num_features = config.num_query_tokens
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}


class _Tower(ImageModel):
    """Vision tower and Q-Former. `module` is transformers' `Blip2ForConditionalGeneration`."""

    traits = Traits(vision_parts=("vision_model",), projector_parts=("language_projection",))
    module: Any

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features: list[Tensor] = self.module.get_image_features(self.pixels(items)).pooler_output
        return list(features)


class Blip2Model(_Tower, PretrainedModel):
    """The BLIP-2 model with a decoder."""

    def __init__(self, module: Any, spec: ModelSpec, processor: Blip2Processor) -> None:
        super().__init__(module, spec, module.language_model.model, module.language_model.lm_head)


class Blip2Seq2Seq(_Tower, Seq2SeqModel):
    """The BLIP-2 model with an encoder-decoder."""

    def __init__(self, module: Any, spec: ModelSpec, rules: GenerationRules, processor: Blip2Processor) -> None:
        super().__init__(module, spec, module.language_model, self._head, rules)

    def _head(self, hidden: Tensor) -> Tensor:
        text = self.module.language_model
        scaled = hidden * text.model_dim**-0.5 if text.config.scale_decoder_outputs else hidden
        logits: Tensor = text.lm_head(scaled)
        return logits


class Blip2(PretrainedFamily):
    """BLIP-2 (Li et al., 2023, arXiv 2301.12597), run by transformers' modules."""

    model_types = ("blip-2",)
    published = "Salesforce/blip2-opt-2.7b"
    kinds = ("image",)
    processor = Blip2Processor
    module_name = "Blip2ForConditionalGeneration"
    other_keys = ("text_config.n_positions",)

    @classmethod
    def longest_prompt(cls, checkpoint: Checkpoint) -> int | None:
        if read_config("Blip2Config", checkpoint).use_decoder_only_language_model:
            return super().longest_prompt(checkpoint)
        return _t5_positions(checkpoint)

    @classmethod
    def model(
        cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype
    ) -> Blip2Model | Blip2Seq2Seq:
        if read_config("Blip2Config", checkpoint).use_decoder_only_language_model:
            module, spec = load_pretrained(cls.module_class(), checkpoint, device, dtype)
            return Blip2Model(module, spec, processor)
        longest = _t5_positions(checkpoint)
        module, spec, rules = load_seq2seq(cls.module_class(), checkpoint, device, dtype, longest)
        return Blip2Seq2Seq(module, spec, rules, processor)


def _t5_positions(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config["text_config"].get("n_positions", _T5_POSITIONS))
