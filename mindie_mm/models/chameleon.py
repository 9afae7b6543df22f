"""Chameleon: images become discrete tokens, by a vector quantiser, and the decoder sees those tokens' embeddings.

Source: arXiv 2405.09818; transformers' chameleon, whose ids, pixels and tokens these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.config import MAX_IMAGE_PIXELS
from mindie_mm.device import Device
from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image import RESAMPLES, Data, open_image, resize
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Family, Placeholder, Plan, Processor, Spelling
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pretrained import PretrainedModel, load_pretrained, text_width
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.shm import ArraySpec

_LANCZOS = 1
_NEEDED = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}{{- '' if loop.first else '\\n' -}}"
    "{{- part['text'] if part['type'] == 'text' else '<image>' -}}{%- endfor -%}"
    "{%- endif -%}{%- endfor -%}"
)


class ChameleonProcessor(Processor):
    """The tokenizer's half. A block holds `pixel_values`, uint8 [height, width, 3], of the size that all images get."""

    chat_template: ClassVar[str | None] = _CHAT_TEMPLATE

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = checkpoint.path
        joint = checkpoint.json("processor_config.json")
        config = joint.get("image_processor") or checkpoint.json("preprocessor_config.json")
        for name in _NEEDED:
            if not config.get(name, True):
                raise UnsupportedCheckpoint(f"{where}: {name} is {config[name]!r}, only True is served")
        if (number := config.get("resample", _LANCZOS)) not in RESAMPLES:
            raise UnsupportedCheckpoint(f"{where}: resample is {number!r}, only {[*RESAMPLES]} are served")
        self._resample = RESAMPLES[number]
        self._size: Mapping[str, int] = config.get("size") or {"shortest_edge": 512}
        crop = config.get("crop_size") or {"height": 512, "width": 512}
        self.height, self.width = int(crop["height"]), int(crop["width"])
        height, width = (self._size.get(name, self._size.get("shortest_edge", 0)) for name in ("height", "width"))
        square = "shortest_edge" in self._size
        if min(height, width) < max(crop.values()) if square else height < self.height or width < self.width:
            raise UnsupportedCheckpoint(f"{where}: of images resized to {self._size} none can be cut to {crop}")
        self.mean: tuple[float, ...] = tuple(config.get("image_mean", (1.0, 1.0, 1.0)))
        self.std: tuple[float, ...] = tuple(config.get("image_std", (1.0, 1.0, 1.0)))
        self.rescale_factor: float = config.get("rescale_factor", 0.0078)
        self._num_features = int(joint.get("image_seq_length", 1024))
        quantizer = checkpoint.config.get("vq_config") or {}
        shrink = 2 ** (len(quantizer.get("channel_multiplier") or (1, 1, 2, 2, 4)) - 1)
        if (made := self.height // shrink * (self.width // shrink)) != self._num_features:
            raise UnsupportedCheckpoint(f"{where}: image_seq_length is {self._num_features}, images make {made} tokens")
        self.feature_width = text_width("ChameleonConfig", checkpoint)
        token, start, end = (
            checkpoint.token_id(checkpoint.special_token(name) or default)
            for name, default in (
                ("image_token", joint.get("image_token", "<image>")),
                ("boi_token", "<racm3:break>"),
                ("eoi_token", "<eoss>"),
            )
        )
        known = (checkpoint.config.get("vocabulary_map") or {}).get("<image>")
        if known != token:
            raise UnsupportedCheckpoint(f"{where}: <image> is {token} to its tokenizer, {known} to its vocabulary_map")
        self.placeholders = {"image": Placeholder((), token, ())}
        self._run = (start, *[token] * self._num_features, end)
        if (separator := checkpoint.special_token("sep_token")) is None:
            raise UnsupportedCheckpoint(f"{where}: the tokenizer has no sep_token")
        self._separator = checkpoint.token_id(separator)

    def max_tokens(self, kind: Kind) -> int:
        del kind
        return self._num_features

    def worst_case(self, kind: Kind) -> Data:
        del kind
        return np.zeros((self.height, self.width, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling:
        del kind, num_features, grid
        return Spelling(runs=[self._run])

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """The turn ends with a separator, also where there is no image."""
        del num_items
        return [*ids, self._separator]

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        del media, counts
        image = open_image(data)
        height, width = self._resized(image.height, image.width)
        if height * width > MAX_IMAGE_PIXELS:
            raise LimitExceeded(
                f"{image.width}x{image.height} pixels would be resized to {width}x{height}; "
                f"the limit is {MAX_IMAGE_PIXELS} pixels"
            )
        top, left = (height - self.height) // 2, (width - self.width) // 2

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            resized = resize(image.decode(), height, width, self._resample)
            arrays["pixel_values"][...] = resized[top : top + self.height, left : left + self.width]

        return Plan(
            num_features=self._num_features,
            specs={"pixel_values": ArraySpec((self.height, self.width, 3), "uint8")},
            settings=f"chameleon {height}x{width}, {self._resample}, crop {self.height}x{self.width}",
            write=write,
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if "shortest_edge" not in self._size:
            return self._size["height"], self._size["width"]
        short = self._size["shortest_edge"]
        long = int(short * max(height, width) / min(height, width))
        return (long, short) if width <= height else (short, long)


class ChameleonModel(PretrainedModel):
    """Quantiser and decoder of Chameleon; `module` is transformers' ChameleonForConditionalGeneration."""

    vision_parts: ClassVar[tuple[str, ...]] = (
        "model.vqmodel.encoder",
        "model.vqmodel.quant_conv",
        "model.vqmodel.quantize",
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: ChameleonProcessor) -> None:
        super().__init__(module, spec, module.model, module.lm_head)
        self._scaled_mean, self._scaled_std = (
            (torch.tensor(values, device=spec.device) * (1.0 / processor.rescale_factor)).view(-1, 1, 1)
            for values in (processor.mean, processor.std)
        )
        self._barred = torch.tensor(module.model.vocabulary_mapping.image_tokens, device=spec.device)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        pixels = torch.stack([self.normalized(item) for item in items])
        features: Tensor = self.module.model.get_image_features(pixels, return_dict=True).pooler_output
        return list(features)

    def normalized(self, item: MediaItem) -> Tensor:
        """float32 [3, height, width], on the device."""
        pixels = to_device(item.view, "pixel_values", self.spec.device)
        planes = pixels.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return planes.sub_(self._scaled_mean).div_(self._scaled_std)

    def head(self, hidden: Tensor) -> Tensor:
        """No token of an image is ever given out."""
        logits = super().head(hidden)
        return logits.index_fill_(1, self._barred, torch.finfo(logits.dtype).min)


class Chameleon(Family):
    """Chameleon (Meta, 2024, arXiv 2405.09818) over transformers' own modules."""

    model_types: ClassVar[tuple[str, ...]] = ("chameleon",)
    kinds: ClassVar[tuple[Kind, ...]] = ("image",)
    reference: ClassVar[str] = "transformers' ChameleonForConditionalGeneration"

    @classmethod
    def processor(cls, checkpoint: Checkpoint) -> ChameleonProcessor:
        return ChameleonProcessor(checkpoint)

    @classmethod
    def model(cls, checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> ChameleonModel:
        from transformers import ChameleonForConditionalGeneration

        processor = ChameleonProcessor(checkpoint)  # first: it says by name what the module could not be made of
        # The nearest of thousands of codes is another one in 16 bits: a picture would be other tokens.
        base = ChameleonForConditionalGeneration
        module_class = type(base.__name__, (base,), {"_keep_in_fp32_modules_strict": {"vqmodel"}})
        module, spec = load_pretrained(module_class, checkpoint, device, dtype)
        return ChameleonModel(module, spec, processor)
