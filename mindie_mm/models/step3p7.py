"""Step 3.7 Flash: an overview and crops of each image, and a decoder with windows and a mixture of experts.

Source: stepfun-ai/Step-3.7-Flash. Token ids, pixels and logits match transformers' `step3p7`. The number of heads and
the rotated part of a head depend on the layer. Each head has a gate, and the activations of some layers are clamped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, Pixels, Resample, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.experts import experts_of
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.paged_cache import KVLayer
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.split_linear import num_shares
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_WHOLE, _CROPS = "pixel_values", "pixel_values_local"
_IMAGES = "Step3p7ImageProcessor"
_DEFAULTS: Mapping[str, Any] = {
    "resample": 2,
    "size": {"height": 728, "width": 728},
    "patch_size": 504,
    "max_image_size": 3024,
    "vision_patch_size": 14,
    "downsampler_stride": 4,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_OF_AUTHORS = "understand_projector_stride"
"""Key of config.json that only the authors' layout has. Its code, which is not run, states the settings of images."""
_ONLY: Mapping[str, Mapping[str, Any]] = {
    "vision_config": {"use_cls_token": False, "use_ln_post": False, "pool_type": "none"},
    "text_config": {
        "use_moe": True,
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "att_impl_type": "GQA",
        "use_head_wise_attn_gate": True,
        "yarn_only_types": ["full_attention"],
    },
}
"""Keys that only the authors' layout has, with the values that transformers' class assumes."""
_NARROW = 32
"""Images with a side of fewer pixels that are long are padded to a square."""


