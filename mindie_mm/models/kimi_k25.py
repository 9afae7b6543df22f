"""Kimi K2.5 and K2.6: the MoonViT-3D tower, and a decoder with latent attention and a mixture of experts.

Source: arXiv 2602.02276. Token ids, grids and pixels match transformers' `kimi_k25`. An image is never enlarged, and is
padded to whole tokens. Up to four frames of a video are a chunk: the tower attends within a chunk, and the features
are the mean over its frames. In the prompt, each chunk is a separate run of placeholders, preceded by its time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, Pixels, open_image, resize
from mindie_mm.media.image.patches import patchify, unpatchify
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.video.frames import Sampling, evenly
from mindie_mm.models._kimi_k25_original import IMAGES, MODEL_TYPE, VIDEOS, original_tokenizer, translate
from mindie_mm.models._kimi_k25_tower import Tower
from mindie_mm.models._latent_attention import latent_layer, replace_latent_attention
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import PIXELS, Item
from mindie_mm.nn.pixels import HALF, joined, normalize_patches
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_PIXELS = "pixel_values"
_UNSTATED_FPS = 24.0
"""Frame rate that the reference assumes for frames without a rate."""
_DAY_MS = 24 * 60 * 60 * 1000
_DEFAULTS: Mapping[str, Any] = {
    "do_resize": True,
    "resample": 3,
    "size": {"max_height": 512, "max_width": 512},
    "max_patches": 16384,
    "image_mean": HALF,
    "image_std": HALF,
    "patch_size": 14,
    "merge_size": 2,
}
_VIDEO_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "max_patches": 4096,
    "temporal_patch_size": 4,
    "fps": 2,
    "do_sample_frames": True,
}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Limits on the size of images or of frames, in patches."""

    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Side in patches of the square that becomes one token."""
    most: int
    """Maximum number of patches, before the padding."""
    longest: int
    """Maximum number of patches along a side."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float

    @classmethod
    def read(cls, settings: Mapping[str, Any], vision: Any, where: str) -> _Sizes:
        """Read the settings of a preprocessor. Raise UnsupportedCheckpoint if they are not supported."""
        needed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
        merge = settings["merge_size"]
        tower = {"patch_size": vision.patch_size, "merge_size": vision.merge_kernel_size[0]}
        check_settings(settings, {**needed, **tower}, where)
        size = settings["size"]
        height, width = (size.get(name) if isinstance(size, Mapping) else None for name in ("max_height", "max_width"))
        if height is None or height != width:
            raise UnsupportedCheckpoint(f"{where}: size={size!r} must have max_height and an equal max_width")
        return cls(
            patch=settings["patch_size"],
            merge=merge,
            most=settings["max_patches"],
            longest=height,
            mean=tuple(settings["image_mean"]),
            std=tuple(settings["image_std"]),
            rescale_factor=settings.get("rescale_factor", 1 / 255),
        )

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the resized image before padding, in pixels."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        side = self.longest * self.patch
        scale = min(1.0, math.sqrt(self.most / patches), side / height, side / width)
        return min(max(1, int(height * scale)), side), min(max(1, int(width * scale)), side)

    def padded(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of a resized image with its padding."""
        factor = self.patch * self.merge
        return -(-height // factor) * self.merge, -(-width // factor) * self.merge

    def tokens(self, height: int, width: int) -> int:
        """Return the number of features of an image or a chunk of this size."""
        return math.prod(self.padded(*self.resized(height, width))) // self.merge**2

    def largest(self) -> tuple[int, int]:
        """Return the height and width with the most features.

        The limit on patches applies before the padding, and ignores incomplete patches. The padding therefore adds most
        if the sides are a pixel short of a further patch, and if the scaled height is a pixel longer than whole tokens.
        """
        sizes: list[tuple[int, int]] = []
        for rows in range(1, self.longest + 1):
            height = (rows + 1) * self.patch - 1
            least = ((self.padded(height, 1)[0] - self.merge) * self.patch + 1) / height  # scale with the same padding
            for columns in (self.most // rows, int(self.most / (rows * least**2))):
                width = max(1, min(columns, int(self.longest / least))) * self.patch
                sizes += [(height, width), (height, width + self.patch - 1)]
        return max(sizes, key=lambda size: self.tokens(*size))


class KimiProcessor(Processor):
    """Processor for Kimi K2.5.

    A block contains `pixel_values`, uint8 [t * h * w, patch * patch * 3], row by row. The grid is (t, h, w): the number
    of frames, and of patches along height and width. The grid of a video continues with the time of each chunk in
    milliseconds.
    """

    traits = Traits(
        grids={"video": "the numbers of frames and of patches along height and width, and each chunk's time in ms"}
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = translate(checkpoint)
        config = read_config("Kimi_K25Config", checkpoint)
        text, vision = config.get_text_config(), config.vision_config
        self.feature_width = text.hidden_size
        where = str(checkpoint.path)
        _check_tower(config, where)
        image = checkpoint.preprocessor("image", {IMAGES: _DEFAULTS})
        video = checkpoint.preprocessor("video", {VIDEOS: _VIDEO_DEFAULTS})
        self.sizes: Mapping[Kind, _Sizes] = {
            "image": _Sizes.read(image, vision, f"{where} (images)"),
            "video": _Sizes.read(video, vision, f"{where} (videos)"),
        }
        self.chunk: int = video["temporal_patch_size"]
        """Maximum number of frames in a chunk."""
        if self.chunk > vision.pos_emb_time:
            raise UnsupportedCheckpoint(
                f"{where} (videos): temporal_patch_size is {self.chunk}; the tower in config.json takes at most "
                f"{vision.pos_emb_time} frames (pos_emb_time)"
            )
        self._largest = {kind: sizes.largest() for kind, sizes in self.sizes.items()}
        chunk_tokens = self.sizes["video"].tokens(*self._largest["video"])
        self._sampling = Sampling.read(video, max(1, context_length(text) // chunk_tokens) * self.chunk)
        spelled = {kind: checkpoint.special_token(f"{kind}_token") or text for kind, text in _TOKENS.items()}
        token, marker = config.video_token_id, None
        if token >= text.vocab_size:  # as in published checkpoints, in which features of videos replace image tokens
            token, marker = config.image_token_id, spelled["video"]
            spelled["video"] = spelled["image"]
        self._framed: Mapping[Kind, str] = {
            kind: f"<|media_begin|>{kind}<|media_content|>{spelled[kind]}<|media_end|>" for kind in _TOKENS
        }
        frame = tuple(checkpoint.token_id(f"<|media_{name}|>") for name in ("begin", "content", "end"))
        self.placeholders = {
            "image": Placeholder((), config.image_token_id, (), self._framed["image"], control_ids=frame),
            "video": Placeholder((), token, (), marker, control_ids=frame),
        }

    def max_tokens(self, kind: Kind) -> int:
        tokens = self.sizes[kind].tokens(*self._largest[kind])
        return tokens if kind == "image" else tokens * (self._sampling.limit // self.chunk)

    def worst_case(self, kind: Kind) -> Data:
        # The frames would take gigabytes, so a single element is broadcast.
        frames = () if kind == "image" else (self._sampling.limit,)
        return np.broadcast_to(np.uint8(0), (*frames, *self._largest[kind], 3))

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if kind == "image":
            is_given = not grid and num_features <= self.max_tokens(kind)  # embeddings
            is_image = len(grid) == 3 and grid[0] == 1 and self._features(kind, grid) == num_features
            return Spelling(self._framed[kind]) if is_given or is_image else None
        if len(grid) < 4 or self._features(kind, grid) != num_features or len(grid) != 3 + self._chunks(grid):
            return None
        times = grid[3:]
        run = (self.placeholders[kind].token,) * (num_features // len(times))
        return Spelling("".join(_time(number) + self._framed[kind] for number in times), [run] * len(times))

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {_PIXELS: ArraySpec((math.prod(grid[:3]), self.sizes[kind].patch ** 2 * 3), "uint8")} if grid else {}

    def _chunks(self, grid: tuple[int, ...]) -> int:
        return -(-grid[0] // self.chunk)

    def _features(self, kind: Kind, grid: tuple[int, ...]) -> int:
        """Return the number of features of an item with this grid, or 0 if no item can have it."""
        _, rows, columns = grid[:3]
        merge = self.sizes[kind].merge
        is_possible = min(grid) >= 0 and not rows % merge and not columns % merge
        return self._chunks(grid) * rows * columns // merge**2 if is_possible else 0

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind == "image":
            image = open_image(data)
            return self._planned("image", image.height, image.width, [0], (), lambda: [image.decode()])
        video = open_video(data, media.options.sample_fps)
        count = self._sampling.count(video, media.options)
        indices = evenly(video.num_frames, count)
        video.count(indices)
        fps = video.fps or _UNSTATED_FPS
        times = tuple(_milliseconds(index / fps) for index in indices[:: self.chunk])
        return self._planned("video", video.height, video.width, indices, times, lambda: video.decode(indices))

    def _planned(
        self,
        kind: Kind,
        height: int,
        width: int,
        indices: Sequence[int],
        times: tuple[int, ...],
        frames: Any,
    ) -> tuple[Plan, Write]:
        sizes = self.sizes[kind]
        resized = sizes.resized(height, width)
        rows, columns = sizes.padded(*resized)
        grid = (len(indices), rows, columns, *times)

        def write(arrays: Mapping[str, NDArray[Any]]) -> None:
            canvas = np.zeros((rows * sizes.patch, columns * sizes.patch, 3), np.uint8)
            patches = arrays[_PIXELS].reshape(len(indices), rows * columns, sizes.patch, sizes.patch, 3)
            for own, frame in zip(patches, frames(), strict=True):
                canvas[: resized[0], : resized[1]] = resize(frame, *resized)
                patchify(canvas, own, sizes.patch, 1)

        plan = Plan(
            num_features=self._features(kind, grid),
            specs=self.specs_of(kind, grid),
            settings=f"{kind} {[*indices]} {resized} in {rows}x{columns} patches of {sizes.patch}",
            grid=grid,
        )
        return plan, write

    def chunks_of(self, grid: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Return the size of each chunk of an item in frames and in patches along height and width."""
        frames, rows, columns = grid[:3]
        return [(min(self.chunk, frames - start), rows, columns) for start in range(0, frames, self.chunk)]

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized patches of an item, float32 [t * h * w, 3 * patch * patch]."""
        sizes = self.sizes[item.shape.kind]
        patches = to_device(item.view, _PIXELS, device)
        return normalize_patches(patches, sizes.mean, sizes.std, sizes.rescale_factor)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        kind, patch = item.shape.kind, self.sizes[item.shape.kind].patch
        return {
            PIXELS[kind]: self.normalized(item, device).unflatten(1, (3, patch, patch)),
            f"{kind}_grid_thw": torch.tensor(self.chunks_of(item.shape.grid)),
        }

    def images(self, arrays: Mapping[str, NDArray[Any]], grid: tuple[int, ...]) -> list[Pixels]:
        (frames, rows, columns), patch = grid[:3], self.sizes["image"].patch
        if not frames:
            return []
        stored = arrays[_PIXELS].reshape(frames, rows * columns, patch, patch, 3)
        return [unpatchify(patches, rows, columns, 1) for patches in stored]


_TOKENS: Mapping[Kind, str] = {"image": "<|media_pad|>", "video": "<|kimi_k25_video_placeholder|>"}
"""Placeholder tokens, unless tokenizer_config.json states others."""


def _check_tower(config: Any, where: str) -> None:
    """Raise UnsupportedCheckpoint unless the parts of the model fit each other."""
    vision = config.vision_config
    for name, (first, second) in {
        "vision_config.merge_kernel_size": tuple(vision.merge_kernel_size),
        "vision_config.pos_emb_height and pos_emb_width": (vision.pos_emb_height, vision.pos_emb_width),
        "projection_hidden_size and vision_config.hidden_size": (config.projection_hidden_size, vision.hidden_size),
    }.items():
        if first != second:
            raise UnsupportedCheckpoint(f"{where}: {name} is {first} and {second}; both must be equal")


def _milliseconds(seconds: float) -> int:
    """Return a time in milliseconds, rounded down as in the reference, which drops whole days."""
    return int(seconds) * 1000 % _DAY_MS + int(seconds % 1 * 1000)


def _time(milliseconds: int) -> str:
    """Return a time as text, hours first."""
    seconds, rest = divmod(milliseconds % _DAY_MS, 1000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{rest:03d}"


class KimiModel(PretrainedModel):
    """The Kimi K2.5 model. `module` is transformers' `Kimi_K25ForConditionalGeneration`."""

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.mm_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: KimiProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._chunks_of = processor.chunks_of
        replace_latent_attention(self.text_model.layers)
        module.model.vision_tower = Tower(module.model.vision_tower)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        patches = joined(map(self.normalized, items), sum(math.prod(item.shape.grid[:3]) for item in items))
        chunks = [chunk for item in items for chunk in self._chunks_of(item.shape.grid)]
        # The sizes stay on the host, so that the tower splits its rows without waiting for the device.
        pooled = self.module.model.vision_tower(patches.to(self.spec.dtype), torch.tensor(chunks))
        return split_features(self.module.model.mm_projector(pooled).squeeze(1), items)


class KimiK25(PretrainedFamily):
    """Kimi K2.5 and K2.6 (Kimi Team, 2026, arXiv 2602.02276), run by transformers' modules."""

    model_types = (MODEL_TYPE,)
    published = "moonshotai/Kimi-K2.5"
    kinds = ("image", "video")
    processor = KimiProcessor
    module_name = "Kimi_K25ForConditionalGeneration"
    model_class = KimiModel
    states = {"full_attention": lambda text: latent_layer(text.to_dict())}  # noqa: RUF012 - declared in the base class
    other_keys = (
        *words("vision_start_token_id vision_end_token_id"),  # the texts of these tokens are fixed
        *words("text_config.aux_loss_alpha text_config.ep_size text_config.seq_aux"),  # for training
        "vision_config.text_hidden_size",  # repeats the width of the decoder
    )

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return translate(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        return super().tokenizer(checkpoint) if checkpoint.has("tokenizer.json") else original_tokenizer(checkpoint)
