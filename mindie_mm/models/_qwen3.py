"""Processor and model of Qwen3-VL, which later Qwen models extend.

Source: arXiv 2511.21631. Token ids, grids and pixels match transformers' `qwen3_vl`. In the prompt, each
temporal patch of a video has a separate run of placeholders, preceded by its time in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import CorruptReference, FeatureCountMismatch, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.models._delta_net import replace_delta_nets
from mindie_mm.models._frame_times import FrameTimesModel, FrameTimesProcessor, spread
from mindie_mm.models._qwen import THW, QwenModel, QwenProcessor
from mindie_mm.models._qwen_pixels import PixelSettings
from mindie_mm.models._tower_places import interpolation
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Plan, Write
from mindie_mm.nn.mindie import NORMALIZED, PLANES, Joined, PromptLayout
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.vllm_items import PatchLayout
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

# Layout of the handle words that MindIE's own processor writes. Pixels are normalized, and their axes are (channel,
# time, row, column) as in transformers. As in transformers 4, only the frames of a video are enclosed in
# <|vision_start|> and <|vision_end|>, not the whole video.
_ARRAYS: Mapping[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_MINDIE = PromptLayout(
    tuple(
        Joined(kind, name, dtype)
        for kind, names in _ARRAYS.items()
        for name, dtype in zip(names, ("float32", "int32"), strict=True)
    ),
    unframed=frozenset({"video"}),
)
_VIDEO_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "patch_size": 16,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "do_sample_frames": True,
    "fps": 2,
}


class Qwen3Processor(FrameTimesProcessor):
    """Processor for Qwen3-VL. Blocks are the same as in Qwen2-VL.

    The grid of a video is (t, h, w), followed by the time of each temporal patch in tenths of a second.

    In MindIE's wire format, all images of a prompt share `pixel_values`, float32 [t * h * w, 3 * temporal * patch *
    patch], which is normalized, and `image_grid_thw`, int32 [images, 3]. Videos have `pixel_values_videos` and
    `video_grid_thw`.
    """

    traits = replace(
        QwenProcessor.traits,
        grids={"image": THW, "video": f"{THW}, and the time of each patch in tenths of a second"},
        mindie_layouts={},
        mindie_prompt_layout=_MINDIE,
    )
    video_defaults = _VIDEO_DEFAULTS

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        spelled = {"vision_start": "<|vision_start|>", "video": "<|video_pad|>", "vision_end": "<|vision_end|>"}
        self._frame = "".join(checkpoint.special_token(f"{name}_token") or text for name, text in spelled.items())

    def video_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        """Read the video preprocessor's configuration.

        `min_pixels` and `max_pixels` of the result are limits for all frames together.
        """
        if not config["do_sample_frames"]:
            raise UnsupportedCheckpoint(f"{where}: do_sample_frames is False; only True is supported")
        if config.get("num_frames") is not None and config.get("fps") is not None:
            raise UnsupportedCheckpoint(f"{where}: num_frames and fps are both set; only one of them is supported")
        settings = super().video_settings(config, where)
        self._frame_pixels: int | None = None
        if config.get("cap_pixels_per_frame"):
            self._frame_pixels = config.get("max_video_tokens", 768) * settings.factor**2
        return settings

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        plan, write_patches = super().plan(media, data, counts)
        settings = self.image if media.kind == "image" else self.video
        pixels, grids = _ARRAYS[media.kind]

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            if grids not in arrays:
                write_patches(arrays)
                return
            own = {name: np.empty(spec.shape, spec.dtype) for name, spec in plan.mindie_specs.items()}
            write_patches(own)
            arrays[pixels][...] = settings.normalize_planes(torch.from_numpy(own[PLANES])).numpy()
            arrays[grids][...] = plan.grid[:3]

        specs = {pixels: ArraySpec(plan.mindie_specs[PLANES].shape, "float32"), grids: ArraySpec((1, 3), "int32")}
        return msgspec.structs.replace(plan, mindie_specs=specs), write

    def vllm_layout(self, kind: Kind) -> PatchLayout:
        layout = super().vllm_layout(kind)
        return msgspec.structs.replace(layout, times="timestamps") if kind == "video" else layout

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        if NORMALIZED in item.view:
            return to_device(item.view, NORMALIZED, device)
        return super().normalized(item, device)

    def sample(self, total: int, fps: float | None, settings: PixelSettings) -> list[int]:
        if settings.num_frames is not None:
            wanted = settings.num_frames
        elif fps is None:
            wanted = min(total, settings.max_frames)
        elif settings.fps is not None:
            wanted = min(max(int(total / fps * settings.fps), settings.min_frames), settings.max_frames, total)
        else:
            wanted = min(max(total, settings.min_frames), settings.max_frames)
        return spread(total, wanted)

    def video_pixels(self, num_frames: int, settings: PixelSettings) -> int:
        """Return the maximum number of pixels of all frames together."""
        if self._frame_pixels is None:
            return settings.max_pixels
        share = min(self._frame_pixels, settings.max_pixels // num_frames)
        return max(share, int(settings.min_pixels * 1.05)) * num_frames

    def time_number(self, times: Sequence[float]) -> int:
        # The mean is formatted as text first, so that tenths are rounded as in the reference.
        return int(f"{(times[0] + times[-1]) / 2:.1f}".replace(".", ""))

    def frame_text(self, number: int) -> str:
        return f"<{number // 10}.{number % 10} seconds>{self._frame}"


class DeepstackModel(QwenModel):
    """A model whose decoder receives outputs of several layers of the vision tower.

    The columns of a feature are the final output of the tower, followed by the outputs of its deepstack layers.
    """

    def __init__(self, module: Any, spec: ModelSpec, processor: QwenProcessor) -> None:
        levels = len(getattr(module.config.vision_config, "deepstack_visual_indexes", ()))
        super().__init__(module, replace(spec, extra_width=levels * spec.hidden_size), processor)

    def visual_features(self, items: Sequence[MediaItem]) -> Tensor:
        out = self.run_visual(items)
        levels = getattr(out, "deepstack_features", ())  # towers without deepstack layers lack the attribute
        return torch.cat([out.pooler_output, *levels], dim=-1)

    def places(self, grids: Tensor) -> dict[str, Tensor]:
        return super().places(grids) | interpolation(self.module.model.visual, grids, self._merge, self.spec.device)

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        if extra is None:
            return super().decode(hidden, positions, paged, extra)
        everywhere = torch.ones(1, len(hidden), dtype=torch.bool, device=hidden.device)
        levels = extra.split(hidden.shape[1], dim=1)
        return self.run_text_model(
            hidden, positions, paged, visual_pos_masks=everywhere, deepstack_visual_embeds=levels
        )


class Qwen3Model(DeepstackModel, FrameTimesModel):
    """The Qwen3-VL model. `module` is transformers' `Qwen3VLForConditionalGeneration`."""

    traits = replace(
        QwenModel.traits,
        projector_parts=("model.visual.merger", "model.visual.deepstack_merger_list"),
        mindie_layouts={},
        mindie_prompt_layout=_MINDIE,
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen3Processor) -> None:
        super().__init__(module, spec, processor)
        self.media_tokens = [*self._tokens.values()]

    def segment_items(self, ids: NDArray[np.int64], view: SegmentsView, start: int) -> list[MediaItem]:
        plain = ids.copy()
        plain[start : start + _MINDIE.num_slots] = ids[start - 1]
        places = np.flatnonzero(np.isin(plain, [*self.media_tokens]))
        breaks = (np.diff(places) != 1) | (np.diff(plain[places]) != 0)
        runs = iter(np.split(places, np.flatnonzero(breaks) + 1))
        parts = {self._tokens[kind]: iter(self._parts(kind, view)) for kind in _ARRAYS}
        items: list[MediaItem] = []
        for run in runs:
            token = int(plain[run[0]])
            shape, pixels = next(parts[token], (None, None))
            if shape is None or pixels is None:
                raise FeatureCountMismatch(f"the segments have no item for the placeholders at token {run[0]}")
            num_runs = shape.grid[0] if shape.kind == "video" else 1
            own = [run, *islice(runs, num_runs - 1)]
            if [(len(each), int(plain[each[0]])) for each in own] != [
                (shape.num_features // num_runs, token)
            ] * num_runs:
                raise FeatureCountMismatch(
                    f"the {shape.kind} at token {run[0]} needs {num_runs} runs of {shape.num_features // num_runs} "
                    f"placeholder tokens; the prompt has runs of {', '.join(str(len(each)) for each in own)}"
                )
            items.append(MediaItem(np.concatenate(own), view.part({NORMALIZED: pixels}), shape))
        if left := sum(1 for rest in parts.values() for _ in rest):
            raise FeatureCountMismatch(f"the segments have {left} more items than the prompt has placeholders for")
        return items

    def _parts(self, kind: Kind, view: SegmentsView) -> Iterator[tuple[MediaShape, NDArray[np.float32]]]:
        names = _ARRAYS[kind]
        if not any(name in view for name in names):
            return
        if not all(name in view for name in names):
            raise CorruptReference(
                f"the prompt has only one of the arrays {names[0]} and {names[1]}; it must have both"
            )
        pixels, grids = (view[name] for name in names)
        rows = grids.tolist() if grids.ndim == 2 and grids.shape[1] == 3 else []
        if not rows or any(min(row) < 1 or row[1] % self._merge or row[2] % self._merge for row in rows):
            raise CorruptReference(
                f"{names[1]} has the shape {grids.shape} or invalid values; its rows must be t, h, w in patches"
            )
        counts = [math.prod(row) for row in rows]
        if pixels.shape != (expected := (sum(counts), self._pixels[kind].patch_bytes)):
            raise CorruptReference(f"{names[0]} has the shape {pixels.shape}, but {names[1]} needs {expected}")
        for row, count, stop in zip(rows, counts, accumulate(counts), strict=True):
            shape = MediaShape(kind, self._tokens[kind], count // self._merge**2, tuple(row))
            yield shape, pixels[stop - count : stop]


class Qwen3DeltaNetModel(Qwen3Model):
    """A model whose decoder alternates gated delta-net layers with full attention, and whose tower has one output."""

    traits = replace(Qwen3Model.traits, projector_parts=("model.visual.merger",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen3Processor) -> None:
        super().__init__(module, spec, processor)
        replace_delta_nets(self.text_model.layers)
