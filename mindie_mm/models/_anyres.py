"""Shared parts of the families that place images on a canvas and cut the canvas into tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.media.image.preprocess import Size, check_settings, resample_of
from mindie_mm.media.image.tiles import best_canvas, without_padding, write_canvas
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import Normalization
from mindie_mm.nn.vllm_tiles import TileLayout, dtype_of
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.shm import ArraySpec

_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Number of tokens before the patch tokens, by type of tower."""


def tokens_of_tower(config: Any, where: str) -> int:
    """Return the number of features of one square image. Raise UnsupportedCheckpoint if the tower is not supported."""
    vision = config.vision_config
    if vision.model_type not in _TOWERS:
        raise UnsupportedCheckpoint(
            f"{where}: vision_config.model_type is {vision.model_type!r}; only {', '.join(_TOWERS)} are supported"
        )
    # "default" drops the first token of any tower, although only CLIP has a first token that is not a patch.
    dropped = config.vision_feature_select_strategy == "default"
    return int((vision.image_size // vision.patch_size) ** 2 + _TOWERS[vision.model_type] - dropped)


def check_stated(stated: Mapping[str, Any], config: Any, where: str) -> None:
    """Raise UnsupportedCheckpoint if `stated`, the processor_config.json, contradicts config.json about the tower."""
    expected = {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": _TOWERS[config.vision_config.model_type],
    }
    check_settings(stated, expected, f"{where} (processor_config.json)")


class AnyresProcessor(Processor):
    """Base class of the processors that place images on a canvas.

    A block contains `pixel_values`, uint8 [tiles, side, side, 3]. The first tile is the whole image. The grid is the
    size (height, width) of the original image in pixels.
    """

    config_name: ClassVar[str]
    image_type: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = self.where = str(checkpoint.path)
        config = self.config = read_config(self.config_name, checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        vision = config.vision_config
        self.side: int = vision.image_size
        self.rows: int = vision.image_size // vision.patch_size
        if (tokens := tokens_of_tower(config, where)) != self.rows**2:
            raise UnsupportedCheckpoint(
                f"{where}: vision_feature_select_strategy is {config.vision_feature_select_strategy!r}, which gives "
                f"{tokens} tokens per tile; the number must equal the number of patches of a tile, "
                f"{self.rows}x{self.rows}"
            )
        check_stated(checkpoint.json("processor_config.json"), config, where)
        settings = checkpoint.preprocessor("image", {self.image_type: self.defaults})
        # Tiles already have the size that the tower expects, so do_resize, do_center_crop and do_pad have no effect.
        for name in ("size", "crop_size"):
            size = Size.read(settings[name], where) if name in settings else None
            if size is not None and size.of(self.side, self.side) != (self.side, self.side):
                raise UnsupportedCheckpoint(
                    f"{where}: {name} is {settings[name]}, but the tower takes images of {self.side}x{self.side} pixels"
                )
        pinpoints = [tuple(pinpoint) for pinpoint in config.image_grid_pinpoints]
        if (stated := [tuple(pinpoint) for pinpoint in settings["image_grid_pinpoints"]]) != pinpoints:
            raise UnsupportedCheckpoint(
                f"{where}: image_grid_pinpoints is {stated} in preprocessor_config.json, but {pinpoints} in config.json"
            )
        if uneven := [pinpoint for pinpoint in pinpoints if any(length % self.side for length in pinpoint)]:
            raise UnsupportedCheckpoint(
                f"{where}: the size {uneven[0]} in image_grid_pinpoints is not a multiple of the tile size "
                f"({self.side} pixels)"
            )
        self.canvases = pinpoints
        self.resample = resample_of(settings, where)
        self.normalizations: dict[Kind, Normalization] = {"image": Normalization.read(settings)}
        self.background_mean: Sequence[float] = settings["image_mean"]
        table, dtype = self.normalizations["image"].table(), dtype_of(checkpoint.config)
        self.vllm_items = {"image": TileLayout(table, (self.side, self.side), dtype, size="image_sizes")}

    def max_tokens(self, kind: Kind) -> int:
        return max(self.num_features(*canvas) for canvas in self.canvases)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if not grid:  # embeddings, whose size only the tower would need
            return Spelling() if num_features <= self.max_tokens(kind) else None
        is_possible = len(grid) == 2 and min(grid) > 0 and self.num_features(*grid) == num_features
        return Spelling() if is_possible else None

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((*max(self.canvases, key=lambda canvas: self.num_features(*canvas)), 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        canvas = best_canvas(image.height, image.width, self.canvases)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            write_canvas(image.decode(), canvas, arrays["pixel_values"], self.resample)

        grid = image.height, image.width
        plan = Plan(
            num_features=self.num_features(*grid),
            specs=AnyresProcessor.specs_of(self, media.kind, grid),
            settings=f"canvas {canvas}, tiles of {self.side}, {self.resample}",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if not grid:
            return {}
        return {"pixel_values": ArraySpec((self.num_tiles(*grid), self.side, self.side, 3), "uint8")}

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return self.num_features(*stated[1:]), stated[1:]

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        pixels = self.normalized(item, device).unsqueeze(0)  # prompts with several images are padded to the most tiles
        return {"pixel_values": pixels, "image_sizes": torch.tensor([item.shape.grid[:2]])}

    def num_tiles(self, height: int, width: int) -> int:
        """Return the number of tiles of an image with this size in pixels, including the whole image."""
        canvas = best_canvas(height, width, self.canvases)
        return 1 + canvas[0] * canvas[1] // self.side**2

    def num_features(self, height: int, width: int) -> int:
        """Return the number of features of an image with this size in pixels.

        These are the features of the whole image, the features on the canvas, and a newline feature per row.
        """
        rows, columns = self.on_canvas(height, width)
        return self.rows**2 + rows * (columns + 1)

    def on_canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of features that an image covers on its canvas."""
        canvas = best_canvas(height, width, self.canvases)
        return without_padding(height, width, *(length // self.side * self.rows for length in canvas))
