"""MiniCPM-V 4.7: MiniCPM-V 4.6 with positions on three axes, on a canvas that a thumbnail shares with its slices.

Token ids, pixels and positions match transformers' `minicpmv4_7`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mindie_mm.models._delta_net import LAYER_TYPE, OTHER_KEYS, delta_net_state
from mindie_mm.models._minicpmv4_6_base import MiniCPMVModel, MiniCPMVProcessor
from mindie_mm.models._minicpmv4_6_crops import Crops
from mindie_mm.models._mrope import Block, positions_of
from mindie_mm.nn.model import ModelSpec, Positions
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem

_MARKERS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


class MiniCPMV47Processor(MiniCPMVProcessor):
    """Processor for MiniCPM-V 4.7, which does not number videos."""

    traits = replace(MiniCPMVProcessor.traits, token_types=("mm_token_type_ids",))
    config_name = "MiniCPMV4_7Config"
    numbers_videos = False


class MiniCPMV47Model(MiniCPMVModel):
    """The MiniCPM-V 4.7 model. `module` is transformers' `MiniCPMV4_7ForConditionalGeneration`."""

    def __init__(self, module: Any, spec: ModelSpec, processor: MiniCPMV47Processor) -> None:
        super().__init__(module, spec, processor)
        self._markers = [getattr(module.config, name) for name in _MARKERS]

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        frames = [frame for item in items for frame in self._frames(item)]
        blocks = []
        for (crops, slots, ids), following in zip_longest(frames, frames[1:]):
            stop = slots[-1][-1] + 1
            # Markers after a frame, such as the newlines of text, have the position of the frame.
            while stop < length and ids[stop] in self._markers:
                stop += 1
            if following is not None:
                stop = min(stop, following[1][0][0] - 1)
            blocks.append(self._block(crops, slots, stop))
        found = positions_of(length, blocks)
        # At the start of a prompt, the marker before an image would have the position -1.
        return Positions(found.prompt.clamp_(min=0), found.delta)

    def _frames(self, item: MediaItem) -> Iterator[tuple[Crops, list[NDArray[np.int64]], NDArray[np.int64]]]:
        """Yield the crops of each frame of an item, the indices of the tokens of each crop, and the prompt's ids."""
        crops, area = Crops.of(item.shape.grid), self._settings[item.shape.kind].merge ** 2
        counts = [height * width // area for height, width in crops.sizes]
        assert item.prompt_ids is not None
        for slots in np.split(item.slots, item.shape.grid[0]):
            yield crops, np.split(slots, np.cumsum(counts)[:-1]), item.prompt_ids

    def _block(self, crops: Crops, slots: Sequence[NDArray[np.int64]], stop: int) -> Block:
        """Return the positions of a frame, from the marker before it up to `stop`."""
        merge = self._settings["image"].merge
        (height, width), (slice_height, slice_width) = (
            (high // merge, wide // merge) for high, wide in (crops.thumbnail, crops.slice)
        )
        canvas = (crops.rows * slice_height, crops.columns * slice_width) if crops.rows else (height, width)
        start = int(slots[0][0]) - 1
        axes = np.zeros((3, stop - start), np.int64)
        axes[1:, 0] = -1
        thumbnail, *slices = (own - start for own in slots)
        axes[1:, thumbnail] = _spread(canvas, height, width)
        _place(axes, thumbnail[-1] + 1, canvas)
        for index, own in enumerate(slices):
            top, left = (index // crops.columns) * slice_height, (index % crops.columns) * slice_width
            axes[1:, own] = np.indices((slice_height, slice_width)).reshape(2, -1)
            axes[1:, own] += np.array([[top], [left]])
            axes[1:, own[0] - 1] = top, left
            _place(axes, own[-1] + 1, (top + slice_height - 1, left + slice_width - 1))
            if index and not index % crops.columns:
                # The newline before a row of slices is beside the end of the row before.
                axes[1:, own[0] - 2] = top - 1, canvas[1]
        return Block(start, axes, max(canvas) + 1)


def _place(axes: NDArray[np.int64], index: int, place: tuple[int, int]) -> None:
    if index < axes.shape[1]:
        axes[1:, index] = place


def _spread(canvas: tuple[int, int], height: int, width: int) -> NDArray[np.int64]:
    """Return the rows and columns of height x width tokens that are spread over a canvas, [2, height * width]."""
    places = [
        torch.linspace(0, side - 1, count).round().long() for side, count in zip(canvas, (height, width), strict=True)
    ]
    return torch.stack(torch.meshgrid(*places, indexing="ij")).flatten(1).numpy()


class MiniCPMV47(PretrainedFamily):
    """MiniCPM-V 4.7 (OpenBMB, 2026), run by transformers' modules and mindie_mm's delta-net layers."""

    model_types = ("minicpmv4_7",)
    published = "openbmb/MiniCPM-V-4.7-1B"
    kinds = ("image", "video")
    processor = MiniCPMV47Processor
    module_name = "MiniCPMV4_7ForConditionalGeneration"
    model_class = MiniCPMV47Model
    states: ClassVar = {LAYER_TYPE: delta_net_state}
    other_keys = OTHER_KEYS
