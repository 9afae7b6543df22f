"""The model's half of families whose towers take pictures as their processors made them, and normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mindie_mm.inputs import Kind
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.pixels import Normalization, joined
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device


class PictureModel(MediaModel):
    """Goes before the other base. A block holds `pixel_values`, uint8 [pictures, height, width, 3]."""

    normalizations: Mapping[Kind, Normalization]
    """The processor's."""

    def pixels(self, items: Sequence[MediaItem]) -> Tensor:
        """[pictures of all items, 3, height, width], as the tower takes them."""
        return joined([self.normalized(item) for item in items]).to(self.spec.dtype)

    def normalized(self, item: MediaItem) -> Tensor:
        """float32 [pictures, 3, height, width], on the device."""
        return self.normalizations[item.shape.kind](to_device(item.view, "pixel_values", self.spec.device))
