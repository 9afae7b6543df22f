"""Processor and model of the Pixtral tower, which takes images of any size, row by row with a token after each row.

Source: arXiv 2410.07073. Token ids, pixels and logits match transformers' `mistral3`, and `llava` with this tower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mindie_mm.device import upload
from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.shm import ArraySpec

TOWER = "pixtral"
_DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"longest_edge": 1024},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
"""Names of settings in processor_config.json with transformers' defaults."""


class PixtralTowerProcessor(Processor):
    """Processor for Pixtral.

    A block contains `pixel_values`, uint8 [1, height, width, 3]. The grid is the number of features (rows, columns).
    """

    config_name: ClassVar[str]
    """Name of the transformers configuration class."""
    traits = Traits(grids={"image": "the numbers of rows and columns of features"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config(self.config_name, checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        vision = config.vision_config
        if vision.model_type != TOWER:
            raise UnsupportedCheckpoint(
                f"{where}: vision_config.model_type is {vision.model_type!r}; only {TOWER} is supported"
            )
        settings = checkpoint.preprocessor("image", {"PixtralImageProcessor": _DEFAULTS})
        check_settings(settings, {"do_resize": True, "do_center_crop": False}, where)
        stated = {"patch_size": 16, "spatial_merge_size": 1, **checkpoint.json("processor_config.json")}
        merge = getattr(config, "spatial_merge_size", 1)
        expected = {"patch_size": vision.patch_size, "spatial_merge_size": merge}
        check_settings(stated, expected, f"{where} (processor_config.json)")
        self._cell: int = vision.patch_size * merge
        self._most = _limits(settings["size"], where)
        self._resample = resample_of(settings, where)
        self.normalizations: Mapping[Kind, Normalization] = {"image": Normalization.read(settings)}
        token, *self._marks = (checkpoint.token_id(stated.get(name) or text) for name, text in _TOKENS.items())
        if token != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_index is {config.image_token_id}, but the tokenizer's id of the image token is "
                f"{token}"
            )
        self._token: int = token
        self.placeholders = {"image": Placeholder((), token, ())}

    def max_tokens(self, kind: Kind) -> int:
        return math.prod(self._cells(self._most[0], self._most[1]))

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((*self._most, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 2 or min(grid) <= 0 or math.prod(grid) != num_features:
            return None
        rows, columns = grid
        line_break, end = self._marks
        row = [self._token] * columns
        return Spelling(runs=[[*[*row, line_break] * (rows - 1), *row, end]])

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image, resample = open_image(data), self._resample
        grid = self._cells(image.height, image.width)
        if not min(grid):
            raise LimitExceeded(
                f"the image has {image.width}x{image.height} pixels; one side would have no pixels when it is resized "
                f"to {self._most[1]}x{self._most[0]}"
            )
        height, width = (count * self._cell for count in grid)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays["pixel_values"][0] = resize(image.decode(), height, width, resample)

        plan = Plan(
            num_features=math.prod(grid),
            specs=self.specs_of(media.kind, grid),
            settings=f"pixtral {height}x{width}, {resample}",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        height, width = (count * self._cell for count in grid)
        return {"pixel_values": ArraySpec((1, height, width, 3), "uint8")}

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        inputs = super().item_inputs(item, device)
        return inputs | {"image_sizes": torch.tensor([inputs["pixel_values"].shape[2:]])}

    def _cells(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of features of an image."""
        ratio = max(height / self._most[0], width / self._most[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return -(-height // self._cell), -(-width // self._cell)


def _limits(size: Any, where: str) -> tuple[int, int]:
    """Return the largest height and width of a resized image. Raise UnsupportedCheckpoint for other sizes."""
    edges = {name: edge for name, edge in size.items() if edge is not None} if isinstance(size, Mapping) else {}
    if edges.keys() == {"longest_edge"}:
        edges = dict.fromkeys(("height", "width"), edges["longest_edge"])
    if edges.keys() != {"height", "width"}:
        raise UnsupportedCheckpoint(f"{where}: size={size!r} must have longest_edge, or height and width")
    return int(edges["height"]), int(edges["width"])


class PixtralTowerModel(TowerModel):
    """A model with a Pixtral tower. `module` has the parts of transformers' `LlavaForConditionalGeneration`."""

    def __init__(self, module: Any, spec: ModelSpec, processor: PixtralTowerProcessor) -> None:
        super().__init__(module, spec, processor)
        module.model.vision_tower = _Tower(module.model.vision_tower, module.config.vision_feature_layer)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Encode the items. Images of the same size are a batch, so that attention needs no mask."""
        by_size: dict[tuple[int, ...], list[int]] = {}
        for index, item in enumerate(items):
            by_size.setdefault(item.shape.grid, []).append(index)
        found: dict[int, Tensor] = {}
        for indices in by_size.values():
            pixels = self.pixels([items[index] for index in indices])
            size = pixels.shape[2], pixels.shape[3]
            features = self.project(self.module.model.vision_tower(pixels), size)
            found |= dict(zip(indices, features, strict=True))
        return [found[index] for index in range(len(items))]

    def project(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the features, [images, features, hidden].

        Args:
            patches: Output of the tower, [images, patches, width].
            size: Height and width of the images in pixels.

        """
        projected: Tensor = self.module.model.multi_modal_projector(patches)
        return projected


class _Tower(nn.Module):
    """The tower for images of one size.

    transformers joins all images into one sequence, whose mask is as large as the square of the number of patches.
    """

    def __init__(self, tower: Any, chosen: int | Sequence[int]) -> None:
        super().__init__()
        self.patch_conv: nn.Conv2d = tower.patch_conv
        self.ln_pre, self.positions, self.layers = (
            tower.ln_pre,
            tower.patch_positional_embedding,
            tower.transformer.layers,
        )
        self._chosen = [chosen] if isinstance(chosen, int) else [*chosen]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the states of the chosen layers, [images, patches, width], of images [images, 3, height, width]."""
        embedded = self.patch_conv(pixels.to(self.patch_conv.weight.dtype))
        rows, columns = embedded.shape[-2:]
        hidden = self.ln_pre(embedded.flatten(2).transpose(1, 2))
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        angles = self.positions(hidden, upload(places, hidden.device))
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, None, position_embeddings=angles)
            states.append(hidden)
        return torch.cat([states[index] for index in self._chosen], -1)
