"""Processor and model of MiniCPM-V 4.6, which MiniCPM-V 4.7 extends.

Token ids and pixels match transformers' `minicpmv4_6`. An image is a thumbnail, followed by slices of a larger version
of the image if it has many pixels. Each keeps its proportions. The tower merges patches twice, first within windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media, MediaOptions
from mindie_mm.media.image.encoded_image import Data, Pixels, open_image
from mindie_mm.media.image.patches import unpatchify
from mindie_mm.media.video.encoded_video import Video, open_video
from mindie_mm.media.video.frames import check_asked, comes_sampled, num_taken
from mindie_mm.models._delta_net import replace_delta_nets
from mindie_mm.models._frame_times import spread
from mindie_mm.models._minicpmv4_6_crops import WINDOW, Crops, Slicing, largest
from mindie_mm.models._qwen_pixels import check_aspect_ratio
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.layers import PatchProjection
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import PIXELS, Item
from mindie_mm.nn.pixels import HALF, joined, normalize_patches
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "image_mean": HALF,
    "image_std": HALF,
    "rescale_factor": 1 / 255,
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
    "max_num_frames": 128,
    "stack_frames": 1,
}
_TOKENS = ("image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end")
_SIZES: Mapping[Kind, str] = {"image": "target_sizes", "video": "target_sizes_videos"}
"""Names of the sizes of crops in transformers."""
_GRID = "the numbers of frames, of rows and of columns of slices, and the size in patches of a thumbnail and a slice"


class MiniCPMVProcessor(Processor):
    """Processor for MiniCPM-V 4.6.

    The block of an item contains `pixel_values`, uint8 [patches, patch * patch * 3]: for each frame the patches of the
    thumbnail and of each slice. The grid is (frames, rows, columns, height, width, height, width), where the heights
    and widths are those of a thumbnail and of a slice, in patches. An image is one frame.
    """

    traits = Traits(
        grids={"image": _GRID, "video": _GRID}, not_packed="its layers carry a state from each sample to the next"
    )
    config_name: ClassVar[str]
    numbers_videos: ClassVar[bool] = True
    """True if videos are numbered in the prompt, as images are."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config(self.config_name, checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        image = checkpoint.preprocessor("image", {"MiniCPMV4_6ImageProcessor": _DEFAULTS})
        video = checkpoint.preprocessor("video", {"MiniCPMV4_6VideoProcessor": _DEFAULTS})
        self.settings: dict[Kind, Slicing] = {
            "image": Slicing.read(image, config.downsample_mode, f"{where} (images)"),
            "video": Slicing.read(video, config.downsample_mode, f"{where} (videos)"),
        }
        for settings in self.settings.values():
            if settings.patch != config.vision_config.patch_size:
                raise UnsupportedCheckpoint(
                    f"{where}: patch_size is {settings.patch}, but the tower in config.json takes "
                    f"{config.vision_config.patch_size}"
                )
        self._max_frames: int = video["max_num_frames"]
        self._texts = {name: checkpoint.require_special_token(f"{name}_token") for name in _TOKENS}
        self._numbers = bool(image["use_image_id"])
        self.placeholders = {}
        self._markers: dict[Kind, str] = {}
        for kind in ("image", "video"):
            self._markers[kind] = checkpoint.require_special_token(f"{kind}_token")
            token, stated = checkpoint.token_id(self._markers[kind]), getattr(config, f"{kind}_token_id")
            if token != stated:
                raise UnsupportedCheckpoint(
                    f"{where}: {kind}_token_id is {stated}, but the tokenizer's id of {self._markers[kind]!r} is "
                    f"{token}"
                )
            self.placeholders[kind] = Placeholder((), token, ())

    def max_tokens(self, kind: Kind) -> int:
        settings = self.settings[kind]
        frames = self._max_frames if kind == "video" else 1
        return frames * settings.crops(*largest(settings)).num_patches // settings.merge**2

    def worst_case(self, kind: Kind) -> Data:
        shape = (*largest(self.settings[kind]), 3)
        # All frames of the video together would take hundreds of megabytes, so a single element is broadcast.
        return np.broadcast_to(np.uint8(0), shape if kind == "image" else (self._max_frames, *shape))

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if not self._is_possible(kind, num_features, grid):
            return None
        frames, crops, area = grid[0], Crops.of(grid), self.settings[kind].merge ** 2
        marker, texts = self._markers[kind], self._texts
        part = f"{texts['slice_start']}{marker}{texts['slice_end']}"
        frame = f"{texts['image_start']}{marker}{texts['image_end']}" + "\n".join([part * crops.columns] * crops.rows)
        token = self.placeholders[kind].token
        runs = [(token,) * (height * width // area) for height, width in crops.sizes]
        is_numbered = self._numbers and (kind == "image" or self.numbers_videos)
        number = (texts["image_id_start"], texts["image_id_end"]) if is_numbered else None
        return Spelling(frame * frames, runs * frames, number=number)

    def _is_possible(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> bool:
        """Return whether an item can have these features and this grid."""
        if len(grid) != 7 or min(grid) < 0 or not 1 <= grid[0] <= (self._max_frames if kind == "video" else 1):
            return False
        settings, crops = self.settings[kind], Crops.of(grid)
        sliced = crops.rows, crops.columns, *crops.slice
        if any(sliced) != all(sliced) or not 0 <= crops.rows * crops.columns <= settings.max_slices:
            return False
        if min(crops.thumbnail) < 1 or any(side % settings.merge for side in (*crops.thumbnail, *crops.slice)):
            return False
        return grid[0] * crops.num_patches == num_features * settings.merge**2

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        patch_bytes = 3 * self.settings[kind].patch ** 2
        return {"pixel_values": ArraySpec((grid[0] * Crops.of(grid).num_patches, patch_bytes), "uint8")}

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized patches of an item, float32 [patches, 3 * patch * patch]."""
        settings = self.settings[item.shape.kind]
        patches = to_device(item.view, "pixel_values", device)
        return normalize_patches(patches, settings.mean, settings.std, settings.rescale_factor)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        kind, patch, group = item.shape.kind, self.settings["image"].patch, self.settings["image"].group
        sizes = Crops.of(item.shape.grid).sizes * item.shape.grid[0]
        patches = self.normalized(item, device).unflatten(1, (3, patch, patch))
        rows = [
            # The reference has the patches row by row. In a block, those of a window are adjacent.
            part.unflatten(0, (height // group, width // group, group, group)).transpose(1, 2).flatten(0, 3)
            for (height, width), part in zip(sizes, patches.split([h * w for h, w in sizes]), strict=True)
        ]
        pixels = torch.cat(rows).permute(1, 2, 0, 3).flatten(2).unsqueeze(0)  # [1, 3, patch, patches * patch]
        return {PIXELS[kind]: pixels, _SIZES[kind]: torch.tensor(sizes, dtype=torch.int32)}

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.cat([array for arrays in prompts for array in arrays], -1 if name in PIXELS.values() else 0)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        settings = self.settings[media.kind]
        if media.kind == "image":
            image = open_image(data)
            crops, frames, shown = self._crops(media.kind, image.height, image.width), 1, "an image"
        else:
            video = open_video(data, media.options.sample_fps)
            indices = self._sample(video, media.options)
            video.count(indices)
            crops, frames, shown = self._crops(media.kind, video.height, video.width), len(indices), f"frames {indices}"

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            decoded = [image.decode()] if media.kind == "image" else video.decode(indices)
            parts = arrays["pixel_values"].reshape(frames, crops.num_patches, -1)
            for frame, part in zip(decoded, parts, strict=True):
                settings.write(frame, crops, part)

        grid = (frames, *crops.grid)
        specs = self.specs_of(media.kind, grid)
        num_features = frames * crops.num_patches // settings.merge**2
        return Plan(num_features, specs, f"{shown}, {crops}, {settings}", grid), write

    def _crops(self, kind: Kind, height: int, width: int) -> Crops:
        check_aspect_ratio(height, width)
        return self.settings[kind].crops(height, width)

    def _sample(self, video: Video, options: MediaOptions) -> list[int]:
        """Return the ascending indices of the sampled frames.

        If the caller supplies frames, all of them are taken unless the options ask for fewer.
        """
        check_asked(video, options)
        total, fps, limit = video.num_frames, video.fps, self._max_frames
        if fps is None or comes_sampled(video, options) or options.num_frames is not None:
            return spread(total, num_taken(total, video, options, limit))
        seconds = total / fps
        if options.fps is not None:
            times = [index / options.fps for index in range(math.ceil(seconds * options.fps))]
        elif seconds > limit:
            times = [round(index * 0.1, 1) for index in range(int(seconds / 0.1))]
            times = [times[index] for index in np.linspace(0, len(times) - 1, limit, dtype=int)]
        else:
            times = [float(index) for index in range(math.ceil(seconds))]
        indices = [min(int(time * fps), total - 1) for time in times]
        if options.fps is None and options.min_frames is None and options.max_frames is None:
            return indices
        count = num_taken(len(indices), video, options, limit)
        return indices if count == len(indices) else spread(total, count)

    def images(self, arrays: Mapping[str, np.ndarray[Any, Any]], grid: tuple[int, ...]) -> list[Pixels]:
        settings = self.settings["image"]
        if (array := arrays.get("pixel_values")) is None:
            return []
        patches, start, shown = array.reshape(len(array), settings.patch, settings.patch, 3), 0, []
        for height, width in Crops.of(grid).sizes * grid[0]:
            shown.append(unpatchify(patches[start : start + height * width], height, width, settings.group))
            start += height * width
        return shown


class MiniCPMVModel(PretrainedModel):
    """The MiniCPM-V 4.6 model. `module` is transformers' `MiniCPMV4_6ForConditionalGeneration`."""

    traits = Traits(
        vision_parts=tuple(
            f"model.vision_tower.{part}" for part in ("embeddings", "encoder.layers", "vit_merger", "post_layernorm")
        ),
        projector_parts=("model.merger",),
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: MiniCPMVProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._settings = processor.settings
        tower = module.model.vision_tower
        tower.embeddings.patch_embedding = _PatchEmbedding(tower.embeddings.patch_embedding)
        tower.vit_merger = _WindowMerger(tower.vit_merger)
        replace_delta_nets(self.text_model.layers)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        grids = [item.shape.grid for item in items]
        sizes = torch.tensor([size for grid in grids for size in Crops.of(grid).sizes * grid[0]])
        patches = joined(map(self.normalized, items), int(sizes.prod(1).sum()))
        hidden, sizes = self._encode(patches.to(self.spec.dtype), sizes)
        return split_features(torch.cat(self.module.model.merger(hidden, sizes)), items)

    def _encode(self, patches: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Run the tower on patches, [n, 3 * patch * patch], of crops whose heights and widths are `sizes` [crops, 2].

        The sizes stay on the host, so that the tower splits its attention without waiting for the device. Return the
        output, [1, n, width], and its sizes.
        """
        tower, settings = self.module.model.vision_tower, self._settings["image"]
        places = upload(self._places(sizes, tower.embeddings.num_patches_per_side), self.spec.device)
        planes = patches.view(len(patches), 3, settings.patch, settings.patch)
        hidden = tower.embeddings(planes, position_ids=places)
        bounds = _bounds(sizes)
        for index, layer in enumerate(tower.encoder.layers):
            hidden = layer(hidden, attention_mask=None, cu_seqlens=bounds, max_seqlen=None)
            if settings.group > 1 and index == tower.config.insert_layer_id:
                hidden, sizes = tower.vit_merger(hidden), sizes // WINDOW
                bounds = _bounds(sizes)
        return tower.post_layernorm(hidden), sizes

    def _places(self, sizes: Tensor, side: int) -> Tensor:
        """Return the index in the table of position embeddings of each patch, in the order of the block."""
        from transformers.vision_utils import get_vision_nearest_position_ids  # imported late, because it is slow

        group, parts = self._settings["image"].group, []
        rows = get_vision_nearest_position_ids(sizes, side).split(sizes.prod(1).tolist())
        for (height, width), part in zip(sizes.tolist(), rows, strict=True):
            parts.append(part.view(height // group, group, width // group, group).transpose(1, 2).flatten())
        return torch.cat(parts)


def _bounds(sizes: Tensor) -> Tensor:
    """Return the bounds of the crops in their concatenated patches, int64 [crops + 1]."""
    return nn.functional.pad(sizes.prod(1).cumsum(0), (1, 0))


class _PatchEmbedding(PatchProjection):
    """The patch embedding of the tower, whose output has the layout of a convolution over one row of patches."""

    def forward(self, patches: Tensor) -> Tensor:
        """Project patches [n, 3, patch, patch] to [1, width, 1, n]."""
        projected: Tensor = super().forward(patches)
        return projected.t()[None, :, None]


class _WindowMerger(nn.Module):
    """Attention within windows of adjacent patches. Each window then becomes one patch.

    transformers calls its attention once for each window.
    """

    def __init__(self, merger: Any) -> None:
        super().__init__()
        self.self_attn, self.layer_norm1, self.pre_norm = merger.self_attn, merger.layer_norm1, merger.pre_norm
        self.linear_1, self.act, self.linear_2 = merger.linear_1, merger.act, merger.linear_2

    def forward(self, hidden: Tensor) -> Tensor:
        """Merge patches [1, n, width], in which those of a window are adjacent, into [1, n / 4, width]."""
        own = self.self_attn
        windows = hidden.view(-1, WINDOW**2, hidden.shape[-1])
        normed = self.layer_norm1(windows)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        windows = windows + own.out_proj(attended.transpose(1, 2).flatten(2))
        merged: Tensor = self.linear_2(self.act(self.linear_1(self.pre_norm(windows.flatten(1)))))
        merged += windows.mean(dim=1)
        return merged.unsqueeze(0)
