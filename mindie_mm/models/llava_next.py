"""LLaVA-NeXT: an image as tiles of a canvas that suits its proportions, beside the whole of it.

Source: llava-vl.github.io/blog/2024-01-30-llava-next; transformers' llava_next, whose ids, pixels and logits these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.media.image.preprocess import Size, resample_of
from mindie_mm.media.image.tiles import best_canvas, without_padding, write_canvas
from mindie_mm.models.llava import LlavaModel, check_stated, tokens_of_tower
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, PretrainedFamily, Processor, Spelling
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.shm import ArraySpec


class AnyresProcessor(Processor):
    """The tokenizer's half of those that see images on canvases.

    A block holds `pixel_values`, uint8 [tiles, side, side, 3], the whole image first. The grid: the image's own
    (height, width).
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
                f"{where}: vision_feature_select_strategy {config.vision_feature_select_strategy!r} leaves {tokens} "
                f"tokens of a tile, which has {self.rows}x{self.rows} patches"
            )
        check_stated(checkpoint.json("processor_config.json"), config, where)
        settings = checkpoint.preprocessor("image", {self.image_type: self.defaults})
        # Every tile is of the tower's size already, so that do_resize, do_center_crop and do_pad change nothing.
        for name in ("size", "crop_size"):
            size = Size.read(settings[name], where) if name in settings else None
            if size is not None and size.of(self.side, self.side) != (self.side, self.side):
                raise UnsupportedCheckpoint(f"{where}: {name} is {settings[name]}, the tower takes {self.side} pixels")
        pinpoints = [tuple(pinpoint) for pinpoint in config.image_grid_pinpoints]
        if (found := [tuple(pinpoint) for pinpoint in settings["image_grid_pinpoints"]]) != pinpoints:
            raise UnsupportedCheckpoint(f"{where}: image_grid_pinpoints are {found}, of config.json {pinpoints}")
        if uneven := [pinpoint for pinpoint in pinpoints if any(length % self.side for length in pinpoint)]:
            raise UnsupportedCheckpoint(f"{where}: {uneven[0]} is no whole number of tiles of {self.side} pixels")
        self.canvases = pinpoints
        self.resample = resample_of(settings, where)
        self.normalizations: dict[Kind, Normalization] = {"image": Normalization.read(settings)}
        self.background_mean: Sequence[float] = settings["image_mean"]

    def max_tokens(self, kind: Kind) -> int:
        return max(self.num_features(*canvas) for canvas in self.canvases)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        made = len(grid) == 2 and min(grid) > 0 and self.num_features(*grid) == num_features
        return Spelling() if made else None

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((*max(self.canvases, key=lambda canvas: self.num_features(*canvas)), 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        image = open_image(data)
        canvas = best_canvas(image.height, image.width, self.canvases)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            write_canvas(image.decode(), canvas, arrays["pixel_values"], self.resample)

        tiles = 1 + canvas[0] * canvas[1] // self.side**2
        return Plan(
            num_features=self.num_features(image.height, image.width),
            specs={"pixel_values": ArraySpec((tiles, self.side, self.side, 3), "uint8")},
            settings=f"canvas {canvas}, tiles of {self.side}, {self.resample}",
            write=write,
            grid=(image.height, image.width),
        )

    def num_features(self, height: int, width: int) -> int:
        """Features of an image of this size on its canvas: those of the whole, then rows, each ended by a newline."""
        rows, columns = self.on_canvas(height, width)
        return self.rows**2 + rows * (columns + 1)

    def on_canvas(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of features that an image takes of its canvas."""
        canvas = best_canvas(height, width, self.canvases)
        return without_padding(height, width, *(length // self.side * self.rows for length in canvas))


class LlavaNextProcessor(AnyresProcessor):
    """LLaVA-NeXT's own."""

    config_name = "LlavaNextConfig"
    image_type = "LlavaNextImageProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        "resample": 3,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }


class LlavaNextModel(LlavaModel):
    """Tower and decoder of LLaVA-NeXT; `module` is transformers' LlavaNextForConditionalGeneration."""

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        sizes = torch.tensor([item.shape.grid for item in items])
        features: list[Tensor] = self.module.model.get_image_features(self.pixels(items), sizes).pooler_output
        return features


class LlavaNext(PretrainedFamily):
    """LLaVA-NeXT, also LLaVA 1.6 (Liu et al., 2024), over transformers' own modules."""

    model_types = ("llava_next",)
    published = "llava-hf/llava-v1.6-mistral-7b-hf"
    kinds = ("image",)
    processor = LlavaNextProcessor
    module_name = "LlavaNextForConditionalGeneration"
    other_keys = ("vision_config.vocab_size",)  # of CLIP's texts
    model_class = LlavaNextModel
