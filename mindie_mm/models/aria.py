"""Aria: images padded to one size, or tiles of a canvas, each with as many features as its projector has queries.

Source: arXiv 2410.05993. Token ids, pixels and logits match transformers' `aria`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, pad, resample_of
from mindie_mm.media.image.tiles import best_canvas, fit
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.shm import ArraySpec

_SIDES = (490, 980)
_GRIDS = (
    *((1, columns) for columns in range(2, 9)),
    *((2, 4), (2, 3), (2, 2), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2)),
    *((rows, 1) for rows in range(5, 9)),
)
_DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "max_image_size": 980,
    "min_image_size": 336,
    "split_image": False,
    "split_resolutions": [[rows * 490, columns * 490] for rows, columns in _GRIDS],
    "image_mean": HALF,
    "image_std": HALF,
}


class AriaProcessor(Processor):
    """Processor for Aria.

    A block contains `pixel_values`, uint8 [tiles, side, side, 3]. The grid is the size (height, width) of the original
    image in pixels.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = self.config = read_config("AriaConfig", checkpoint)
        if not isinstance(config.vision_feature_layer, int):
            raise UnsupportedCheckpoint(
                f"{where}: vision_feature_layer={config.vision_feature_layer} must be a single number, because "
                "the projector of the reference takes one layer"
            )
        self.feature_width = config.text_config.hidden_size
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        # The reference uses 980 and False for `max_image_size` and `split_image`, unless a call sets them.
        settings = checkpoint.preprocessor("image", {"AriaImageProcessor": _DEFAULTS})
        self.side: int = settings["max_image_size"]
        self._shortest: int = settings["min_image_size"]
        if self.side not in _SIDES or self._shortest > self.side:
            raise UnsupportedCheckpoint(
                f"{where}: max_image_size is {self.side} and min_image_size {self._shortest}; max_image_size must be "
                f"{' or '.join(map(str, _SIDES))}, and min_image_size at most as large"
            )
        self.canvases = [(height, width) for height, width in settings["split_resolutions"]]
        self._splits: bool = settings["split_image"]
        self._resample = resample_of(settings, where)
        self.normalizations: dict[Kind, Normalization] = {"image": Normalization.read(settings)}
        self._patch_size: int = config.vision_config.patch_size
        patches = (self.side // self._patch_size) ** 2
        known = config.projector_patch_to_query_dict
        if patches not in known:
            raise UnsupportedCheckpoint(
                f"{where}: a tile of {self.side}x{self.side} pixels has {patches} patches, but "
                f"projector_patch_to_query_dict has only entries for {', '.join(map(str, known))} patches"
            )
        self.tile_features: int = known[patches]
        stated = checkpoint.json("processor_config.json").get("size_conversion") or {}
        check_settings(stated, {str(self.side): self.tile_features}, f"{where} (size_conversion)")

    def max_tokens(self, kind: Kind) -> int:
        return max(map(self._num_features, self._largest()))

    def worst_case(self, kind: Kind) -> Data:
        size = max(self._largest(), key=lambda size: (self._num_features(size), self._leaves_tiles_empty(size)))
        return np.zeros((*size, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if not grid:  # embeddings, whose size only the tower would need
            tiles, rest = divmod(num_features, self.tile_features)
            return Spelling() if tiles and not rest and num_features <= self.max_tokens(kind) else None
        is_possible = len(grid) == 2 and min(grid) > 0 and self._num_features((grid[0], grid[1])) == num_features
        return Spelling() if is_possible else None

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        side, grid = self.side, (image.height, image.width)
        canvas = best_canvas(*grid, self.canvases) if self._splits else None
        sizes = self.shown(*grid)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, tiles = image.decode(), arrays["pixel_values"]
            cuts = [rgb]
            if canvas is not None:
                rgb = pad(resize(rgb, *fit(*grid, canvas), self._resample), *canvas)
                cuts = [
                    rgb[y : y + side, x : x + side]
                    for y in range(0, canvas[0], side)
                    for x in range(0, canvas[1], side)
                ]
            for cut, tile, (height, width) in zip(cuts, tiles, sizes, strict=True):
                tile[:height, :width] = resize(np.ascontiguousarray(cut), height, width, self._resample)
                tile[height:], tile[:height, width:] = 0, 0

        plan = Plan(
            num_features=self._num_features(grid),
            specs=self.specs_of(media.kind, grid),
            settings=f"canvas {canvas}, {sizes} on tiles of {side}, {self._resample}",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if not grid:
            return {}
        return {"pixel_values": ArraySpec((len(self._cuts(grid[0], grid[1])), self.side, self.side, 3), "uint8")}

    def shown(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the height and width that the parts of an image of this size cover on their tiles, in pixels."""
        return [self._scaled(*size) for size in self._cuts(height, width)]

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        heights, widths = torch.tensor(self.shown(*item.shape.grid)).t().unsqueeze(-1)
        at = torch.arange(self.side)
        mask = (at < heights).unsqueeze(2) & (at < widths).unsqueeze(1)  # [tiles, side, side]
        return super().item_inputs(item, device) | {"pixel_mask": mask}

    def _largest(self) -> Sequence[tuple[int, int]]:
        return self.canvases if self._splits else [(self.side, self.side - self._patch_size)]

    def _leaves_tiles_empty(self, size: tuple[int, int]) -> bool:
        """Return whether a part does not fill its tile. The tower then needs an attention mask, which takes memory."""
        return any(height != width for height, width in self._cuts(*size))

    def _num_features(self, size: tuple[int, int]) -> int:
        return len(self._cuts(*size)) * self.tile_features

    def _cuts(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the height and width of the parts into which an image of this size is cut, in pixels."""
        if not self._splits:
            return [(height, width)]
        rows, columns = (
            [min(self.side, length - start) for start in range(0, length, self.side)]
            for length in best_canvas(height, width, self.canvases)
        )
        return [(row, column) for row in rows for column in columns]

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of a part of an image whose longer side is that of a tile."""
        scale = self.side / max(height, width)
        if width >= height:
            return max(int(height * scale), self._shortest), self.side
        return self.side, max(int(width * scale), self._shortest)


class AriaModel(TowerModel):
    """The Aria model. `module` is transformers' `AriaForConditionalGeneration`."""

    def __init__(self, module: Any, spec: ModelSpec, processor: AriaProcessor) -> None:
        super().__init__(module, spec, processor)
        self._processor = processor

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        inputs = self._processor.media_inputs([items], self.spec.device)
        pixels, mask = inputs["pixel_values"].to(self.spec.dtype), upload(inputs["pixel_mask"], self.spec.device)
        layer = self._processor.config.vision_feature_layer
        features = self.module.model.get_image_features(pixels, mask, vision_feature_layer=layer).pooler_output
        return split_features(features, items)


class Aria(PretrainedFamily):
    """Aria (Li et al., 2024, arXiv 2410.05993), run by transformers' modules."""

    model_types = ("aria",)
    published = "rhymes-ai/Aria"
    kinds = ("image",)
    processor = AriaProcessor
    module_name = "AriaForConditionalGeneration"
    model_class = AriaModel
    # The first key repeats moe_topk. The second is a wrong name of num_attention_heads, whose default is the same.
    other_keys = ("text_config.num_experts_per_tok", "vision_config.attention_heads")
