"""InternVL: images as a grid of tiles and a thumbnail, videos as numbered frames.

Source: arXiv 2504.10479. Token ids, pixels and logits match transformers' `internvl`.

Checkpoints may have transformers' layout or the layout of OpenGVLab (`_internvl_original.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import CorruptReference, InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import Size, check_output_size, check_settings, resample_of
from mindie_mm.media.image.tiles import closest_grid, cut
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.video.frames import Sampling, comes_sampled, stepped
from mindie_mm.models._internvl_original import CHAT_TEMPLATE, ORIGINAL, translated
from mindie_mm.models._original_tokenizer import original_tokenizer
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.mindie import PLANES, InSegment, Layout
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.vllm_tiles import TileLayout, dtype_of
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

_DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "min_patches": 1,
    "max_patches": 12,
    "initial_shift": True,
}
# Layouts of the handle words that MindIE's own processor writes. Each frame of a video has its own words.
_MINDIE: Mapping[Kind, Layout] = {
    kind: Layout((InSegment(PLANES, "uint8"),), per_run=kind == "video") for kind in ("image", "video")
}
_TOKENS = ("context_image_token", "start_image_token", "end_image_token", "video_token")


class InternVLProcessor(Processor):
    """Processor for InternVL. A block contains `pixel_values`, uint8 [tiles, side, side, 3]. The grid is (tiles,).

    In MindIE's wire format, an image has `planes`, uint8 [tiles, 3, side, side], and so does each frame of a video.
    """

    traits = Traits(mindie_layouts=_MINDIE, samples_like_vllm=True)

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = translated(checkpoint)
        self._original = checkpoint.renamings is not None
        where = str(checkpoint.path)
        config = read_config("InternVLConfig", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.side, self.tile_features = _tile(config, where)
        check_settings(checkpoint.json("processor_config.json"), {"image_seq_length": self.tile_features}, where)
        spelled = {name: checkpoint.require_special_token(name) for name in _TOKENS}
        context, start, end = (checkpoint.token_id(spelled[name]) for name in _TOKENS[:3])
        if context != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_id is {config.image_token_id}, but the tokenizer's id of "
                f"{spelled[_TOKENS[0]]!r} is {context}"
            )
        self.placeholders = {
            "image": Placeholder((), context, ()),
            "video": Placeholder((), context, (), spelled["video_token"]),
        }
        self._context, self._start, self._end = spelled["context_image_token"], start, end
        if (token := checkpoint.ids_of(checkpoint.tokenizer_json()).get(spelled["video_token"])) is not None:
            self.vllm_tokens = {"video": token}
        # crop_to_patches is ignored, because the reference's processor always asks for tiles.
        image = checkpoint.preprocessor("image", {"GotOcr2ImageProcessor": _DEFAULTS})
        video = checkpoint.preprocessor("video", {"InternVLVideoProcessor": _DEFAULTS})
        check_settings(video, {"do_resize": True, "do_center_crop": False}, where)
        for settings in (image, video):
            check_output_size(Size.read(settings["size"], where).fixed, self.side, where)
        self._least: int = image["min_patches"]
        self._most: int = image["max_patches"]
        self._resamples = {"image": resample_of(image, where), "video": resample_of(video, where)}
        self.normalizations: Mapping[Kind, Normalization] = {
            "image": Normalization.read(image),
            "video": Normalization.read(video),
        }
        self._shift: bool | float = video["initial_shift"]
        # Each frame also needs a start token and an end token.
        positions = context_length(config.get_text_config())
        self._sampling = Sampling.read(video, positions // (self.tile_features + 2))
        if not self._original:  # for which vLLM has other tensors
            self.vllm_items = {
                "image": TileLayout(
                    self.normalizations["image"].table(),
                    (self.side, self.side),
                    dtype_of(checkpoint.config),
                    count="image_num_patches",
                    constants={"image_token_id": context},
                )
            }

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template.

        In OpenGVLab's layout, the tokenizer's template is ignored, because it handles only text.
        """
        return (own or CHAT_TEMPLATE) if self._original else super().template(own, tokenizers, kinds)

    def max_tokens(self, kind: Kind) -> int:
        tiles = self._sampling.limit if kind == "video" else _with_thumbnail(self._most)
        return tiles * self.tile_features

    def worst_case(self, kind: Kind) -> Data:
        if kind == "video":
            return np.zeros((self._sampling.limit, self.side, self.side, 3), np.uint8)
        return np.zeros((self.side, self._most * self.side, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 1 or grid[0] * self.tile_features != num_features:
            return None
        tiles = grid[0]
        if kind == "image":
            return Spelling(runs=[self._run(tiles)])
        text = "\n".join(f"Frame{number}: {self._context}" for number in range(1, tiles + 1))
        return Spelling(text, [self._run(1)] * tiles)

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...]:
        return (num_features // self.tile_features,)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        return self._plan_video(media, data) if media.kind == "video" else self._plan_image(data)

    def _run(self, tiles: int) -> Sequence[int]:
        return (self._start, *[self.placeholders["image"].token] * (tiles * self.tile_features), self._end)

    def _plan_image(self, data: Data) -> tuple[Plan, Write]:
        image = open_image(data)
        side, resample = self.side, self._resamples["image"]
        rows, columns = closest_grid(image.height, image.width, side, self._least, self._most)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, tiles = image.decode(), _tiles(arrays)
            cut(resize(rgb, rows * side, columns * side, resample), tiles[: rows * columns])
            if len(tiles) > rows * columns:
                tiles[-1] = resize(rgb, side, side, resample)

        return self._plan(
            _with_thumbnail(rows * columns), f"{rows}x{columns} tiles of {side}, thumbnail, {resample}", write
        )

    def _plan_video(self, media: Media, data: Data) -> tuple[Plan, Write]:
        video = open_video(data, media.options.sample_fps)
        if media.is_like_vllm and self._original:
            raise InputError(
                "vLLM writes videos in another way for checkpoints in OpenGVLab's layout, which is not supported; use "
                "a checkpoint in transformers' layout, or start the service with --like transformers"
            )
        if media.is_like_vllm:
            indices = self._sampling.like_vllm(video, media.options)
        else:
            total, count = video.num_frames, self._sampling.count(video, media.options)
            whole = count == total and comes_sampled(video, media.options)
            indices = list(range(total)) if whole else self._sample(total, count)
        video.count(indices)
        side, resample = self.side, self._resamples["video"]

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            for place, frame in zip(_tiles(arrays), video.decode(indices), strict=True):
                place[...] = resize(frame, side, side, resample)

        return self._plan(len(indices), f"frames {indices} of {side}, {resample}", write)

    def _plan(self, tiles: int, settings: str, write: Write) -> tuple[Plan, Write]:
        side = self.side
        specs = self.specs_of("image", (tiles,))
        planes = {PLANES: ArraySpec((tiles, 3, side, side), "uint8")}
        return Plan(tiles * self.tile_features, specs, settings, (tiles,), planes), write

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        return {"pixel_values": self.normalized(item, device)}

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"pixel_values": ArraySpec((grid[0], self.side, self.side, 3), "uint8")}

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return stated[0] * self.tile_features, stated[:1]

    def _sample(self, total: int, count: int) -> list[int]:
        """Return the indices of about `count` frames out of `total` frames, in ascending order.

        The first index is `initial_shift`. If `initial_shift` is True, the first index is the middle of the first of
        `count` equal parts.
        """
        indices = stepped(total, count, total / count / 2 if self._shift is True else self._shift)
        if not indices:
            raise InputError(
                f"initial_shift of the checkpoint is {self._shift}, which skips all {total} frames of the video; send "
                "a longer video"
            )
        return indices


def _tiles(arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return a writable view of the tiles in either wire format, [tiles, side, side, 3]."""
    return arrays[PLANES].transpose(0, 2, 3, 1) if PLANES in arrays else arrays["pixel_values"]


def _with_thumbnail(tiles: int) -> int:
    return tiles + 1 if tiles > 1 else tiles


def _tile(config: Any, where: str) -> tuple[int, int]:
    """Return the side of a tile in pixels and its number of features.

    Raise UnsupportedCheckpoint if the tower is not supported.
    """
    vision, ratio, layer = config.vision_config, config.downsample_ratio, config.vision_feature_layer
    for name, value, served in (
        ("the tower", vision.model_type, "internvl_vision"),
        ("vision_feature_select_strategy", config.vision_feature_select_strategy, "default"),
        ("image_size", vision.image_size[0], vision.image_size[1]),
        ("patch_size", vision.patch_size[0], vision.patch_size[1]),
    ):
        if value != served:
            raise UnsupportedCheckpoint(f"{where}: {name} is {value!r}; only {served!r} is supported")
    if not isinstance(layer, int):
        raise UnsupportedCheckpoint(f"{where}: vision_feature_layer is {layer!r}; only a single layer is supported")
    rows = vision.image_size[0] // vision.patch_size[0]
    if rows * ratio % 1:
        raise UnsupportedCheckpoint(
            f"{where}: downsample_ratio is {ratio}, which does not divide the {rows}x{rows} patches of a tile"
        )
    return vision.image_size[0], int(rows * ratio) ** 2


class InternVLModel(ImageModel, PretrainedModel):
    """The InternVL model. `module` is transformers' `InternVLForConditionalGeneration`."""

    traits = Traits(
        mindie_layouts=_MINDIE,
        vision_parts=("model.vision_tower",),
        projector_parts=("model.multi_modal_projector",),
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: InternVLProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._token = processor.placeholders["image"].token
        self._side, self._tile_features = processor.side, processor.tile_features

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        if PLANES not in view:
            return super().describe_segments(view)
        tiles = len(view[PLANES])
        if view[PLANES].shape != (expected := (tiles, 3, self._side, self._side)):
            raise CorruptReference(
                f"the segment has the shape {view[PLANES].shape}; tiles of this model need {expected}"
            )
        return MediaShape("image", self._token, tiles * self._tile_features, (tiles,))

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        return split_features(self.module.model.get_image_features(self.pixels(items)).pooler_output, items)


class InternVL(PretrainedFamily):
    """InternVL 3 (Zhu et al., 2025, arXiv 2504.10479), run by transformers' modules."""

    model_types = ("internvl", ORIGINAL)
    published = "OpenGVLab/InternVL3-1B-hf"
    kinds = ("image", "video")
    processor = InternVLProcessor
    module_name = "InternVLForConditionalGeneration"
    model_class = InternVLModel
    unused_weights = ("language_model.model.layers.*.rotary_emb.inv_freq",)
    # Settings for training the original model, and for its attention kernel.
    other_keys = tuple(
        f"vision_config.{key}" for key in ("attention_dropout", "drop_path_rate", "dropout", "use_flash_attn")
    )

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return translated(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        checkpoint = translated(checkpoint)
        return super().tokenizer(checkpoint) if checkpoint.renamings is None else original_tokenizer(checkpoint)
