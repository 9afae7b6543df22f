"""BLIP-2: an image as the outputs of a Q-Former's queries, in front of the text, before its BOS.

Source: arXiv 2301.12597; transformers' blip_2, whose ids, pixels and logits these are. Its decoders alone (OPT); the
checkpoints with a T5 are encoder-decoders, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from mindie_mm import faults
from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image import Data, open_image
from mindie_mm.media.preprocess import Preprocess, Size, check_settings, check_type, resample_of
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Family, Placeholder, Plan, Processor, placeholder_of
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization, joined
from mindie_mm.nn.pretrained import PretrainedModel, load_pretrained, read_config
from mindie_mm.nn.splice import MediaItem
from mindie_mm.shm import ArraySpec

_IMAGE_PROCESSOR = "BlipImageProcessor"
_DEFAULTS: Mapping[str, Any] = {
    "image_processor_type": _IMAGE_PROCESSOR,
    "size": {"height": 384, "width": 384},
    "resample": 3,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}


class Blip2Processor(Processor):
    """The tokenizer's half. A block holds `pixel_values`, uint8 [1, side, side, 3]."""

    inserted: ClassVar[bool] = True
    # The form in which the paper asks of an image; an answer is what follows.
    chat_template: ClassVar[str | None] = (
        "{% for message in messages %}"
        "{% set role = 'Answer' if message.role == 'assistant' else 'Question' %}{{ role }}:"
        "{% if message.content is string %} {{ message.content }}"
        "{% else %}{% for part in message.content if part.type == 'text' %} {{ part.text }}{% endfor %}{% endif %}"
        "{% if not loop.last %} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %} Answer:{% endif %}"
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Blip2Config", checkpoint)
        if not config.use_decoder_only_language_model:
            raise UnsupportedCheckpoint(
                f"{where}: the text model is {config.text_config.model_type!r}, an encoder-decoder; decoders are served"
            )
        if config.image_token_id is None:
            raise UnsupportedCheckpoint(f"{where}: config.json has no image_token_index")
        settings = {**_DEFAULTS, **checkpoint.preprocessor("image_processor", "preprocessor_config.json")}
        check_type(settings, "image_processor_type", (_IMAGE_PROCESSOR,), where)
        check_settings(settings, {"do_resize": True}, where)
        size = Size.read(settings["size"], where, square=True)
        self.side: int = config.vision_config.image_size
        if size.fixed != (self.side, self.side):
            raise UnsupportedCheckpoint(
                f"{where}: images are resized to {size}, the tower takes {self.side} pixels a side"
            )
        self._steps = Preprocess(size, resample_of(settings, where), None, None)
        self.normalization = Normalization.read(settings)
        self._num_features: int = config.num_query_tokens
        self._placeholder = Placeholder((), config.image_token_id, ())

    def placeholder(self, kind: Kind) -> Placeholder:
        return placeholder_of({"image": self._placeholder}, kind)

    def limits(self) -> Mapping[Kind, int]:
        return {"image": 1}

    def max_tokens(self, kind: Kind) -> int:
        del kind
        return self._num_features

    def worst_case(self, kind: Kind) -> Data:
        del kind
        return np.zeros((self.side, self.side, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        del media, counts
        image = open_image(data)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays["pixel_values"][0] = self._steps.apply(image.decode())
            faults.point("mid-fill")

        spec = ArraySpec((1, self.side, self.side, 3), "uint8")
        return Plan(self._num_features, {"pixel_values": spec}, f"blip_2 {self._steps}", write)


class Blip2Model(PretrainedModel):
    """Tower, Q-Former and decoder; `module` is transformers' Blip2ForConditionalGeneration."""

    def __init__(self, module: Any, spec: ModelSpec, normalization: Normalization) -> None:
        super().__init__(module, spec, module.language_model.model, module.language_model.lm_head)
        self._normalization = normalization

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        pixels = joined([self.normalized(item) for item in items]).to(self.spec.dtype)
        features: list[Tensor] = self.module.get_image_features(pixels).pooler_output
        return list(features)

    def normalized(self, item: MediaItem) -> Tensor:
        """float32 [1, 3, side, side], on the device."""
        return self._normalization(from_dlpack(item.view["pixel_values"]).to(self.spec.device))


class Blip2(Family):
    """BLIP-2 (Li et al., 2023, arXiv 2301.12597) with a decoder, over transformers' own modules."""

    model_types: ClassVar[tuple[str, ...]] = ("blip-2",)
    kinds: ClassVar[tuple[Kind, ...]] = ("image",)
    reference: ClassVar[str] = "transformers' Blip2ForConditionalGeneration"

    @classmethod
    def processor(cls, checkpoint: Checkpoint) -> Blip2Processor:
        return Blip2Processor(checkpoint)

    @classmethod
    def model(cls, checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> Blip2Model:
        # Late: the layers take seconds to import, and a tokenizer process never needs them.
        from transformers import Blip2ForConditionalGeneration

        normalization = Blip2Processor(checkpoint).normalization  # first: it refuses by name
        module, spec = load_pretrained(Blip2ForConditionalGeneration, checkpoint, device, dtype)
        return Blip2Model(module, spec, normalization)
