"""Llama 4: tiles separated by special tokens, followed by the whole image, and attention within chunks.

Token ids, pixels and logits match transformers' `llama4`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.media.image.tiles import CanvasSize, cut
from mindie_mm.models._llama4_layers import replace_layers
from mindie_mm.models._llama4_tower import with_real_tower
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import HALF, joined
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_DEFAULTS: Mapping[str, Any] = {
    "resample": 2,
    "size": {"height": 336, "width": 336},
    "image_mean": HALF,
    "image_std": HALF,
    "rescale_factor": 1 / 255,
    "max_patches": 16,
    "resize_to_max_canvas": False,
}
_TUNING = "attn_temperature_tuning"
_IMAGE, _PATCH = "<|image|>", "<|patch|>"
_START, _END = "<|image_start|>", "<|image_end|>"
_NEXT_COLUMN, _NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4Processor(Processor):
    """Processor for Llama 4.

    A block contains `pixel_values`, uint8 [tiles, side, side, 3]. The grid is the number of tiles (rows, columns), not
    counting the tile of the whole image. If this number is 1, the image has no other tile.
    """

    traits = Traits(
        grids={"image": "the numbers of rows and columns of tiles, not counting the tile of the whole image"},
        not_packed="it scales attention by the index of a token in the row",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        checkpoint = _translated(checkpoint)
        config = read_config("Llama4Config", checkpoint)
        text, vision = config.text_config, config.vision_config
        self.feature_width = text.hidden_size
        check_settings(text.to_dict(), {"hidden_act": "silu"}, f"{where} (text_config)")
        if text.attention_chunk_size is None and "chunked_attention" in text.layer_types:
            raise UnsupportedCheckpoint(
                f"{where}: attention_chunk_size is None, but layer_types has chunked_attention layers"
            )
        for token in (_IMAGE, _START, _END, _NEXT_COLUMN, _NEXT_ROW):
            checkpoint.token_id(token)
        if (token_id := checkpoint.token_id(_PATCH)) != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_index is {config.image_token_id}, but the tokenizer's id of {_PATCH} is "
                f"{token_id}"
            )
        self.placeholders = {"image": Placeholder((), token_id, (), _IMAGE)}
        settings = checkpoint.preprocessor("image", {"Llama4ImageProcessor": _DEFAULTS})
        self.side: int = vision.image_size
        needed = {"do_resize": True, "do_rescale": True, "do_normalize": True}
        check_settings(settings, {**needed, "size": {"height": self.side, "width": self.side}}, where)
        self.resample = resample_of(settings, where)
        self.normalization = [settings[name] for name in ("rescale_factor", "image_mean", "image_std")]
        self._most: int = settings["max_patches"]
        self._canvases = _canvases(self._most, self.side)
        self._enlarges: bool = settings["resize_to_max_canvas"]
        ratio = vision.pixel_shuffle_ratio
        stated = {"patch_size": 14, "pixel_shuffle_ratio": 0.5, **checkpoint.json("processor_config.json")}
        check_settings(stated, {"patch_size": vision.patch_size, "pixel_shuffle_ratio": ratio}, where)
        self._tile_features = int((self.side // vision.patch_size) ** 2 * ratio**2)

    def max_tokens(self, kind: Kind) -> int:
        return (self._most + (self._most > 1)) * self._tile_features

    def worst_case(self, kind: Kind) -> Data:
        # Only this canvas is wide enough.
        return np.zeros((self.side, self.side * self._most, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] > self._most:
            return None
        tiles = _num_tiles(grid)
        if tiles * self._tile_features != num_features:
            return None
        rows = (_NEXT_COLUMN.join([_PATCH] * grid[1]) + _NEXT_ROW) * grid[0] if tiles > 1 else ""
        runs = [(self.placeholders["image"].token,) * self._tile_features] * tiles
        return Spelling(f"{_START}{rows}{_IMAGE}{_PATCH}{_END}", runs)

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        return (1, 1) if num_features == self._tile_features else None

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image, side, resample = open_image(data), self.side, self.resample
        canvas = _best_canvas(image.height, image.width, self._canvases, largest=self._enlarges)
        height, width = _fitted(image.height, image.width, canvas, None if self._enlarges else side)
        grid = canvas[0] // side, canvas[1] // side

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, tiles = image.decode(), arrays["pixel_values"]
            on_canvas = np.zeros((*canvas, 3), np.uint8)
            on_canvas[:height, :width] = resize(rgb, height, width, resample)
            cut(on_canvas, tiles[: math.prod(grid)])
            if len(tiles) > 1:
                tiles[-1] = resize(rgb, side, side, resample)

        plan = Plan(
            num_features=_num_tiles(grid) * self._tile_features,
            specs=self.specs_of(media.kind, grid),
            settings=f"{height}x{width} on {canvas}, tiles of {side}, {resample}",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"pixel_values": ArraySpec((_num_tiles(grid), self.side, self.side, 3), "uint8")}

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized tiles of one item, float32 [tiles, 3, side, side].

        The reference rounds to bfloat16 after each operation.
        """
        factor, *statistics = self.normalization
        values = to_device(item.view, "pixel_values", device).permute(0, 3, 1, 2).bfloat16() * factor
        mean, std = (
            upload(torch.tensor(numbers, dtype=torch.bfloat16), values.device).view(-1, 1, 1) for numbers in statistics
        )
        normalized: Tensor = values.sub_(mean).div_(std).float()
        return normalized


