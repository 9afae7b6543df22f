"""Normalization of images, for models whose towers need no other change to the processor's images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mindie_mm.inputs import Kind
from mindie_mm.nn.mindie import NORMALIZED, PLANES
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.pixels import Normalization, joined
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device


class PictureModel(MediaModel):
    """A mixin for models whose towers take normalized images. List this class before the other base class.

    A block contains `pixel_values`, uint8 [images, height, width, 3]. In MindIE's wire format, an item has `planes`,
    uint8 [images, 3, height, width], or `normalized`, float16 [1, images, 3, height, width].
    """

    normalizations: Mapping[Kind, Normalization]
    """The processor's normalization for each kind of media."""

    def pixels(self, items: Sequence[MediaItem]) -> Tensor:
        """Return the tower's input, [images of all items, 3, height, width], in the model's dtype."""
        return joined([self.normalized(item) for item in items]).to(self.spec.dtype)

    def normalized(self, item: MediaItem) -> Tensor:
        """Return the normalized images of one item on the device, float32 [images, 3, height, width]."""
        view, device = item.view, self.spec.device
        if NORMALIZED in view:
            return to_device(view, NORMALIZED, device).float().squeeze(0)
        if PLANES in view:
            return self.normalizations[item.shape.kind](to_device(view, PLANES, device).permute(0, 2, 3, 1))
        return self.normalizations[item.shape.kind](to_device(view, "pixel_values", device))
