"""Gemma 3: images of one size with bidirectional attention, and optional crops of elongated images.

Source: arXiv 2503.19786. Token ids, pixels and logits match transformers' `gemma3`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import Size, check_output_size, check_settings, resample_of
from mindie_mm.models._gemma import soft_capped, spans_of
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.vllm_tiles import TileLayout
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.shm import ArraySpec

_TOWER = "siglip_vision_model"
_DEFAULTS: Mapping[str, Any] = {
    "resample": 2,
    "size": {"height": 224, "width": 224},
    "image_mean": HALF,
    "image_std": HALF,
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
"""Texts of special tokens, for tokenizers that do not name these tokens."""


class Gemma3Processor(Processor):
    """Processor for Gemma 3.

    A block contains `pixel_values`, uint8 [1 + crops, side, side, 3]. The whole image precedes its crops. The grid
    is (crops,), or empty if there are no crops.
    """

    traits = Traits(token_types=("token_type_ids",), packs_apart=True)

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Gemma3Config", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        _check_text(config.text_config, where)
        self._side: int = config.vision_config.image_size
        self._features = _features(config, where)
        settings = checkpoint.preprocessor("image", {"Gemma3ImageProcessor": _DEFAULTS})
        stated = {"image_seq_length": 256, **checkpoint.json("processor_config.json")}
        check_settings(stated, {"image_seq_length": self._features}, where)
        check_settings(settings, {"do_resize": True}, where)
        check_output_size(Size.read(settings["size"], where, square=True).fixed, self._side, where)
        self._resample = resample_of(settings, where)
        self.normalizations: Mapping[Kind, Normalization] = {"image": Normalization.read(settings)}
        self._scanning: bool = settings["do_pan_and_scan"]
        self._least: int = settings["pan_and_scan_min_crop_size"]
        self._most_crops: int = settings["pan_and_scan_max_num_crops"]
        self._ratio: float = settings["pan_and_scan_min_ratio_to_activate"]
        if self._scanning and not 0 < self._most_crops <= self._least:
            # With more crops than the minimum size of a crop in pixels, the last crop could be empty.
            raise UnsupportedCheckpoint(
                f"{where}: pan_and_scan_max_num_crops={self._most_crops} must be between 1 and "
                f"pan_and_scan_min_crop_size ({self._least})"
            )
        self._start, image, self._end = (checkpoint.special_token(name) or text for name, text in _TOKENS.items())
        for token in (self._start, self._end):
            checkpoint.token_id(token)
        if (token_id := checkpoint.token_id(image)) != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_index is {config.image_token_id}, but the tokenizer's id of {image!r} is "
                f"{token_id}"
            )
        self._image, self._token = image, token_id
        self.placeholders = {"image": Placeholder((), token_id, (), self._start)}
        table, sides = self.normalizations["image"].table(), (self._side, self._side)
        # vLLM does not run this family in float16.
        self.vllm_items = {"image": TileLayout(table, sides, "bfloat16", count="num_patches")}

    def max_tokens(self, kind: Kind) -> int:
        return (1 + self._most_crops if self._scanning else 1) * self._features

    def worst_case(self, kind: Kind) -> Data:
        if not self._scanning:
            return np.zeros((self._side, self._side, 3), np.uint8)
        width = max(self._most_crops, math.ceil(self._ratio)) * self._least
        return np.zeros((self._least, width, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        crops = grid[0] if grid else 0
        if len(grid) > 1 or crops < 0 or (1 + crops) * self._features != num_features:
            return None
        text = whole = f"\n\n{self._start}{self._image}{self._end}\n\n"
        if crops:
            text = (
                f"Here is the original image {whole} and here are some crops to help you see better "
                f"{' '.join([whole] * crops)}"
            )
        return Spelling(text, [(self._token,) * self._features] * (1 + crops))

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...]:
        crops = num_features // self._features - 1
        return (crops,) if crops > 0 else ()

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image, side, resample = open_image(data), self._side, self._resample
        crops = self.crops(image.height, image.width)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, pixels = image.decode(), arrays["pixel_values"]
            pixels[0] = resize(rgb, side, side, resample)
            for place, (rows, columns) in zip(pixels[1:], crops, strict=True):
                place[...] = resize(rgb[rows, columns], side, side, resample)

        grid = (len(crops),) if crops else ()
        plan = Plan(
            num_features=(1 + len(crops)) * self._features,
            specs=self.specs_of(media.kind, grid),
            settings=f"gemma3 {side}, {resample}, {len(crops)} crops",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"pixel_values": ArraySpec((1 + sum(grid), self._side, self._side, 3), "uint8")}

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        num_features = stated[0] * self._features
        return num_features, self.grid_of(kind, num_features)

    def crops(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Return the rows and columns of each crop of an image.

        The crops divide the longer side. Their number is about the ratio of the sides.
        """
        long, short = max(height, width), min(height, width)
        if not self._scanning or long / short < self._ratio:
            return []
        # There are at least two crops. If they would be smaller than the minimum, the image is not cropped.
        count = min(math.floor(long / short + 0.5), long // self._least)
        count = min(max(count, 2), self._most_crops)
        step = math.ceil(long / count)
        if min(step, short) < self._least:
            return []
        cuts = [slice(start, start + step) for start in range(0, count * step, step)]
        whole = slice(None)
        return [(whole, cut) for cut in cuts] if width >= height else [(cut, whole) for cut in cuts]


def _features(config: Any, where: str) -> int:
    """Return the number of features of one image after the pooling of the projector.

    Raise UnsupportedCheckpoint if the tower or the pooling is not supported.
    """
    vision, tokens = config.vision_config, config.mm_tokens_per_image
    if vision.model_type != _TOWER:
        raise UnsupportedCheckpoint(
            f"{where}: vision_config.model_type is {vision.model_type!r}; only {_TOWER} is supported"
        )
    side, patch = vision.image_size, vision.patch_size
    rows = side // patch if isinstance(side, int) and isinstance(patch, int) else 0
    pooled = math.isqrt(max(tokens, 0))
    if not 0 < pooled <= rows:
        raise UnsupportedCheckpoint(
            f"{where}: mm_tokens_per_image is {tokens}, which does not fit image_size {side} with patch_size {patch}"
        )
    return int((rows // (rows // pooled)) ** 2)


def _check_text(text: Any, where: str) -> None:
    """Raise UnsupportedCheckpoint for capped scores, bidirectional attention, or sliding layers without a window."""
    if text.attn_logit_softcapping is not None:
        raise UnsupportedCheckpoint(
            f"{where}: attn_logit_softcapping is {text.attn_logit_softcapping}, which transformers ignores; only null "
            "is supported"
        )
    if text.sliding_window is None and "sliding_attention" in text.layer_types:
        raise UnsupportedCheckpoint(f"{where}: sliding_window is None, but layer_types has sliding_attention layers")
    if text.use_bidirectional_attention:
        raise UnsupportedCheckpoint(f"{where}: use_bidirectional_attention=True must be False for a decoder")


class Gemma3Model(TowerModel):
    """The Gemma 3 model. `module` is transformers' `Gemma3ForConditionalGeneration`."""

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        return split_features(self.module.model.get_image_features(self.pixels(items)).pooler_output, items)

    def bidirectional_spans(self, length: int, items: Sequence[MediaItem]) -> Tensor | None:
        """Return a span for each run of adjacent image tokens. The whole image and each crop are separate runs."""
        return spans_of(length, items)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits, with the soft cap that transformers' `Gemma3ForCausalLM` applies if the config has one."""
        return soft_capped(super().head(hidden), self.module.config.text_config.final_logit_softcapping)


class Gemma3(PretrainedFamily):
    """Gemma 3 (Gemma Team, 2025, arXiv 2503.19786), run by transformers' modules."""

    model_types = ("gemma3",)
    published = "google/gemma-3-4b-it"
    kinds = ("image",)
    processor = Gemma3Processor
    module_name = "Gemma3ForConditionalGeneration"
    model_class = Gemma3Model