@dataclass(frozen=True, slots=True)
class _Crops:
    """The crops of an image."""

    padded: tuple[int, int]
    """Height and width of the image with the padding at its right and its bottom."""
    whole: tuple[int, int]
    """Height and width of the overview in pixels. The image is resized to this size."""
    canvas: tuple[int, int]
    """Height and width in pixels that the image is resized to before it is cropped."""
    window: int
    """Side of a crop in pixels. 0 means that there are none."""

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of rows and columns of crops."""
        if not self.window:
            return 0, 0
        height, width = self.canvas
        return max(1, height // self.window), max(1, width // self.window)


class Step3p7Processor(Processor):
    """Processor for Step 3.7.

    The block of an image contains `pixel_values`, uint8 [1, side, side, 3], and if the image has crops,
    `pixel_values_local`, uint8 [crops, side, side, 3]. The grid is the numbers of rows and columns of crops.
    """

    traits = Traits(grids={"image": "the numbers of rows and columns of crops"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Step3p7Config", checkpoint)
        for section, needed in _ONLY.items():
            check_settings(checkpoint.config.get(section, {}), needed, f"{where} ({section})")
        vision = config.vision_config
        self.feature_width = config.get_text_config().hidden_size
        settings: Mapping[str, Any] = _DEFAULTS
        if _OF_AUTHORS not in checkpoint.config:
            settings = checkpoint.preprocessor("image", {_IMAGES: _DEFAULTS})
        check_settings(settings, {"vision_patch_size": vision.patch_size, "downsampler_stride": 4}, where)
        size = settings["size"]
        if not isinstance(size, Mapping) or size.get("height") != size.get("width") or size.get("height") is None:
            raise UnsupportedCheckpoint(f"{where}: size={size!r} must have height and an equal width")
        self.side: int = size["height"]
        self.crop_side: int = settings["patch_size"]
        self._most_pixels: int = settings["max_image_size"]
        cell = vision.patch_size * settings["downsampler_stride"]
        for name, side in (("size", self.side), ("patch_size", self.crop_side)):
            if side % cell:
                raise UnsupportedCheckpoint(f"{where}: {name} is {side} pixels; it must be a multiple of {cell}")
        self._features, self._crop_features = ((side // cell) ** 2 for side in (self.side, self.crop_side))
        self._most_crops = math.ceil(self._most_pixels / self.crop_side) ** 2
        self._resample: Resample = resample_of(settings, where)
        self.normalization = Normalization.read(settings)
        self._token: int = config.image_token_id
        names = ("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>")
        self._marks = tuple(checkpoint.token_id(name) for name in names)
        self.placeholders = {"image": Placeholder((), self._token, (), control_ids=self._marks)}

    def max_tokens(self, kind: Kind) -> int:
        tokens: int = self._features + self._most_crops * self._crop_features
        return tokens

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self._most_pixels, self._most_pixels, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 2 or min(grid) < 0 or grid[0] * grid[1] > self._most_crops:
            return None
        rows, columns = grid
        if self._features + rows * columns * self._crop_features != num_features or (rows == 0) != (columns == 0):
            return None
        start, end, crop_start, crop_end, newline = self._marks
        crop = [crop_start, *[self._token] * self._crop_features, crop_end]
        crops = [*[*(crop * columns), newline] * (rows - 1), *(crop * columns)] if rows else []
        return Spelling(runs=[[*crops, start, *[self._token] * self._features, end]])

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        crops = self._cropped(image.height, image.width)
        grid = crops.grid
        if grid[0] * grid[1] > self._most_crops or not min(crops.whole):
            raise LimitExceeded(
                f"the image has {image.width}x{image.height} pixels, which would be cut into {grid[1]}x{grid[0]} "
                f"crops; the limit is {self._most_crops} crops. Send parts of the image"
            )

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb = _padded(image.decode(), crops.padded)
            arrays[_WHOLE][0] = resize(resize(rgb, *crops.whole, self._resample), self.side, self.side, self._resample)
            if crops.window:
                canvas, window = resize(rgb, *crops.canvas, self._resample), crops.window
                corners = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
                for into, (row, column) in zip(arrays[_CROPS], corners, strict=True):
                    part = canvas[row * window : (row + 1) * window, column * window : (column + 1) * window]
                    into[...] = resize(part, self.crop_side, self.crop_side, self._resample)

        plan = Plan(
            num_features=self._features + grid[0] * grid[1] * self._crop_features,
            specs=self.specs_of(media.kind, grid),
            settings=f"step3p7 {self.side}, {self.crop_side}, {crops}, {self._resample}",
            grid=grid,
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        specs = {_WHOLE: ArraySpec((1, self.side, self.side, 3), "uint8")}
        if count := grid[0] * grid[1]:
            specs[_CROPS] = ArraySpec((count, self.crop_side, self.crop_side, 3), "uint8")
        return specs

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the normalized overview and crops, float32 [n, 3, side, side], and the number of crops."""
        names = [name for name in (_WHOLE, _CROPS) if name in item.view]
        return {
            **{name: self.normalization(to_device(item.view, name, device)) for name in names},
            "num_local_patches": torch.tensor([math.prod(item.shape.grid)]),
        }

    def _cropped(self, height: int, width: int) -> _Crops:
        """Return the crops of an image, which the reference calls patches."""
        if min(height, width) < _NARROW and max(width / height, height / width) > 4:
            height = width = max(height, width)
        padded, longest = (height, width), max(height, width)
        if longest > self._most_pixels:
            scale = self._most_pixels / longest
            height, width = int(height * scale), int(width * scale)
        short, long = sorted((height, width))
        if not short:
            return _Crops(padded, (height, width), (0, 0), 0)
        if long <= self.side:
            window = short if long / short > 1.5 else 0
        else:
            window = min(short, self.crop_side) if long / short > 4 else self.crop_side
        canvas = tuple(_snapped(side, window) for side in (height, width)) if window else (0, 0)
        return _Crops(padded, (height, width), (canvas[0], canvas[1]), window)


