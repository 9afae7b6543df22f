"""Shared parts of Idefics3 and SmolVLM, which cut an image into tiles and add a tile of the whole image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.media.image.tiles import cut
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item, padded_rows
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.vllm_tiles import TileLayout, dtype_of
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

MOST_PIXELS = 4096
"""Maximum length of the longer side of a resized image in pixels. No setting raises it."""
DEFAULTS: Mapping[str, Any] = {
    "resample": 1,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "image_mean": HALF,
    "image_std": HALF,
    "do_image_splitting": True,
}


class IdeficsProcessor(Processor):
    """Base class of the processors for Idefics3 and SmolVLM.

    A block contains `pixel_values`, uint8 [tiles, side, side, 3]. The grid is the number of tiles (rows, columns), not
    counting the tile of the whole image. It is (0, 0) for an image that is not split.
    """

    config_name: ClassVar[str]
    image_type: ClassVar[str]
    tokens: ClassVar[Mapping[str, str]] = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    """Texts of special tokens."""

    traits = Traits(
        grids={
            "image": "the numbers of rows and columns of tiles, not counting the tile of the whole image",
            "video": "the duration of the video and the time of each frame, in whole seconds",
        }
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = self.config = read_config(self.config_name, checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        settings = checkpoint.preprocessor("image", {self.image_type: DEFAULTS})
        check_settings(settings, {"do_resize": True}, where)  # otherwise the number of tiles would have no limit
        self._size = read_size(settings["size"], where)
        self.side = tile_side(settings, where)
        self._splitting: bool = settings["do_image_splitting"]
        self._has_mask: bool = settings.get("do_pad", True)
        self._resample = resample_of(settings, where)
        self.normalizations: dict[Kind, Normalization] = {"image": Normalization.read(settings)}
        patch, scale = config.vision_config.patch_size, config.scale_factor
        rows = self.side // patch if isinstance(patch, int) else 0
        if not rows or rows % scale:
            raise UnsupportedCheckpoint(
                f"{where}: a side of a tile has {self.side} pixels, which is {rows} patches of {patch} pixels; this "
                f"number of patches must be a positive multiple of scale_factor ({scale})"
            )
        self.tile_features: int = (rows // scale) ** 2
        check_settings(checkpoint.json("processor_config.json"), {"image_seq_len": self.tile_features}, where)
        self.image_token, self._fake, self._global = (self._spelled(checkpoint, name) for name in self.tokens)
        if (token := checkpoint.token_id(self.image_token)) != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_id is {config.image_token_id}, but the tokenizer's id of {self.image_token!r} "
                f"is {token}"
            )

        table, sides = self.normalizations["image"].table(), (self.side, self.side)
        dtype = dtype_of(checkpoint.config)
        layout = TileLayout(table, sides, dtype, count="num_patches", mask="pixel_attention_mask")
        self.vllm_items = {"image": layout}

    def max_tokens(self, kind: Kind) -> int:
        # A square image of any size has the most tiles.
        rows, columns = self._grid(self._resized(1, 1))
        return (rows * columns + 1) * self.tile_features

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self.side, self.side, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if (
            len(grid) != 2
            or (min(grid) <= 0 and any(grid))
            or (grid[0] * grid[1] + 1) * self.tile_features != num_features
        ):
            return None
        tiles = grid[0] * grid[1] + 1
        rows = (
            "".join(f"{self._fake}<row_{row}_col_{column}>{self.image_token}" for column in range(1, grid[1] + 1))
            + "\n"
            for row in range(1, grid[0] + 1)
        )
        text = "".join(rows) + "\n" * (tiles > 1) + self.spell_whole()
        return Spelling(text, self.runs(tiles))

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        return (0, 0) if kind == "image" and num_features == self.tile_features else None

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        side, resample = self.side, self._resample
        first = self._resized(image.height, image.width)
        rows, columns = self._grid(first)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, tiles = resize(image.decode(), *first, resample), arrays["pixel_values"]
            if rows:
                rgb = resize(rgb, rows * side, columns * side, resample)
                cut(rgb, tiles[:-1])
            tiles[-1] = resize(rgb, side, side, resample)

        tiles = rows * columns + 1
        plan = Plan(
            num_features=tiles * self.tile_features,
            specs=self.specs_of(media.kind, (rows, columns)),
            settings=f"{first}, {rows}x{columns} tiles of {side}, {resample}",
            grid=(rows, columns),
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"pixel_values": ArraySpec((grid[0] * grid[1] + 1, self.side, self.side, 3), "uint8")}

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number of features and the grid of an image.

        vLLM does not state how many rows the tiles have. The grid has one row, because only the prompt depends on it.
        """
        num_tiles = stated[0]
        return num_tiles * self.tile_features, (1, num_tiles - 1) if num_tiles > 1 else (0, 0)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        inputs = {"pixel_values": self.normalized(item, device).unsqueeze(0)}
        if self._has_mask:  # int64 [1, tiles, side, side]
            inputs["pixel_attention_mask"] = torch.ones_like(inputs["pixel_values"][:, :, 0], dtype=torch.int64)
        return inputs

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the tiles of each prompt in one row, [prompts, tiles, ...]. Shorter rows end in zeros."""
        return padded_rows(prompts)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image after its first resize, before it is cut into tiles."""
        return self._size if len(self._size) == 2 else resized(height, width, self._size[0])

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the number of tiles (rows, columns) of an image resized to `size`, or (0, 0) if it is not split."""
        height, width = whole_tiles(*size, self.side)
        rows, columns = height // self.side, width // self.side
        return (rows, columns) if self._splitting and rows * columns > 1 else (0, 0)

    def spell_whole(self) -> str:
        """Return the text for the tile of a whole image."""
        return f"{self._fake}{self._global}{self.image_token}{self._fake}"

    def runs(self, tiles: int) -> Sequence[Sequence[int]]:
        """Return the placeholder ids, one run per tile."""
        return [(self.config.image_token_id,) * self.tile_features] * tiles

    def _spelled(self, checkpoint: Checkpoint, name: str) -> str:
        """Return the text of a special token. By default, the text is fixed, as in the reference of Idefics3."""
        return self.tokens[name]


def read_size(size: Any, where: str) -> tuple[int] | tuple[int, int]:
    """Return the size of resized images: their longer side, or their height and width.

    Raise UnsupportedCheckpoint for other settings.
    """
    if isinstance(size, Mapping):
        edges = {name: int(edge) for name, edge in size.items() if edge is not None}
        if edges.keys() == {"longest_edge"}:
            return (edges["longest_edge"],)
        if edges.keys() == {"height", "width"}:
            return (edges["height"], edges["width"])
    raise UnsupportedCheckpoint(f"{where}: size={size!r} must have longest_edge, or height and width")


def tile_side(settings: Mapping[str, Any], where: str) -> int:
    """Return the side of a tile in pixels. Raise UnsupportedCheckpoint if max_image_size has no longest_edge."""
    size = settings["max_image_size"]
    if not isinstance(size, Mapping) or not isinstance(side := size.get("longest_edge"), int):
        raise UnsupportedCheckpoint(f"{where}: max_image_size={size!r} must have an integer longest_edge")
    return side


def resized(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """Return the height and width of a resized image. Its longer side is `longest_edge`, and its shorter side is even.

    If the longer side exceeds `MOST_PIXELS`, both sides are then scaled down so that the longer side is `MOST_PIXELS`.
    The shorter side may then be odd.
    """
    height, width = _scaled(height, width, longest_edge, multiple=2)
    return _scaled(height, width, MOST_PIXELS) if max(height, width) > MOST_PIXELS else (height, width)


def _scaled(height: int, width: int, longest_edge: int, multiple: int = 1) -> tuple[int, int]:
    ratio = width / height
    short = int(longest_edge / ratio) if width >= height else int(longest_edge * ratio)
    short = max(short + short % multiple, 1)
    return (short, longest_edge) if width >= height else (longest_edge, short)


def whole_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """Round height and width to multiples of `side`.

    The longer side is rounded up. The shorter side is scaled in proportion and then rounded up.
    """
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side


class IdeficsModel(ImageModel, PretrainedModel):
    """The model of Idefics3 and SmolVLM.

    `module` is transformers' `Idefics3ForConditionalGeneration` or `SmolVLMForConditionalGeneration`.
    """

    traits = Traits(vision_parts=("model.vision_model",), projector_parts=("model.connector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: IdeficsProcessor) -> None:
        super().__init__(module, spec, module.model.text_model, module.lm_head)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        # get_image_features is not used, because it drops tiles whose values are all zero.
        hidden = self.module.model.vision_model(pixel_values=self.pixels(items)).last_hidden_state
        return split_features(self.module.model.connector(hidden), items)
