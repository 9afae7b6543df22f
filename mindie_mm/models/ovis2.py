"""Ovis2: tiles and a thumbnail, whose patches become mixtures of the embeddings of a visual vocabulary.

Source: arXiv 2405.20797. Token ids, pixels and logits match transformers' `ovis2`. Checkpoints may have transformers'
layout or the layout of AIDC-AI (`_ovis2_original.py`), whose code pads tiles instead of stretching them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mindie_mm.device import upload
from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import Size, check_output_size, check_settings, resample_of
from mindie_mm.media.image.tiles import closest_grid, cut
from mindie_mm.models._original_tokenizer import original_tokenizer
from mindie_mm.models._ovis2_original import ATOM, CHAT_TEMPLATE, INDICATORS, ORIGINAL, OTHER_KEYS, translated
from mindie_mm.models._ovis2_tiles import covering_grid, num_tiles, padded_tiles, write_padded
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
    "use_covering_area_grid": True,
}
_TOKENIZE = ("softmax", "st_argmax")
"""Values of `tokenize_function`. The third, gumbel_argmax, would draw other features each time."""
_MARKER = "<image>"
_SIZES = "sizes"
"""Array of a block in AIDC-AI's layout."""
_TILES = 4
"""Tiles per call to the tower. The probabilities of the visual vocabulary take 67 MB per tile in float32."""