def _num_tiles(grid: tuple[int, ...]) -> int:
    """Return the number of tiles of an image, including the tile of the whole image."""
    tiles = math.prod(grid)
    return tiles + (tiles > 1)


def _canvases(most: int, side: int) -> list[CanvasSize]:
    """Return the sizes in pixels of all canvases with up to `most` tiles, in the order of the reference."""
    by_ratio: dict[float, list[CanvasSize]] = {}
    for tiles in range(most, 0, -1):
        for rows in (rows for rows in range(1, tiles + 1) if tiles % rows == 0):
            columns = tiles // rows
            by_ratio.setdefault(rows / columns, []).append((rows * side, columns * side))
    return [canvas for canvases in by_ratio.values() for canvas in canvases]


def _best_canvas(height: int, width: int, canvases: Sequence[CanvasSize], *, largest: bool) -> CanvasSize:
    """Return the smallest canvas on which an image is scaled least.

    The image is enlarged rather than reduced. If `largest`, it is enlarged as much as possible.
    """
    sizes = np.array(canvases, np.float32)  # the reference divides in float32, too
    scales = (sizes / np.array([height, width], np.float32)).min(axis=1)
    enlarging = scales[scales >= 1]
    best = (enlarging.max() if largest else enlarging.min()) if len(enlarging) else scales.max()
    return min((canvas for canvas, scale in zip(canvases, scales, strict=True) if scale == best), key=math.prod)


def _fitted(height: int, width: int, canvas: CanvasSize, limit: int | None) -> tuple[int, int]:
    """Return the size of an image scaled to fit a canvas. No side is enlarged to more than `limit` pixels."""
    (tall, by_height), (wide, by_width) = (
        _scale(side, most, limit) for side, most in zip((height, width), canvas, strict=True)
    )
    is_double = isinstance(by_height, np.float64) and isinstance(by_width, np.float64)
    if by_width < by_height if is_double else np.float32(by_width) < np.float32(by_height):
        return max(min(math.floor(type(by_width)(height) * by_width), tall), 1), wide
    return tall, max(min(math.floor(type(by_height)(width) * by_height), wide), 1)


def _scale(side: int, most: int, limit: int | None) -> tuple[int, np.float32 | np.float64]:
    """Return the length to which one side of an image may be scaled, and the factor.

    The reference computes in float32 with a side of the canvas, which is a tensor, and in float64 with other lengths.
    """
    if limit is not None and max(side, limit) <= most:
        return max(side, limit), np.float64(max(side, limit)) / np.float64(side)
    return most, np.float32(most) / np.float32(side)


class Llama4Model(PretrainedModel):
    """The Llama 4 model. `module` is transformers' `Llama4ForConditionalGeneration`."""

    traits = Traits(vision_parts=("vision_model",), projector_parts=("multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Llama4Processor) -> None:
        text = module.language_model
        super().__init__(module, spec, text.model, text.lm_head)
        replace_layers(text.model)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        pixels = joined([self.normalized(item) for item in items]).to(self.spec.dtype)
        hidden = self.module.vision_model(pixels).last_hidden_state
        return split_features(self.module.multi_modal_projector(hidden), items)


class Llama4(PretrainedFamily):
    """Llama 4 (Meta, 2025), run by transformers' modules and mindie_mm's attention layers and mixtures of experts."""

    model_types = ("llama4",)
    published = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    kinds = ("image",)
    processor = Llama4Processor
    module_name = "Llama4ForConditionalGeneration"
    other_keys = (
        "text_config.for_llm_compressor",  # the layout of experts while they are quantized
        "vision_config.vision_feature_layer",  # the last layer, which is the only one that the network returns
    )
    model_class = Llama4Model

    @classmethod
    def module_class(cls) -> type[Any]:
        return with_real_tower(super().module_class())

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return _translated(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        return checkpoint.fast_tokenizer(read_config("Llama4Config", _translated(checkpoint)))


def _translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose `attn_temperature_tuning` is a bool. It is 4 in published files, which means True."""
    text = checkpoint.config.get("text_config")
    stated = text.get(_TUNING) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or isinstance(stated, bool) or not isinstance(stated, int):
        return checkpoint
    config = {**checkpoint.config, "text_config": {**text, _TUNING: bool(stated)}}
    return checkpoint.translated(config, {}, ())
