"""LLaVA-OneVision: a single image as tiles of a canvas, several images as one tile each, videos as pooled frames.

Source: arXiv 2408.03326. Token ids, pixels and logits match transformers' `llava_onevision`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.media.image.preprocess import (
    Preprocess,
    Size,
    background_of,
    check_output_size,
    check_settings,
    resample_of,
)
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.video.frames import Sampling, evenly
from mindie_mm.models._anyres import AnyresProcessor
from mindie_mm.models._tower_model import TowerModel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Spelling, Write
from mindie_mm.nn.model_inputs import PIXELS, Item
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.shm import ArraySpec

_EDGES = (384, 768, 1152, 1536, 1920, 2304)
_VIDEO: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_IMAGE: Mapping[str, Any] = {
    **_VIDEO,
    "image_grid_pinpoints": [[*pair] for pair in product(_EDGES, _EDGES)],
}
_PIXELS: Mapping[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
_LONGER = 1.1
"""Features are downscaled if the sides of their canvas exceed the limit by more than this factor."""


class LlavaOnevisionProcessor(AnyresProcessor):
    """Processor for LLaVA-OneVision.

    The block of an image contains `pixel_values`, uint8 [tiles, side, side, 3]. Its grid is (height, width, single),
    where `single` is 1 if the prompt has no other image and 0 otherwise. The block of a video contains
    `pixel_values_videos`, uint8 [frames, side, side, 3]. Its grid is (frames,).
    """

    config_name = "LlavaOnevisionConfig"
    image_type = "LlavaOnevisionImageProcessor"
    defaults: ClassVar[Mapping[str, Any]] = _IMAGE
    traits = Traits(alone_in_vllm=True, samples_like_vllm=True)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config, where = self.config, self.where
        self.placeholders = {
            "image": Placeholder((), config.image_token_id, ()),
            "video": Placeholder((), config.video_token_id, ()),
        }
        if (named := re.fullmatch(r"anyres_max_(\d+)", config.vision_aspect_ratio)) is None:
            raise UnsupportedCheckpoint(
                f"{where}: vision_aspect_ratio is {config.vision_aspect_ratio!r}; only anyres_max_N is supported"
            )
        self._max_tiles = int(named[1])
        stated = checkpoint.json("processor_config.json")
        dropped = config.vision_feature_select_strategy == "default"
        expected = {"vision_aspect_ratio": config.vision_aspect_ratio, "num_image_tokens": self.rows**2 + dropped}
        check_settings(stated, expected, f"{where} (processor_config.json)")
        self._alone = Preprocess(
            Size(self.side, self.side), self.resample, background=background_of(self.background_mean)
        )
        settings = checkpoint.preprocessor("video", {"LlavaOnevisionVideoProcessor": _VIDEO})
        check_settings(settings, {"do_resize": True, "do_center_crop": False}, where)
        self._frame = Preprocess(Size.read(settings["size"], where), resample_of(settings, where))
        check_output_size(self._frame.output_size, self.side, f"{where} (videos)")
        self.normalizations["video"] = Normalization.read(settings)
        self._frame_features = math.ceil(self.rows / 2) ** 2
        positions = context_length(config.get_text_config())
        self._sampling = Sampling.read(settings, (positions - 1) // self._frame_features)

    def max_tokens(self, kind: Kind) -> int:
        return super().max_tokens(kind) if kind == "image" else self._sampling.limit * self._frame_features + 1

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if kind == "video":
            is_possible = len(grid) == 1 and grid[0] * self._frame_features + 1 == num_features
        elif not grid or grid[2:] == (1,):
            return super().spelling(kind, num_features, grid[:2])
        else:  # one of several images, which has a single tile
            is_possible = grid[2:] == (0,) and min(grid[:2]) > 0 and num_features == self.rows**2 + 1
        return Spelling() if is_possible else None

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        return super().grid_of(kind, num_features) if kind == "image" else (num_features // self._frame_features,)

    def worst_case(self, kind: Kind) -> Data:
        if kind == "image":
            return super().worst_case(kind)
        return np.zeros((self._sampling.limit, self.side, self.side, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind == "video":
            return self._plan_video(media, data)
        is_alone = counts["image"] == 1
        plan, write = super().plan(media, data, counts) if is_alone else self._plan_one_of_several(data)
        return msgspec.structs.replace(plan, grid=(*plan.grid, int(is_alone))), write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if kind == "image" and grid[2:] != (0,):
            return super().specs_of(kind, grid[:2])
        name, tiles = ("pixel_values", 1) if kind == "image" else ("pixel_values_videos", grid[0])
        return {name: ArraySpec((tiles, self.side, self.side, 3), "uint8")}

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        num_tiles, *size = stated
        if num_tiles == 1:  # one of several images, with transformers' preprocessing
            return self.rows**2 + 1, (*size, 0)
        return self.num_features(*size), (*size, 1)

    def on_canvas(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = super().on_canvas(height, width)
        ratio = math.sqrt(rows * columns / (self._max_tiles * self.rows**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > _LONGER else (rows, columns)

    def _plan_one_of_several(self, data: Data) -> tuple[Plan, Write]:
        image = open_image(data)
        self._alone.check(image.height, image.width)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays["pixel_values"][0] = self._alone.apply(image.decode())

        plan = Plan(
            num_features=self.rows**2 + 1,
            specs=self.specs_of("image", (image.height, image.width, 0)),
            settings=f"one tile, {self._alone}",
            grid=(image.height, image.width),
        )
        return plan, write

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return normalized pixels, float32 [tiles or frames, 3, side, side]."""
        kind = item.shape.kind
        return self.normalizations[kind](to_device(item.view, PIXELS[kind], device))

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        if item.shape.kind == "video":
            return {PIXELS["video"]: self.normalized(item, device).unsqueeze(0)}
        return super().item_inputs(item, device)

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        counts = sorted({array.shape[1] for own in prompts for array in own}) if name == PIXELS["video"] else ()
        if len(counts) > 1:
            raise InputError(
                f"a batch has videos of {counts[0]} and of {counts[-1]} frames, but transformers' model takes only "
                "videos with the same number of frames. Put them in different batches, or sample them with num_frames"
            )
        return super().join(name, prompts)

    def media_inputs(self, prompts: Sequence[Sequence[Item]], device: torch.device) -> dict[str, Tensor]:
        inputs = super().media_inputs(prompts, device)
        if "image_sizes" in inputs:
            counts = [sum(item.shape.kind == "image" for item in items) for items in prompts]
            inputs["batch_num_images"] = torch.tensor(counts)
        return inputs

    def _plan_video(self, media: Media, data: Data) -> tuple[Plan, Write]:
        video = open_video(data, media.options.sample_fps)
        if media.is_like_vllm:
            indices = self._sampling.like_vllm(video, media.options)
        else:
            indices = evenly(video.num_frames, self._sampling.count(video, media.options))
        count = len(indices)
        video.count(indices)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            for place, frame in zip(arrays["pixel_values_videos"], video.decode(indices), strict=True):
                place[...] = self._frame.apply(frame)

        plan = Plan(
            num_features=count * self._frame_features + 1,
            specs=self.specs_of("video", (count,)),
            settings=f"frames {indices}, {self._frame}",
            grid=(count,),
        )
        return plan, write


