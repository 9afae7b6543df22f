"""LFM2-VL: an image at its own resolution, or tiles and a thumbnail, and a decoder with short convolutions.

Source: arXiv 2511.23404. Token ids, pixels and logits match transformers' `lfm2_vl`. The tower is SigLIP 2 with
positions for any resolution (NaFlex).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, Pixels, open_image, resize
from mindie_mm.media.image.patches import patchify, unpatchify
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.media.image.tiles import closest_grid
from mindie_mm.models._lfm2 import LAYER_TYPE, OTHER_KEYS, TP_PLAN, replace_short_convs, short_conv_state
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item, padded
from mindie_mm.nn.pixels import HALF, Normalization, joined
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_DEFAULTS: Mapping[str, Any] = {
    "resample": 2,
    "image_mean": HALF,
    "image_std": HALF,
    "do_pad": True,
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
}
_TOKENS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
"""Keys of special tokens in tokenizer_config.json with transformers' defaults."""
_KEPT_SIZES = 16
"""Number of sizes of images whose positions are kept. For large towers, a size takes 2 MB."""


class Lfm2VLProcessor(Processor):
    """Processor for LFM2-VL.

    A block contains `pixel_values`, uint8 [patches, patch * patch * 3]: the patches of each tile, row by row, and then
    those of the whole image. The grid is (rows, columns, height, width): the numbers of rows and columns of tiles, and
    the size of the whole image in patches. An image without tiles has the grid (1, 1, height, width), and tiles without
    a thumbnail the grid (rows, columns, 0, 0).
    """

    traits = Traits(
        grids={"image": "the numbers of rows and columns of tiles, and the size of the whole image in patches"},
        not_packed="its layers carry a state from each sample to the next",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Lfm2VlConfig", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        settings = checkpoint.preprocessor("image", {"Lfm2VlImageProcessor": _DEFAULTS})
        patch, factor = config.vision_config.patch_size, config.downsample_factor
        check_settings(settings, {"encoder_patch_size": patch, "downsample_factor": factor, "do_pad": True}, where)
        # The reference ignores do_resize.
        self.patch: int = patch
        self._factor: int = factor
        self._cell: int = patch * factor
        """Side in pixels of the square that becomes one token."""
        self._tiles = _tiles(settings, where)
        self._side: int = settings["tile_size"]
        if self._side % self._cell:
            raise UnsupportedCheckpoint(
                f"{where}: tile_size={self._side} must be a multiple of encoder_patch_size * downsample_factor "
                f"({self._cell})"
            )
        self._has_thumbnail: bool = settings["use_thumbnail"]
        self._least: int = settings["min_image_tokens"]
        self._most: int = settings["max_image_tokens"]
        self._tolerance: float = settings["max_pixels_tolerance"]
        self._resample = resample_of(settings, where)
        self.normalization = Normalization.read(settings)
        self._texts = {name: checkpoint.special_token(name) or text for name, text in _TOKENS.items()}
        token = checkpoint.token_id(self._texts["image_token"])
        if token != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_id is {config.image_token_id}, but the tokenizer's id of "
                f"{self._texts['image_token']!r} is {token}"
            )
        self.placeholders = {"image": Placeholder((), token, ())}

    def max_tokens(self, kind: Kind) -> int:
        tiles = max(self._tiles, default=0) * (self._side // self._cell) ** 2
        return max(tiles + self._most * self._has_thumbnail, self._most)

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((*self._largest(), 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if not self._is_possible(grid) or self._num_features(grid) != num_features:
            return None
        rows, columns = grid[:2]
        image, start, end, thumbnail = self._texts.values()
        text = image
        if rows * columns > 1:
            places = ((row, column) for row in range(1, rows + 1) for column in range(1, columns + 1))
            text = "".join(f"<|img_row_{row}_col_{column}|>{image}" for row, column in places)
            text += f"{thumbnail}{image}" * self._has_thumbnail
        token, area = self.placeholders["image"].token, self._factor**2
        runs = [(token,) * (height * width // area) for height, width in self.sizes(grid)]
        return Spelling(f"{start}{text}{end}", runs)

    def _is_possible(self, grid: tuple[int, ...]) -> bool:
        if len(grid) != 4 or any(side % self._factor for side in grid[2:]):
            return False
        rows, columns, height, width = grid
        tiles = rows * columns
        is_whole = min(height, width) > 0 and height * width <= self._most * self._factor**2
        if tiles == 1:
            return is_whole
        return tiles in self._tiles and (is_whole if self._has_thumbnail else height == width == 0)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        grid = self._grid(image.height, image.width)
        patch, side, resample = self.patch, self._side, self._resample

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, patches, start = image.decode(), arrays["pixel_values"].reshape(-1, patch, patch, 3), 0
            rows, columns, *whole = grid
            if rows * columns > 1:
                larger = resize(rgb, rows * side, columns * side, resample)
                crops = [
                    larger[row * side : (row + 1) * side, column * side : (column + 1) * side]
                    for row in range(rows)
                    for column in range(columns)
                ]
            else:
                crops = []
            if all(whole):
                crops.append(resize(rgb, whole[0] * patch, whole[1] * patch, resample))
            for crop in crops:
                stop = start + crop.shape[0] * crop.shape[1] // patch**2
                patchify(crop, patches[start:stop], patch, 1)
                start = stop

        specs = self.specs_of(media.kind, grid)
        return Plan(self._num_features(grid), specs, f"lfm2 {grid} of {side}, {patch}, {resample}", grid), write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        num_patches = sum(height * width for height, width in self.sizes(grid))
        return {"pixel_values": ArraySpec((num_patches, 3 * self.patch**2), "uint8")}

    def sizes(self, grid: Sequence[int]) -> list[tuple[int, int]]:
        """Return the height and width of each tile and of the whole image in patches."""
        rows, columns, height, width = grid
        tile = self._side // self.patch
        tiles = [(tile, tile)] * (rows * columns) if rows * columns > 1 else []
        return [*tiles, (height, width)] if height else tiles

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized patches of an item, float32 [patches, patch * patch * 3]."""
        pixels = to_device(item.view, "pixel_values", device)
        return self.normalization(pixels.view(1, len(pixels), -1, 3)).permute(0, 2, 3, 1).reshape(pixels.shape)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        sizes = self.sizes(item.shape.grid)
        areas = [height * width for height, width in sizes]
        # As in the reference, tiles and images are padded to the patches of the largest possible one.
        longest = max((self._side // self.patch) ** 2, self._most * self._factor**2)
        patches = [
            padded(part.unsqueeze(0), (longest, part.shape[1])) for part in self.normalized(item, device).split(areas)
        ]
        return {
            "pixel_values": torch.cat(patches),
            "pixel_attention_mask": torch.stack([(torch.arange(longest) < area).int() for area in areas]),
            "spatial_shapes": torch.tensor(sizes),
        }

    def _num_features(self, grid: Sequence[int]) -> int:
        return sum(height * width for height, width in self.sizes(grid)) // self._factor**2

    def _grid(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the grid of an image of `height` x `width` pixels. Raise LimitExceeded if it is too narrow."""
        rows, columns = 1, 1
        if self._tiles and self._is_large(height, width):
            rows, columns = closest_grid(height, width, self._side, self._tiles[0], self._tiles[-1])
            if not self._has_thumbnail:
                return rows, columns, 0, 0
        whole = self._resized(height, width)
        if (tokens := math.prod(whole) // self._cell**2) > self._most:
            raise LimitExceeded(
                f"the image has {width}x{height} pixels; in these proportions it would take {tokens} tokens, but the "
                f"limit is {self._most} (max_image_tokens). Crop or pad the image"
            )
        return rows, columns, whole[0] // self.patch, whole[1] // self.patch

    def _is_large(self, height: int, width: int) -> bool:
        """Return whether an image is cut into tiles."""
        new_height, new_width = (max(self.patch, round(side / self._cell) * self._cell) for side in (height, width))
        return new_height * new_width > self._most * self._cell**2 * self._tolerance

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels of the resized whole image."""
        cell, least, most = self._cell, self._least * self._cell**2, self._most * self._cell**2
        new_height, new_width = (max(cell, round(side / cell) * cell) for side in (height, width))
        if new_height * new_width > most:
            scale = math.sqrt(height * width / most)
            new_height, new_width = (max(cell, math.floor(side / scale / cell) * cell) for side in (height, width))
        elif new_height * new_width < least:
            scale = math.sqrt(least / (height * width))
            new_height, new_width = (math.ceil(side * scale / cell) * cell for side in (height, width))
        return new_height, new_width

    def _largest(self) -> tuple[int, int]:
        """Return the height and width of an image with the most features, or nearly the most."""
        rows = math.isqrt(self._most)
        sizes = [(rows * self._cell, self._most // rows * self._cell)]
        for rows in range(1, max(self._tiles, default=0) + 1):
            columns, side = self._tiles[-1] // rows, self._side
            while not self._is_large(rows * side, columns * side):
                side += self._side
            sizes.append((rows * side, columns * side))
        return max(sizes, key=lambda size: self._num_features(self._grid(*size)))

    def images(self, arrays: Mapping[str, np.ndarray[Any, Any]], grid: tuple[int, ...]) -> list[Pixels]:
        if (array := arrays.get("pixel_values")) is None:
            return []
        patches, start, shown = array.reshape(len(array), self.patch, self.patch, 3), 0, []
        for height, width in self.sizes(grid):
            shown.append(unpatchify(patches[start : start + height * width], height, width, 1))
            start += height * width
        return shown


def _tiles(settings: Mapping[str, Any], where: str) -> range:
    """Return the possible numbers of tiles. The range is empty if no image is cut."""
    least, most = settings["min_tiles"], settings["max_tiles"]
    if not settings["do_image_splitting"] or least == most == 1:
        return range(0)
    if not 2 <= least <= most:  # the reference miscounts the tokens of a single tile
        raise UnsupportedCheckpoint(
            f"{where}: min_tiles is {least} and max_tiles is {most}; min_tiles must be at least 2 and at most max_tiles"
        )
    return range(least, most + 1)


class Lfm2VLModel(PretrainedModel):
    """The LFM2-VL model. `module` is transformers' `Lfm2VlForConditionalGeneration`."""

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Lfm2VLProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._sizes = processor.sizes
        replace_short_convs(self.text_model.layers)
        _keep_positions(module.model.vision_tower.embeddings)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        sizes = [size for item in items for size in self._sizes(item.shape.grid)]
        areas = [height * width for height, width in sizes]
        patches = joined(map(self.normalized, items), sum(areas)).to(self.spec.dtype).split(areas)
        features: list[Tensor] = [patches[0]] * len(sizes)
        # Tiles and images of one size are a batch, so that no mask of padding is needed.
        for height, width in dict.fromkeys(sizes):
            places = [place for place, size in enumerate(sizes) if size == (height, width)]
            hidden = self.module.model.vision_tower(
                pixel_values=torch.stack([patches[place] for place in places]),
                pixel_attention_mask=None,
                spatial_shapes=torch.tensor([[height, width]]),
            ).last_hidden_state
            projected = self.module.model.multi_modal_projector(hidden.unflatten(1, (height, width)))
            for place, part in zip(places, projected.flatten(1, 2), strict=True):
                features[place] = part
        return split_features(torch.cat(features), items)


def _keep_positions(embeddings: Any) -> None:
    """Let the tower compute its positions once per size, on the CPU.

    They are resized with antialiasing, which not every device supports.
    """
    compute = type(embeddings).resize_positional_embeddings

    @lru_cache(_KEPT_SIZES)
    def kept(height: int, width: int) -> Tensor:
        weight = embeddings.position_embedding.weight.detach()
        table = weight.cpu().unflatten(0, (embeddings.position_embedding_size, -1))
        return upload(compute(table, torch.tensor([[height, width]]), height * width), weight.device)

    def resize_positional_embeddings(table: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
        height, width = spatial_shapes[0].tolist()
        return kept(height, width)

    embeddings.resize_positional_embeddings = resize_positional_embeddings


class Lfm2VL(PretrainedFamily):
    """LFM2-VL (Liquid AI, 2025, arXiv 2511.23404), run by transformers' modules and mindie_mm's short convolutions."""

    model_types = ("lfm2_vl",)
    published = "LiquidAI/LFM2-VL-1.6B"
    kinds = ("image",)
    processor = Lfm2VLProcessor
    module_name = "Lfm2VlForConditionalGeneration"
    model_class = Lfm2VLModel
    states: ClassVar = {LAYER_TYPE: short_conv_state}
    tp_plan = TP_PLAN
    # The preprocessor's own file has these settings.
    other_keys = (
        *words("do_image_splitting encoder_patch_size image_token_index max_image_tokens max_num_patches"),
        *words("max_pixels_tolerance max_tiles min_image_tokens min_tiles tile_size use_image_special_tokens"),
        "use_thumbnail",
        *(f"text_config.{key}" for key in OTHER_KEYS),
    )
