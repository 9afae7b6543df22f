"""Chameleon: images as discrete tokens of a vector quantizer. The decoder receives their embeddings.

Source: arXiv 2405.09818. Token ids, pixels and image tokens match transformers' `chameleon`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.media.image.preprocess import Preprocess, Size, check_settings, resample_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Spelling
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.pixels import Normalization, joined
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, text_width

_DEFAULTS: Mapping[str, Any] = {
    "resample": 1,
    "size": {"shortest_edge": 512},
    "crop_size": {"height": 512, "width": 512},
    "image_mean": (1.0, 1.0, 1.0),
    "image_std": (1.0, 1.0, 1.0),
    "rescale_factor": 0.0078,
}
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}{{- '' if loop.first else '\\n' -}}"
    "{{- part['text'] if part['type'] == 'text' else '<image>' -}}{%- endfor -%}"
    "{%- endif -%}{%- endfor -%}"
)


class ChameleonProcessor(OneSizeProcessor):
    """Processor for Chameleon."""

    traits = Traits(chat_template=_CHAT_TEMPLATE)

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        settings = checkpoint.preprocessor("image", {"ChameleonImageProcessor": _DEFAULTS})
        check_settings(settings, {"do_resize": True, "do_center_crop": True}, where)
        size, crop = Size.read(settings["size"], where), Size.read(settings["crop_size"], where, square=True).fixed
        edge = size.shortest_edge or 0
        height, width = size.fixed or (edge, edge)
        if crop is None or size.longest_edge is not None or height < crop[0] or width < crop[1]:
            raise UnsupportedCheckpoint(
                f"{where}: size is {settings['size']}, so that some resized images are smaller than crop_size "
                f"({settings['crop_size']})"
            )
        self.size = crop
        self.steps = Preprocess(size, resample_of(settings, where), crop)
        self.normalizations = {"image": Normalization.read(settings)}
        joint = checkpoint.json("processor_config.json")
        self.num_features = int(joint.get("image_seq_length", 1024))
        quantizer = checkpoint.config.get("vq_config") or {}
        shrink = 2 ** (len(quantizer.get("channel_multiplier") or (1, 1, 2, 2, 4)) - 1)
        if (made := crop[0] // shrink * (crop[1] // shrink)) != self.num_features:
            raise UnsupportedCheckpoint(
                f"{where}: image_seq_length is {self.num_features}, but an image has {made} tokens"
            )
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
            raise UnsupportedCheckpoint(
                f"{where}: <image> is token {token} in the tokenizer, but {known} in vocabulary_map"
            )
        self.placeholders = {"image": Placeholder((), token, ())}
        self._run = (start, *[token] * self.num_features, end)
        self._separator = checkpoint.token_id(checkpoint.require_special_token("sep_token"))

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        is_possible = super().spelling(kind, num_features, grid) is not None
        return Spelling(runs=[self._run]) if is_possible else None

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Append the separator that ends a turn, with or without an image."""
        return [*ids, self._separator]


class ChameleonModel(ImageModel, PretrainedModel):
    """The Chameleon model. `module` is transformers' `ChameleonForConditionalGeneration`."""

    traits = Traits(
        vision_parts=("model.vqmodel.encoder", "model.vqmodel.quant_conv", "model.vqmodel.quantize"),
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: ChameleonProcessor) -> None:
        super().__init__(module, spec, module.model, module.lm_head)
        barred = torch.zeros(spec.vocab_size, dtype=torch.bool)
        barred[module.model.vocabulary_mapping.image_tokens] = True
        self._barred = upload(barred, spec.device)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        # Contiguous as in the reference, because the memory format changes the rounding, and thereby the nearest codes.
        pixels = joined([self.normalized(item).contiguous() for item in items])
        features: Tensor = self.module.model.get_image_features(pixels, return_dict=True).pooler_output
        return list(features)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits, with image tokens masked so that they are never generated."""
        logits = super().head(hidden)
        return logits.masked_fill_(self._barred, torch.finfo(logits.dtype).min)


class Chameleon(PretrainedFamily):
    """Chameleon (Meta, 2024, arXiv 2405.09818), run by transformers' modules."""

    model_types = ("chameleon",)
    published = "facebook/chameleon-7b"
    kinds = ("image",)
    processor = ChameleonProcessor
    module_name = "ChameleonForConditionalGeneration"
    model_class = ChameleonModel

    @classmethod
    def module_class(cls) -> type[Any]:
        base = super().module_class()
        # With 16-bit weights, the nearest codes would change, and thereby the tokens of an image.
        return type(base.__name__, (base,), {"_keep_in_fp32_modules_strict": {"vqmodel"}})