class LlavaOnevisionModel(TowerModel):
    """The LLaVA-OneVision model. `module` is transformers' `LlavaOnevisionForConditionalGeneration`."""

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        images = [item for item in items if item.shape.kind == "image"]
        videos = [item for item in items if item.shape.kind == "video"]
        features: dict[MediaItem, Tensor] = {}
        if images:
            # The reference decides by the number of images in a prompt whether an image is tiled. Single images come
            # first here, each as a prompt of its own. All others follow as one prompt of at least two images.
            images.sort(key=lambda item: item.shape.grid[2], reverse=True)
            alone = sum(item.shape.grid[2] for item in images)
            sizes = torch.tensor([item.shape.grid[:2] for item in images])
            together = max(2, len(images) - alone)
            image_features = self.module.model.get_image_features(
                self.pixels(images), sizes, batch_num_images=[*[1] * alone, together]
            ).pooler_output
            features.update(zip(images, image_features, strict=True))
        if videos:
            features.update(zip(videos, self._video_features(videos), strict=True))
        return [features[item] for item in items]

    def _video_features(self, videos: Sequence[MediaItem]) -> list[Tensor]:
        """Return the features of each video.

        The tower processes all frames as one video. The newline feature at the end of the output is copied to the end
        of each video.
        """
        (rows,) = self.module.model.get_video_features(self.pixels(videos).unsqueeze(0)).pooler_output
        parts = rows[:-1].split([item.shape.num_features - 1 for item in videos])
        return [torch.cat([part, rows[-1:]]) for part in parts]


class LlavaOnevision(PretrainedFamily):
    """LLaVA-OneVision (Li et al., 2024, arXiv 2408.03326), run by transformers' modules."""

    model_types = ("llava_onevision",)
    published = "llava-hf/llava-onevision-qwen2-7b-ov-hf"
    kinds = ("image", "video")
    processor = LlavaOnevisionProcessor
    module_name = "LlavaOnevisionForConditionalGeneration"
    model_class = LlavaOnevisionModel
