"""The processor of families that resize every image to one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.media.image.preprocess import Preprocess
from mindie_mm.nn.family import Plan, Processor, Write
from mindie_mm.nn.pixels import Normalization
from mindie_mm.shm import ArraySpec


class OneSizeProcessor(Processor):
    """A processor that resizes every image to one size. The constructor of a subclass sets the attributes.

    A block contains `pixel_values`, uint8 [1, height, width, 3].
    """

    normalizations: Mapping[Kind, Normalization]
    """Normalization that the model applies to the pixels of each kind."""
    num_features: int
    """Number of features of every image."""
    steps: Preprocess
    """Preprocessing that resizes an image to `size`."""
    size: tuple[int, int]
    """Height and width of the tower's input, in pixels."""

    def max_tokens(self, kind: Kind) -> int:
        return self.num_features

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((*self.size, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        self.steps.check(image.height, image.width)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays["pixel_values"][0] = self.steps.apply(image.decode())

        return Plan(self.num_features, self.specs_of(media.kind, ()), f"image {self.steps}"), write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"pixel_values": ArraySpec((1, *self.size, 3), "uint8")}
