"""Processor and model of Qwen2-VL, which later Qwen models extend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import CorruptReference, LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import GRID_KEYS, Kind, Media, MediaOptions
from mindie_mm.media.image.encoded_image import Data, Pixels, open_image, resize
from mindie_mm.media.image.patches import patchify, unpatchify
from mindie_mm.media.video.encoded_video import Video, open_video
from mindie_mm.media.video.frames import check_asked, comes_sampled
from mindie_mm.models._mrope import mrope_positions
from mindie_mm.models._qwen_pixels import (
    DEFAULT_FPS,
    IMAGE_DEFAULTS,
    VIDEO_DEFAULTS,
    PixelSettings,
    bounding_grids,
    largest,
    sample_frames,
    smart_resize,
)
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.layers import PatchProjection
from mindie_mm.nn.mindie import PLANES, InSegment, InWord, Layout
from mindie_mm.nn.model import ModelSpec, Positions
from mindie_mm.nn.model_inputs import PIXELS, Item
from mindie_mm.nn.pixels import joined
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.vllm_items import PatchLayout
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

THW = "the number of patches along time, height and width"
INTERVAL_GRIDS: Mapping[Kind, str] = {"image": THW, "video": f"{THW}, and the time between two patches in picoseconds"}
"""Meaning of the grids in families with positions in absolute time."""
_GRIDS: Mapping[Kind, str] = {"image": "grid_thw", "video": "video_grid_thw"}
_SECONDS = "second_per_grid_t"
# Layouts of the handle words that MindIE's own processor writes for this family. The axes of MindIE's patches are
# (channel, time, row, column).
_MINDIE: Mapping[Kind, Layout] = {
    "image": Layout((InSegment(PLANES, "uint8"), InWord(_GRIDS["image"]))),
    "video": Layout((InSegment(PLANES, "uint8"), InWord(_GRIDS["video"]), InSegment(_SECONDS, "float32"))),
}
PICOSECONDS = 10**12
"""Picoseconds per second."""


class QwenProcessor(Processor):
    """Processor for Qwen2-VL.

    The block of an image contains `pixel_values`, uint8 [h * w, patch * patch * 3]. The second, identical frame of an
    image is not stored. The block of a video contains `pixel_values_videos`, uint8 [t * h * w, temporal * patch * patch
    * 3]. The grid is (t, h, w), in patches. The patches that become one token are adjacent.

    In MindIE's wire format, images and videos have `planes`, uint8 [t * h * w, 3 * temporal * patch * patch], and their
    grid. The planes of an image include the repeated frame. A video also has `second_per_grid_t`, float32 [1, 1].
    """

    traits = Traits(
        bounds_pixels=True,
        has_grid_thw=True,
        grids={"image": THW, "video": THW},
        token_types=("mm_token_type_ids",),
        mindie_layouts=_MINDIE,
    )

    config_name: ClassVar[str]
    """Name of transformers' configuration class."""
    vllm_kinds: ClassVar[tuple[Kind, ...]] = ()
    """Kinds of items that have the layout `PatchLayout` in vLLM's payloads."""
    image_types: ClassVar[Sequence[str]]
    """Names of the image processor classes in transformers that a checkpoint may state."""
    image_defaults: ClassVar[Mapping[str, Any]] = IMAGE_DEFAULTS
    """Settings of images that a checkpoint may leave out."""
    video_types: ClassVar[Sequence[str]] = ()
    """Names of the video processor classes in transformers. Empty if the family has no videos."""
    video_defaults: ClassVar[Mapping[str, Any]] = VIDEO_DEFAULTS
    temporal_merge: ClassVar[int] = 1
    """Number of temporal patches of a video that become one token. The last frame fills up the last token."""
    groups_patches: ClassVar[bool] = True
    """True if the patches that become one token are adjacent. Otherwise, patches are stored row by row."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = read = read_config(self.config_name, checkpoint)
        width: int = read.get_text_config().hidden_size
        # A feature also has the outputs of the tower's deepstack layers, if there are any.
        self.extra_width = width * len(getattr(read.vision_config, "deepstack_visual_indexes", ()))
        self.feature_width = width + self.extra_width
        image = checkpoint.preprocessor("image", dict.fromkeys(self.image_types, self.image_defaults))
        self.image = self.image_settings(image, f"{checkpoint.path} (images)")
        temporal = getattr(read.vision_config, "temporal_patch_size", 1) if self.video_types else 1
        _check_tower(self.image, read.vision_config, temporal, f"{checkpoint.path} (images)")
        before = (getattr(read, "vision_start_token_id", 151652),)
        after = (getattr(read, "vision_end_token_id", 151653),)
        placeholders: dict[Kind, Placeholder] = {"image": Placeholder(before, read.image_token_id, after)}
        if self.video_types:
            video = checkpoint.preprocessor("video", dict.fromkeys(self.video_types, self.video_defaults))
            self.video = self.video_settings(video, f"{checkpoint.path} (videos)")
            _check_tower(self.video, read.vision_config, temporal, f"{checkpoint.path} (videos)")
            placeholders["video"] = Placeholder(before, read.video_token_id, after)
        self.placeholders = placeholders
        self.vllm_items = {kind: self.vllm_layout(kind) for kind in self.vllm_kinds}

    def max_tokens(self, kind: Kind) -> int:
        if kind == "image":
            return max(self.num_features(kind, grid) for grid in self._bounds(self.image))
        settings = self.video
        if settings.total_pixels is not None:  # as in `smart_resize`
            settings = replace(settings, max_pixels=max(settings.max_pixels, int(settings.min_pixels * 1.05)))
        groups = -(-settings.max_frames // (settings.temporal_patch_size * self.temporal_merge))
        return groups * max(math.prod(grid) for grid in bounding_grids(settings))

    def worst_case(self, kind: Kind) -> Data:
        if kind == "image":
            return np.zeros((*max(self._image_sizes(), key=self._image_features), 3), np.uint8)
        settings, most = self.video, self.video.max_frames
        size = max(largest(settings), key=lambda size: math.prod(smart_resize(size[0], size[1], settings, most)))
        # With the published limits, the array would take tens of gigabytes, so a single element is broadcast.
        return np.broadcast_to(np.uint8(0), (most, *size, 3))

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        kind, options = media.kind, media.options
        if kind == "image":
            plan, write = self._plan_image(data, self.image.with_options(options))
        else:
            plan, write = self._plan_video(data, self.video.with_options(options), options)
        if options.min_pixels is not None and plan.num_features > (most := self.max_tokens(kind)):
            raise LimitExceeded(
                f"with min_pixels {options.min_pixels}, the {kind} has {plan.num_features} tokens; the checkpoint's "
                f"limit is {most}. Lower min_pixels"
            )
        return plan, write

    def vllm_shape(self, kind: Kind, stated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return self.num_features(kind, stated), stated

    def vllm_layout(self, kind: Kind) -> PatchLayout:
        """Return the layout of an item's tensors in vLLM's payloads."""
        settings: PixelSettings = getattr(self, kind)
        sizes = settings.patch_size, settings.temporal_patch_size, settings.merge_size
        return PatchLayout(PIXELS[kind], GRID_KEYS[kind], *sizes)

    def _bounds(self, settings: PixelSettings) -> Iterator[tuple[int, int, int]]:
        """Yield grids that are upper bounds for the grids of images, both portrait and landscape."""
        for short, long in bounding_grids(settings):
            sides = short * settings.merge_size, long * settings.merge_size
            yield from ((1, *sides), (1, *sides[::-1]))

    def _image_sizes(self) -> Iterator[tuple[int, int]]:
        for height, width in largest(self.image):
            yield from ((height, width), (width, height))

    def _image_features(self, size: tuple[int, int]) -> int:
        height, width = (side // self.image.patch_size for side in self.image_size(*size, self.image))
        return self.num_features("image", (1, height, width))

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        name, patch_bytes = PIXELS[kind], self.image.patch_size**2 * 3 if kind == "image" else self.video.patch_bytes
        return {name: ArraySpec((math.prod(grid[:3]), patch_bytes), "uint8")}

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        is_possible = (
            len(grid) == 3 + self.further_numbers(kind, grid)
            and min(grid[:3]) > 0
            and min(grid) >= 0
            and not any(side % self.image.merge_size for side in grid[1:3])
            and not (kind == "video" and grid[0] % self.temporal_merge)
            and num_features == self.num_features(kind, grid)
        )
        return Spelling() if is_possible else None

    def num_features(self, kind: Kind, grid: tuple[int, ...]) -> int:
        """Return the feature count of an item with this kind and grid."""
        merged = self.image.merge_size**2 * (self.temporal_merge if kind == "video" else 1)
        return math.prod(grid[:3]) // merged

    def further_numbers(self, kind: Kind, grid: tuple[int, ...]) -> int:
        """Return how many numbers follow (t, h, w) in a grid of `kind`."""
        return 0

    def image_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        """Read the image preprocessor's configuration. Raise UnsupportedCheckpoint if it is not supported."""
        return PixelSettings.read(config, where)

    def video_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        """Read the video preprocessor's configuration. Raise UnsupportedCheckpoint if it is not supported."""
        return PixelSettings.read(config, where)

    def sample(self, total: int, fps: float | None, settings: PixelSettings) -> list[int]:
        """Return the ascending indices of the frames to sample from `total` frames.

        If `fps` is None and the settings have no num_frames, all frames are taken. Raise InputError if more frames are
        requested than the video has.
        """
        return sample_frames(total, fps, settings)

    def image_size(self, height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
        """Return the height and width of the resized image.

        Raise LimitExceeded if one side is more than 200 times as long as the other.
        """
        return smart_resize(height, width, settings)

    def frames(self, video: Video, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield the sampled frames before they are resized."""
        return video.decode(indices)

    def frame_size(self, video: Video, num_frames: int, settings: PixelSettings) -> tuple[int, int]:
        """Return the height and width of the resized frames. `num_frames` is the number of sampled frames.

        Raise LimitExceeded if one side is more than 200 times as long as the other.
        """
        return smart_resize(video.height, video.width, settings, num_frames=num_frames)

    def video_grid(
        self, patches: tuple[int, int, int], video: Video, indices: Sequence[int], options: MediaOptions
    ) -> tuple[int, ...]:
        """Return `Plan.grid` of a video.

        Args:
            patches: Size of the video in patches (t, h, w).
            video: The video.
            indices: Indices of the sampled frames.
            options: Options of the item.

        """
        return patches

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized patches of an item in either wire format.

        The result is float32 [patches, 3 * temporal * patch * patch].
        """
        view, kind = item.view, item.shape.kind
        settings, planar = self.image if kind == "image" else self.video, PLANES in view
        patches = to_device(view, PLANES if planar else PIXELS[kind], device)
        return settings.normalize_planes(patches) if planar else settings.normalize(patches)

    def position_ids(self, batch: Mapping[str, Tensor]) -> Tensor:
        import transformers  # the modeling code is slow to import

        model_class = getattr(transformers, self.config_name.removesuffix("Config") + "Model")
        model = model_class.__new__(model_class)
        # `get_rope_index` needs no other parts of a model, so no weights are created.
        model.__dict__ |= {"config": self.config, "spatial_merge_size": self.image.merge_size}
        axes, _ = model.get_rope_index(**self.rope_inputs(batch))
        return torch.cat([super().position_ids(batch).unsqueeze(0), axes])

    def rope_inputs(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the arguments of `get_rope_index`, which ignores other arrays of the batch."""
        return batch

    @property
    def group(self) -> int:
        """Side, in patches, of the squares whose patches are adjacent."""
        return self.image.merge_size if self.groups_patches else 1

    def _plan_image(self, data: Data, settings: PixelSettings) -> tuple[Plan, Write]:
        image = open_image(data)
        height, width = self.image_size(image.height, image.width, settings)
        patch, merge = settings.patch_size, settings.merge_size
        grid = (1, height // patch, width // patch)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            frames = _frames(arrays, "image", patch)
            patchify(resize(image.decode(), height, width), frames[:, 0], patch, self.group)
            frames[:, 1:] = frames[:, :1]
            if PLANES in arrays:
                arrays[_GRIDS["image"]][...] = grid

        plan = Plan(
            num_features=self.num_features("image", grid),
            specs=self.specs_of("image", grid),
            settings=f"image {height}x{width}, patch {patch}, merge {merge}",
            grid=grid,
            mindie_specs={
                PLANES: ArraySpec((math.prod(grid), settings.patch_bytes), "uint8"),
                _GRIDS["image"]: ArraySpec((3,), "int64"),
            },
        )
        return plan, write

    def _plan_video(self, data: Data, settings: PixelSettings, options: MediaOptions) -> tuple[Plan, Write]:
        video = open_video(data, options.sample_fps)
        check_asked(video, options)
        rate = video.fps
        if comes_sampled(video, options):
            rate, settings = None, replace(settings, num_frames=None)
        takes_all = rate is None and settings.num_frames is None and options.max_frames is None
        if takes_all and video.num_frames > settings.max_frames:
            raise LimitExceeded(
                f"the video has {video.num_frames} frames; the limit is {settings.max_frames}. Ask for fewer "
                "with num_frames or max_frames"
            )
        indices = self.sample(video.num_frames, rate, settings)
        video.count(indices)
        height, width = self.frame_size(video, len(indices), settings)
        patch, merge, temporal = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        groups = -(-len(indices) // (temporal * self.temporal_merge)) * self.temporal_merge
        grid = (groups, height // patch, width // patch)
        # If the caller supplies frames without a rate, assume that they were sampled at MindIE's default rate.
        fps = DEFAULT_FPS if video.fps is None else len(indices) / video.num_frames * video.fps

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            patches = _frames(arrays, "video", patch)
            frames = patches.reshape(groups, grid[1] * grid[2], *patches.shape[1:]).swapaxes(1, 2)
            places = [frames[divmod(index, temporal)] for index in range(groups * temporal)]
            # The frames come first, because their end shows whether the container counted them correctly.
            for frame, place in zip(self.frames(video, indices), places, strict=False):
                patchify(resize(frame, height, width), place, patch, merge)
            for place in places[len(indices) :]:
                place[...] = places[len(indices) - 1]
            if PLANES in arrays:
                arrays[_GRIDS["video"]][...] = grid
                arrays[_SECONDS][...] = temporal / fps

        specs = self.specs_of("video", grid)
        (patches,) = specs.values()
        plan = Plan(
            num_features=self.num_features("video", grid),
            specs=specs,
            settings=f"video {indices} {height}x{width}, patch {temporal} {patch}, merge {merge}",
            grid=self.video_grid(grid, video, indices, options),
            mindie_specs={
                PLANES: patches,
                _GRIDS["video"]: ArraySpec((3,), "int64"),
                _SECONDS: ArraySpec((1, 1), "float32"),
            },
        )
        return plan, write

    def images(self, arrays: Mapping[str, np.ndarray[Any, Any]], grid: tuple[int, ...]) -> list[Pixels]:
        (t, h, w), patch = grid[:3], self.image.patch_size
        return [
            unpatchify(frame, h, w, self.group)
            for name, array in arrays.items()
            if name in PIXELS.values()
            for group in array.reshape(t, h * w, -1, patch, patch, 3)
            for frame in group.transpose(1, 0, 2, 3, 4)
        ]


def _check_tower(settings: PixelSettings, vision: Any, temporal_patch_size: int, where: str) -> None:
    """Raise UnsupportedCheckpoint unless the settings produce the patches that the tower expects."""
    for name, taken in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if (value := getattr(settings, name)) != taken:
            raise UnsupportedCheckpoint(f"{where}: {name} is {value}, but the tower in config.json takes {taken}")


def _frames(arrays: Mapping[str, np.ndarray[Any, Any]], kind: Kind, patch: int) -> np.ndarray[Any, Any]:
    """Return a writable view of the patches in either wire format, [n, stored frames, patch, patch, 3]."""
    if PLANES in arrays:
        return arrays[PLANES].reshape(len(arrays[PLANES]), 3, -1, patch, patch).transpose(0, 2, 3, 4, 1)
    patches = arrays[PIXELS[kind]]
    return patches.reshape(len(patches), -1, patch, patch, 3)


class QwenModel(PretrainedModel):
    """The Qwen2-VL model, and the base class of later models.

    `module` is transformers' `Qwen2VLForConditionalGeneration`, or a class with the same parts.
    """

    traits = Traits(mindie_layouts=_MINDIE, vision_parts=("model.visual",), projector_parts=("model.visual.merger",))
    patch_projection: ClassVar[str | None] = "model.visual.patch_embed.proj"
    """Name of the tower's first layer, a convolution over patches. None if it is a linear layer."""

    def __init__(self, module: Any, spec: ModelSpec, processor: QwenProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._pixels: dict[Kind, PixelSettings] = {
            kind: getattr(processor, kind) for kind in _GRIDS if kind in processor.placeholders
        }
        self._tokens = {kind: processor.placeholders[kind].token for kind in self._pixels}
        self._merge: int = module.config.vision_config.spatial_merge_size
        self._group = processor.group
        self._temporal_merge = processor.temporal_merge
        if (name := self.patch_projection) is not None:
            module.set_submodule(name, PatchProjection(module.get_submodule(name)))

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        for kind, name in _GRIDS.items():
            if name in view:
                t, h, w = view[name].tolist()
                # MindIE's handle words for the pixels and for the grid may not belong together, because no check covers
                # both.
                expected = (t * h * w, self._pixels[kind].patch_bytes)
                if view[PLANES].shape != expected:
                    raise CorruptReference(
                        f"the segment has the shape {view[PLANES].shape}, but the grid of the {kind} needs {expected}"
                    )
                return MediaShape(kind, self._tokens[kind], t * h * w // self._merge**2, (t, h, w))
        return super().describe_segments(view)

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        spans = []
        for item in items:
            t, h, w = item.shape.grid[:3]
            t //= self._temporal_merge if item.shape.kind == "video" else 1
            spans.append((item.start, item.stop, (t, h // self._merge, w // self._merge)))
        return mrope_positions(length, spans, [self.interval(item.shape) for item in items])

    def interval(self, shape: MediaShape) -> float:
        """Return the distance in positions between two steps on the time axis of the item's grid."""
        return 1.0

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        return split_features(self.visual_features(items), items)

    def visual_features(self, items: Sequence[MediaItem]) -> Tensor:
        """Return the features of images and videos, in order."""
        features: Tensor = self.run_visual(items).pooler_output
        return features

    def run_visual(self, items: Sequence[MediaItem]) -> Any:
        """Return the output of the vision tower, whose `pooler_output` contains the features of all items in order."""
        patches = joined(map(self.normalized, items), sum(math.prod(item.shape.grid[:3]) for item in items))
        # The grids stay on the host, so that the tower derives sizes from them without waiting for the device.
        grids = torch.tensor([item.shape.grid[:3] for item in items])
        return self.call_visual(patches.to(self.spec.dtype), grids)

    def call_visual(self, patches: Tensor, grids: Tensor) -> Any:
        """Return the output of the vision tower.

        Args:
            patches: Normalized patches of all items, [patches, 3 * temporal * patch * patch].
            grids: Size of each item in patches, int64 [items, 3], on the host.

        """
        return self.module.model.visual(patches, grid_thw=grids, **self.places(grids))

    def places(self, grids: Tensor) -> dict[str, Tensor]:
        """Return the tower's keyword arguments for the positions of patches. `grids` is int64 [items, 3]."""
        from transformers.vision_utils import get_vision_position_ids  # imported late, because it is slow to import

        return {"position_ids": upload(get_vision_position_ids(grids, self._group), self.spec.device)}
