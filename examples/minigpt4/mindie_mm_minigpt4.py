"""MiniGPT-4: a frozen ViT and Q-Former, a linear layer, and a LLaMA.

Source: arXiv 2304.10592. A checkpoint is a Blip2ForConditionalGeneration of transformers whose text model is a LLaMA.
This network is the same as MiniGPT-4's. Only the position of the 32 features in the prompt and the conversation format
differ from BLIP-2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, text_width
from mindie_mm.shm import ArraySpec

_DEFAULTS = {"size": {"height": 224, "width": 224}, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
_IN_TEXT = "<Img><ImageHere></Img>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% else %}###{{ 'Assistant' if message.role == 'assistant' else 'Human' }}: "
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + _IN_TEXT + " {% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}###Assistant:{% endif %}"
)


class MiniGPT4Processor(Processor):
    """Processor that resizes each image to a square. A block contains `pixel_values`, uint8 [1, side, side, 3]."""

    traits = Traits(chat_template=_TEMPLATE)

    def __init__(self, checkpoint: Checkpoint) -> None:
        pixels = checkpoint.preprocessor("image", {"BlipImageProcessor": _DEFAULTS})
        size = pixels["size"]
        if size["height"] != size["width"]:
            raise UnsupportedCheckpoint(f"{checkpoint.path}: size={size['width']}x{size['height']} must be square")
        self.side: int = size["height"]
        self.normalizations = {"image": Normalization.read(pixels)}
        self.feature_width = text_width("Blip2Config", checkpoint)
        self._num_features: int = checkpoint.config.get("num_query_tokens", 32)
        token = checkpoint.config["image_token_index"]
        self.placeholders = {"image": Placeholder((), token, (), marker=_IN_TEXT)}

    def max_tokens(self, kind: Kind) -> int:
        return self._num_features

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self.side, self.side, 3), np.uint8)

    def plan(
        self,
        media: Media,
        data: Data,
        counts: Mapping[Kind, int],
    ) -> tuple[Plan, Write]:
        image, side = open_image(data), self.side

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays["pixel_values"][0] = resize(image.decode(), side, side)

        spec = ArraySpec((1, side, side, 3), "uint8")
        plan = Plan(self._num_features, {"pixel_values": spec}, f"image {side}")
        return plan, write


class MiniGPT4Model(ImageModel, PretrainedModel):
    """The model. `module` is transformers' Blip2ForConditionalGeneration."""

    traits = Traits(
        vision_parts=("vision_model",),
        projector_parts=("language_projection",),
    )

    def __init__(
        self,
        module: Any,
        spec: ModelSpec,
        processor: MiniGPT4Processor,
    ) -> None:
        text = module.language_model
        super().__init__(module, spec, text.model, text.lm_head)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        return list(self.module.get_image_features(self.pixels(items)).pooler_output)


class MiniGPT4(PretrainedFamily):
    """MiniGPT-4 (Zhu et al., 2023), with transformers' BLIP-2 and LLaMA."""

    model_types = ("minigpt4",)
    kinds = ("image",)
    reference = "transformers' BLIP-2, with the features inserted by the test"
    processor = MiniGPT4Processor
    module_name = "Blip2ForConditionalGeneration"
    model_class = MiniGPT4Model