class Ovis2Processor(Processor):
    """Processor for Ovis2.

    A block contains `pixel_values`, uint8 [tiles, side, side, 3]: the whole image and, if the image is cut, its tiles
    row by row. The grid is the number of tiles (rows, columns). It is (1, 1) for an image that is not cut. In AIDC-AI's
    layout, a block also contains `sizes`, int32 [tiles, 2]: the height and width of each tile without its padding.
    """

    traits = Traits(grids={"image": "the numbers of rows and columns of tiles, not counting the whole image"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = translated(checkpoint)
        where = str(checkpoint.path)
        self.is_original = checkpoint.renamings is not None
        """True if the checkpoint has AIDC-AI's layout, so that images are processed as in AIDC-AI's code."""
        config = read_config("Ovis2Config", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.side, self.tile_features = _tile(config.vision_config, where)
        settings = checkpoint.preprocessor("image", {"Ovis2ImageProcessor": _DEFAULTS})
        check_settings(
            {"image_seq_length": 256, **checkpoint.json("processor_config.json")},
            {"image_seq_length": self.tile_features},
            where,
        )
        check_settings(settings, {"do_resize": True, "do_center_crop": False}, where)
        check_output_size(Size.read(settings["size"], where).fixed, self.side, where)
        self._least: int = settings["min_patches"]
        self._most: int = settings["max_patches"] if settings["crop_to_patches"] else 1
        self._covers: bool = settings["use_covering_area_grid"]
        self._resample = resample_of(settings, where)
        self.normalizations: Mapping[Kind, Normalization] = {"image": Normalization.read(settings)}
        stated = (config.image_token_id, *config.visual_indicator_token_ids)
        found = tuple(map(checkpoint.token_id, (ATOM, *INDICATORS)))
        if found != stated:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_id and visual_indicator_token_ids are {stated}, but the tokenizer's ids of "
                f"{ATOM}, {', '.join(INDICATORS)} are {found}"
            )
        self.indicators = found[1:]
        self.placeholders = {"image": Placeholder((), found[0], (), _MARKER, control_ids=self.indicators)}

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template.

        In AIDC-AI's layout, the tokenizer's template is ignored, because it is that of a text model.
        """
        return (own or CHAT_TEMPLATE) if self.is_original else super().template(own, tokenizers, kinds)

    def max_tokens(self, kind: Kind) -> int:
        return (self._most + 1 if self._most > 1 else 1) * self.tile_features

    def worst_case(self, kind: Kind) -> Data:
        # An image of which only tiles in one row or in one column cover enough.
        return np.zeros((self.side, self._most * self.side, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 2 or min(grid) < 1 or not 1 <= grid[0] * grid[1] <= self._most:
            return None
        rows, columns = grid
        tiles = num_tiles(grid)
        if tiles * self.tile_features != num_features:
            return None
        start, whole, column, row, end = INDICATORS
        cells = row.join([column.join([ATOM] * columns)] * rows) if tiles > 1 else ""
        token = self.placeholders["image"].token
        return Spelling(f"{start}{ATOM}{whole}{cells}{end}", [(token,) * self.tile_features] * tiles)

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        return (1, 1) if num_features == self.tile_features else None

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        side, resample = self.side, self._resample
        grid = rows, columns = self._grid(image.height, image.width)
        parts = padded_tiles(image.height, image.width, grid, side) if self.is_original else []
        if any(0 in size for _, size in parts):
            raise LimitExceeded(
                f"the image has {image.width}x{image.height} pixels; one side of a tile would have no pixels when the "
                f"other is resized to {side}. Crop or pad the image"
            )

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, tiles = image.decode(), arrays["pixel_values"]
            if parts:
                write_padded(rgb, parts, tiles, arrays[_SIZES], resample)
                return
            tiles[0] = resize(rgb, side, side, resample)
            if len(tiles) > 1:
                cut(resize(rgb, rows * side, columns * side, resample), tiles[1:])

        num_features = num_tiles(grid) * self.tile_features
        settings = f"{rows}x{columns} tiles of {side}, {'padded, ' * bool(parts)}{resample}"
        return Plan(num_features, self.specs_of(media.kind, grid), settings, grid), write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        tiles = num_tiles(grid)
        specs = {"pixel_values": ArraySpec((tiles, self.side, self.side, 3), "uint8")}
        return specs | {_SIZES: ArraySpec((tiles, 2), "int32")} if self.is_original else specs

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of tiles of an image."""
        if self._most == 1:
            return 1, 1
        if self._covers:
            rows, columns = covering_grid(height, width, self.side, self._most)
            return (rows, columns) if self.is_original else (columns, rows)  # transformers exchanges them
        return closest_grid(height, width, self.side, self._least, self._most)

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized tiles of an item, float32 [tiles, 3, side, side]. Padding is zero."""
        planes = super().normalized(item, device)
        if _SIZES not in item.view:
            return planes
        sizes = to_device(item.view, _SIZES, device).unsqueeze(-1)
        places, starts = torch.arange(planes.shape[-1], device=device), (planes.shape[-1] - sizes) // 2
        rows, columns = ((places >= starts) & (places < starts + sizes)).unbind(1)  # [tiles, side] each
        return planes.masked_fill_(~(rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1), 0)


def _tile(vision: Any, where: str) -> tuple[int, int]:
    """Return the side of a tile in pixels and its number of features.

    Raise UnsupportedCheckpoint if the tower is not supported.
    """
    if not isinstance(vision.image_size, int) or not isinstance(vision.patch_size, int):
        raise UnsupportedCheckpoint(
            f"{where}: image_size is {vision.image_size} and patch_size is {vision.patch_size}; only one number each "
            "is supported"
        )
    if vision.tokenize_function not in _TOKENIZE:
        raise UnsupportedCheckpoint(
            f"{where}: tokenize_function is {vision.tokenize_function!r}; only {', '.join(_TOKENIZE)} are supported"
        )
    if vision.num_visual_indicator_tokens != len(INDICATORS):
        raise UnsupportedCheckpoint(
            f"{where}: num_visual_indicator_tokens is {vision.num_visual_indicator_tokens}; only {len(INDICATORS)} is "
            "supported"
        )
    rows = vision.image_size // vision.patch_size
    if rows % vision.hidden_stride:
        raise UnsupportedCheckpoint(
            f"{where}: hidden_stride is {vision.hidden_stride}, which does not divide the {rows}x{rows} patches of a "
            "tile"
        )
    return vision.image_size, (rows // vision.hidden_stride) ** 2


class Ovis2Model(ImageModel, PretrainedModel):
    """The Ovis2 model. `module` is transformers' `Ovis2ForConditionalGeneration`."""

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.visual_embeddings_table",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Ovis2Processor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._indicators = upload(torch.tensor(processor.indicators), spec.device)
        if processor.is_original:  # the original code reads the tower before this norm
            module.model.vision_tower.transformer.rms_norm = nn.Identity()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed tokens. The tokens between tiles have their embeddings in the last rows of the visual table."""
        hidden = super().embed(input_ids)
        table: Tensor = self.module.model.visual_embeddings_table.weight
        is_indicator = input_ids.unsqueeze(1) == self._indicators
        rows = is_indicator.to(hidden.dtype) @ table[-len(self._indicators) :].to(hidden)
        return torch.where(is_indicator.any(1, keepdim=True), rows, hidden)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        parts = self.pixels(items).split(_TILES)
        features = [self.module.model.get_image_features(part).pooler_output for part in parts]
        return split_features(torch.cat(features), items)


class Ovis2(PretrainedFamily):
    """Ovis2 (AIDC, 2025, arXiv 2405.20797), run by transformers' modules."""

    model_types = ("ovis2", ORIGINAL)
    published = "thisisiron/Ovis2-2B-hf"
    kinds = ("image",)
    processor = Ovis2Processor
    module_name = "Ovis2ForConditionalGeneration"
    model_class = Ovis2Model
    # Keys of the original tower, which transformers' class repeats or lacks.
    other_keys = (
        *OTHER_KEYS,
        *(
            f"vision_config.{key}"
            for key in words(
                "backbone_config backbone_kwargs depths drop_cls_token tau tie_word_embeddings use_indicators"
            )
        ),
    )

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return translated(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        checkpoint = translated(checkpoint)
        return super().tokenizer(checkpoint) if checkpoint.renamings is None else original_tokenizer(checkpoint)
