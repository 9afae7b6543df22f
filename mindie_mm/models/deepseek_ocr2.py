"""DeepSeek-OCR-2: one image at 1024 pixels and up to six tiles, whose features are queries of a causal encoder.

Source: arXiv 2601.20552. Token ids, pixels and logits match transformers' `deepseek_ocr2`. deepseek-ai's layout is
translated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import Size, check_settings, pad, resample_of
from mindie_mm.media.image.tiles import closest_grid, cut
from mindie_mm.models._deepseek_ocr2_original import KEYS, TOWER, translate
from mindie_mm.models._original_tokenizer import original_tokenizer
from mindie_mm.models._sam import keep_positions
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_ORIGINAL = "deepseek_vl_v2"
"""model_type in deepseek-ai's layout. DeepSeek-VL2 and DeepSeek-OCR have it, too."""
_ARCHITECTURE = "DeepseekOCR2ForCausalLM"
_WHOLE, _TILES = "pixel_values", "pixel_values_local"
_LEAST, _MOST = 2, 6
_QUERIES = {_WHOLE: 256, _TILES: 144}
"""Number of features of an image and of a tile. The tower has learned a query for each feature."""
_DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 1024, "width": 1024},
    "tile_size": 768,
    "resample": 3,
    "image_mean": HALF,
    "image_std": HALF,
    "background_color": (127, 127, 127),
}
# Prompts and answers contain these tokens, so the tokenizer decodes them as text. Each has a single id.
_TAGS = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<td>", "</td>", "<tr>", "</tr>")
_TEMPLATE = """\
{{- bos_token }}
{%- set all = namespace(text='') %}
{%- for message in messages %}
{%- if message.content is string %}{% set all.text = all.text + message.content %}
{%- else %}
{%- for part in message.content or [] %}
{%- if part.type == 'text' %}{% set all.text = all.text + part.text %}
{%- else %}
{%- set all.text = all.text + '<image>' %}
{%- if not loop.last and loop.nextitem.type == 'text' and not loop.nextitem.text.startswith('\\n') %}
{%- set all.text = all.text + '\\n' %}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endfor %}
{{- all.text.strip() }}"""
"""The original code's format `plain`, which has no roles."""


