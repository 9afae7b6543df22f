"""LLaVA-NeXT: the whole image, followed by the tiles of a canvas with similar proportions.

Source: llava-vl.github.io/blog/2024-01-30-llava-next. Token ids, pixels and logits match transformers' `llava_next`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import CorruptReference
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.image.tiles import best_canvas
from mindie_mm.models._anyres import AnyresProcessor
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Plan, Write
from mindie_mm.nn.mindie import NORMALIZED, InSegment, InWord, Layout, mindie_pad
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

_SIZE = "size"
# Layout of the handle words that MindIE's own processor writes.
_MINDIE: Mapping[Kind, Layout] = {
    "image": Layout((InSegment(NORMALIZED, "float16"), InWord(_SIZE)), enclosed=True),
}


class LlavaNextProcessor(AnyresProcessor):
    """Processor for LLaVA-NeXT.

    In MindIE's wire format, an image has `normalized`, float16 [1, tiles, 3, side, side], and `size`, which contains 1
    and the height and width of the original image in pixels.
    """

    traits = Traits(mindie_layouts=_MINDIE)
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

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.mindie_pad = mindie_pad(checkpoint.config)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        plan, write_tiles = super().plan(media, data, counts)
        if self._mindie_features(*plan.grid) != plan.num_features:
            return plan, write_tiles
        (pixels,) = plan.specs.values()
        tiles, side = pixels.shape[:2]

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            if NORMALIZED not in arrays:
                write_tiles(arrays)
                return
            write_tiles({"pixel_values": (uint8 := np.empty(pixels.shape, np.uint8))})
            arrays[NORMALIZED][0] = self.normalizations["image"](torch.from_numpy(uint8)).numpy()
            arrays[_SIZE][...] = 1, *plan.grid

        specs = {NORMALIZED: ArraySpec((1, tiles, 3, side, side), "float16"), _SIZE: ArraySpec((3,), "int64")}
        return msgspec.structs.replace(plan, mindie_specs=specs), write

    def _mindie_features(self, height: int, width: int) -> int:
        """Return the number of features that MindIE computes for an image.

        MindIE exchanges the rows and columns of the canvas, so the number is wrong for most canvases that are not
        square. It also rounds down products that should be integers, but are slightly too small.
        """
        columns, rows = (length // self.side * self.rows for length in best_canvas(height, width, self.canvases))
        if width / height > columns / rows:
            rows -= (rows - int(height * (columns / width))) // 2 * 2
        else:
            columns -= (columns - int(width * (rows / height))) // 2 * 2
        return self.rows**2 + rows * (columns + 1)


class LlavaNextModel(TowerModel):
    """The LLaVA-NeXT model. `module` is transformers' `LlavaNextForConditionalGeneration`."""

    traits = replace(TowerModel.traits, mindie_layouts=_MINDIE)

    def __init__(self, module: Any, spec: ModelSpec, processor: LlavaNextProcessor) -> None:
        super().__init__(module, spec, processor)
        self._processor = processor

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        if NORMALIZED not in view:
            return super().describe_segments(view)
        processor, stated = self._processor, view[_SIZE].tolist()
        if len(stated) != 3 or stated[0] != 1:
            raise CorruptReference(f"the third handle word encodes {stated}; it must encode 1, height and width")
        height, width = stated[1:]
        tiles, side = processor.num_tiles(height, width), processor.side
        if view[NORMALIZED].shape != (expected := (1, tiles, 3, side, side)):
            raise CorruptReference(
                f"the segment has the shape {view[NORMALIZED].shape}, but an image of {height}x{width} pixels needs "
                f"{expected}"
            )
        token = processor.placeholders["image"].token
        return MediaShape("image", token, processor.num_features(height, width), (height, width))

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        sizes = torch.tensor([item.shape.grid for item in items])
        features: list[Tensor] = self.module.model.get_image_features(self.pixels(items), sizes).pooler_output
        return features


class LlavaNext(PretrainedFamily):
    """LLaVA-NeXT, also known as LLaVA 1.6 (Liu et al., 2024), run by transformers' modules."""

    model_types = ("llava_next",)
    published = "llava-hf/llava-v1.6-mistral-7b-hf"
    kinds = ("image",)
    processor = LlavaNextProcessor
    module_name = "LlavaNextForConditionalGeneration"
    other_keys = ("vision_config.vocab_size",)  # of CLIP's text encoder
    model_class = LlavaNextModel
