"""Models whose towers need no change to the processor's normalized images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.pixels import joined
from mindie_mm.nn.splice import MediaItem


class ImageModel(MediaModel):
    """A mixin for models whose towers take normalized images. List this class before the other base class."""

    def pixels(self, items: Sequence[MediaItem]) -> Tensor:
        """Return the tower's input, [images of all items, 3, height, width], in the model's dtype."""
        return joined([self.normalized(item) for item in items]).to(self.spec.dtype)