def _snapped(side: int, window: int) -> int:
    """Round a side to a multiple of `window`: up if more than a fifth of a window is left over, otherwise down.

    A side that is shorter than `window` stays as it is.
    """
    return window * (side // window + (side % window > 0.2 * window)) if side >= window else side


def _padded(rgb: Pixels, size: tuple[int, int]) -> Pixels:
    """Pad an image with zeros at its right and its bottom."""
    height, width = (target - own for target, own in zip(size, rgb.shape, strict=False))
    return np.pad(rgb, ((0, height), (0, width), (0, 0))) if height or width else rgb


class Step3p7Model(PretrainedModel):
    """The Step 3.7 model. `module` is transformers' `Step3p7ForConditionalGeneration`."""

    traits = Traits(vision_parts=("model.vision_model",), projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Step3p7Processor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._processor = processor
        _arrange_experts(self.text_model.layers, module.config.get_text_config().n_routed_experts)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Encode the items: all overviews in one batch, and all crops in another."""
        inputs = self._processor.media_inputs([items], self.spec.device)
        wholes = self._encoded(inputs[_WHOLE])
        crops = self._encoded(inputs[_CROPS]) if _CROPS in inputs else wholes[:0]
        counts = [math.prod(item.shape.grid) for item in items]
        return [
            torch.cat([own.flatten(0, 1), whole]) if len(own) else whole
            for whole, own in zip(wholes, crops.split(counts), strict=True)
        ]

    def _encoded(self, pixels: Tensor) -> Tensor:
        """Return the features, [n, features, hidden], of images [n, 3, side, side]."""
        hidden = self.module.model.vision_model(pixels.to(self.spec.dtype)).last_hidden_state
        features: Tensor = self.module.model.multi_modal_projector(hidden)
        return features


class _SharedExperts(nn.Module):
    """Experts that several ranks share. The output is the sum over all ranks."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mixed: Tensor = self.own(hidden, chosen, weights)
        dist.all_reduce(mixed)
        return mixed


def _arrange_experts(layers: nn.ModuleList, count: int) -> None:
    """Let `nn/experts.py` run the experts. transformers' loop over experts waits for the device.

    Unlike other families' experts, these lack the decorator that `nn/experts.py` recognizes. `count` is the number of
    experts on all ranks.
    """
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    for block in layers.children():
        layer: Any = block
        part = getattr(layer.mlp, "experts", None)
        if not isinstance(part, Step3p7Experts) or not part.gate_up_proj.is_floating_point():
            continue
        first, second = part.gate_up_proj.detach(), part.down_proj.detach()
        del part.gate_up_proj, part.down_proj  # the activation below keeps `part`
        start = dist.get_rank() * len(first) if len(first) < count else None
        arranged = experts_of(first, second, part._apply_gate, start)  # noqa: SLF001 - there is no public name
        layer.mlp.experts = _SharedExperts(arranged) if num_shares() > 1 else arranged


def _kv_layer(text: Any) -> KVLayer:
    """Return the description of the cache entry of a layer.

    With transformers' plan, each rank computes all heads, because the projections are gathered.
    """
    return KVLayer(text.num_key_value_heads, text.head_dim)


class Step3p7(PretrainedFamily):
    """Step 3.7 Flash (StepFun, 2026), run by transformers' modules."""

    model_types = ("step3p7",)
    published = "stepfun-ai/Step-3.7-Flash"
    kinds = ("image",)
    processor = Step3p7Processor
    module_name = "Step3p7ForConditionalGeneration"
    model_class = Step3p7Model
    other_keys = (
        _OF_AUTHORS,
        *(f"{section}.{name}" for section, needed in _ONLY.items() for name in needed),
        # Numbers that follow from other keys, and the dtype of the router, whose scores are always computed in float32.
        *("image_token_len", "patch_token_len", "text_config.max_seq_len", "text_config.need_fp32_gate"),
        "vision_config.output_dim",  # the width of a projection, whose weights would be refused
    )
    states = dict.fromkeys(("full_attention", "sliding_attention"), _kv_layer)