class DeepseekOCR2Processor(Processor):
    """Processor for DeepSeek-OCR-2.

    The block of an image contains `pixel_values`, uint8 [size, size, 3], the padded image, and `pixel_values_local`,
    uint8 [tiles, tile, tile, 3], if the image is larger than a tile. The grid is the number of tiles.
    """

    traits = Traits(chat_template=_TEMPLATE)

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = _translated(checkpoint)
        where = str(checkpoint.path)
        config = read_config("DeepseekOcr2Config", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        settings = checkpoint.preprocessor("image", {"DeepseekOcr2ImageProcessor": _DEFAULTS})
        # The reference's processor always asks for 2 to 6 tiles.
        needed = {"do_resize": True, "crop_to_patches": True, "min_patches": _LEAST, "max_patches": _MOST}
        check_settings(settings, needed, where)
        joint = checkpoint.json("processor_config.json")
        patch = joint.get("patch_size", 16)
        check_settings({"patch_size": patch}, {"patch_size": config.vision_config.sam_config.patch_size}, where)
        height, width = Size.read(settings["size"], where).fixed or (0, 0)
        self._sides = {_WHOLE: height, _TILES: settings["tile_size"]}
        for name, side in self._sides.items():
            count = math.ceil(side / patch / joint.get("downsample_ratio", 4)) ** 2
            if count != _QUERIES[name] or height != width:
                raise UnsupportedCheckpoint(
                    f"{where}: size is {settings['size']}, tile_size is {settings['tile_size']} and patch_size is "
                    f"{patch}; an image must have 256 features and a tile 144, as with 1024, 768 and 16"
                )
        self._resample = resample_of(settings, where)
        red, green, blue = settings["background_color"]
        self._background = (red, green, blue)
        self.normalization = Normalization.read(settings)
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        self._bos = checkpoint.token_id(checkpoint.require_special_token("bos_token"))

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        return ids if ids[:1] == [self._bos] else [self._bos, *ids]

    def max_tokens(self, kind: Kind) -> int:
        return _num_features(_MOST)

    def worst_case(self, kind: Kind) -> Data:
        tile = self._sides[_TILES]
        return np.zeros((tile, _MOST * tile, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        is_possible = len(grid) == 1 and grid[0] in {0, *range(_LEAST, _MOST + 1)}
        return Spelling() if is_possible and num_features == _num_features(grid[0]) else None

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...]:
        return ((num_features - _num_features(0)) // _QUERIES[_TILES],)

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        size, tile = self._sides.values()
        tiles = {_TILES: ArraySpec((grid[0], tile, tile, 3), "uint8")} if grid[0] else {}
        return {_WHOLE: ArraySpec((size, size, 3), "uint8"), **tiles}

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the normalized arrays of a block, float32 [images, 3, side, side], and the number of tiles."""
        pixels = {name: to_device(item.view, name, device) for name in self._sides if name in item.view}
        return {
            **{name: self.normalization(array.view(-1, *array.shape[-3:])) for name, array in pixels.items()},
            "num_local_patches": torch.tensor([item.shape.grid[0]]),
        }

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        size, tile = self._sides.values()
        scale = size / max(image.height, image.width)
        height, width = round(image.height * scale), round(image.width * scale)
        if min(height, width) < 1:
            raise LimitExceeded(
                f"the image has {image.width}x{image.height} pixels; the longer side must be less than {2 * size} "
                "times the shorter one"
            )
        rows, columns = 0, 0
        if max(image.height, image.width) > tile:
            rows, columns = closest_grid(image.height, image.width, tile, _LEAST, _MOST)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb = image.decode()
            arrays[_WHOLE][...] = pad(resize(rgb, height, width, self._resample), size, size, self._background)
            if _TILES in arrays:
                cut(resize(rgb, rows * tile, columns * tile, self._resample), arrays[_TILES])

        grid = (rows * columns,)
        settings = f"image {size}, around it {self._background}, {rows}x{columns} tiles of {tile}, {self._resample}"
        return Plan(_num_features(*grid), self.specs_of(media.kind, grid), settings, grid), write


def _num_features(tiles: int) -> int:
    """Return the number of features of an image with `tiles` tiles. The last feature is a separator."""
    return _QUERIES[_WHOLE] + _QUERIES[_TILES] * tiles + 1


class DeepseekOCR2Model(PretrainedModel):
    """The DeepSeek-OCR-2 model. `module` is transformers' `DeepseekOcr2ForConditionalGeneration`."""

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: DeepseekOCR2Processor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._processor = processor
        keep_positions(module.model.vision_tower.sam_encoder)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        inputs, dtype = self._processor.media_inputs([items], self.spec.device), self.spec.dtype
        local = inputs[_TILES].to(dtype) if _TILES in inputs else None
        counts = [item.shape.grid[0] for item in items]
        features: list[Tensor] = self.module.model.get_image_features(
            inputs[_WHOLE].to(dtype), local, counts
        ).pooler_output
        return features


class DeepseekOCR2(PretrainedFamily):
    """DeepSeek-OCR-2 (Wei et al., 2026, arXiv 2601.20552), run by transformers' modules."""

    model_types = ("deepseek_ocr2", _ORIGINAL)
    published = "deepseek-ai/DeepSeek-OCR-2"
    kinds = ("image",)
    processor = DeepseekOCR2Processor
    module_name = "DeepseekOcr2ForConditionalGeneration"
    model_class = DeepseekOCR2Model

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == cls.model_types[0] or _is_original(config)

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return _translated(checkpoint)

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        if _is_original(checkpoint.config):
            return [*KEYS.unknown(checkpoint.config)]
        return super().unknown_keys(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        return original_tokenizer(checkpoint, _TAGS)


def _is_original(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is one of DeepSeek-OCR-2 in deepseek-ai's layout."""
    tower = (config.get("vision_config") or {}).get("model_name")
    is_named = _ARCHITECTURE in (config.get("architectures") or ()) or tower == TOWER
    return config.get("model_type") == _ORIGINAL and is_named


def _translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout."""
    is_read = checkpoint.renamings is not None or not _is_original(checkpoint.config)
    return checkpoint if is_read else translate(checkpoint)
