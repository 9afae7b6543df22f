"""ERNIE-4.5-VL: separate experts for text and for media, and the time drawn on each frame of a video.

Source: the ERNIE 4.5 technical report (Baidu, 2025). Token ids, grids and pixels match transformers' `ernie4_5_vl_moe`.
The tower merges pairs of frames. Each frame has its own patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, Pixels
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.media.video.encoded_video import Video
from mindie_mm.media.video.frames import stepped
from mindie_mm.models._qwen import QwenModel, QwenProcessor
from mindie_mm.models._qwen_pixels import PixelSettings
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import TOKEN_TYPES, Item
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import Splice
from mindie_mm.nn.weights.pretrained import read_config

_IMAGE_DEFAULTS: Mapping[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177}}
_VIDEO_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 299 * 28 * 28, "longest_edge": 1196 * 28 * 28},
    "min_frames": 16,
    "max_frames": 180,
    "temporal_patch_size": 2,
    "do_sample_frames": True,
    "draw_on_frames": True,
    "font": "Roboto-Regular.ttf",
}
_UNSTATED_FPS = 24.0
_TEXT_SIZE = 0.1
"""Size of the letters relative to the shorter side of a frame, and of their border relative to the letters."""


class ErnieProcessor(QwenProcessor):
    """Processor for ERNIE-4.5-VL. Blocks are the same as in Qwen2-VL, with patches of a single frame."""

    traits = replace(QwenProcessor.traits, mindie_layouts={}, needs_ids=True)
    config_name = "Ernie4_5_VLMoeConfig"
    # The second name is the first one in transformers 5.0.
    image_types = ("Ernie4_5_VLMoeImageProcessor", "Ernie4_5_VL_MoeImageProcessor")
    image_defaults = _IMAGE_DEFAULTS
    video_types = ("Ernie4_5_VLMoeVideoProcessor", "Ernie4_5_VL_MoeVideoProcessor")
    video_defaults = _VIDEO_DEFAULTS
    temporal_merge = 2

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = read_config(self.config_name, checkpoint)
        self.placeholders = {
            "image": Placeholder((config.image_start_token_id,), config.image_token_id, (config.image_end_token_id,)),
            "video": Placeholder((config.video_start_token_id,), config.video_token_id, (config.video_end_token_id,)),
        }
        self._font = checkpoint.binary(self._font_file) if self._font_file else None
        if self._font:
            try:
                ImageFont.truetype(BytesIO(self._font))
            except OSError as error:
                raise UnsupportedCheckpoint(
                    f"{checkpoint.path / self._font_file} is not a font: {error}. Copy it from the original repository"
                ) from error

    def image_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        return super().image_settings({**config, "temporal_patch_size": 1}, where)

    def video_settings(self, config: Mapping[str, Any], where: str) -> PixelSettings:
        check_settings(config, {"do_sample_frames": True, "temporal_patch_size": self.temporal_merge}, where)
        self._font_file = PurePath(config["font"]).name if config["draw_on_frames"] else ""
        # The reference calls the number of merged frames temporal_patch_size. Patches have a single frame.
        return super().video_settings({**config, "temporal_patch_size": 1}, where)

    def token_inputs(self, ids: NDArray[np.int64], items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the arrays with one entry per token. The mixtures take the tokens around an item for its tokens."""
        inputs = super().token_inputs(ids, items)
        types = inputs["mm_token_type_ids"].clone()
        for kind, one in self.placeholders.items():
            types[np.isin(ids, [*one.before, *one.after])] = TOKEN_TYPES[kind]
        return inputs | {"moe_mm_token_type_ids": types}

    def sample(self, total: int, fps: float | None, settings: PixelSettings) -> list[int]:
        if settings.num_frames is not None:
            return stepped(total, min(settings.num_frames, total))
        count = total if fps is None or settings.fps is None else total / fps * settings.fps
        return stepped(total, min(max(count, settings.min_frames), settings.max_frames, total))

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        plan, write = super().plan(media, data, counts)
        if media.kind == "video":
            drawn = f"{plan.settings}, {self._font_file} at {media.options.sample_fps}"
            plan = msgspec.structs.replace(plan, settings=drawn)
        return plan, write

    def frame_size(self, video: Video, num_frames: int, settings: PixelSettings) -> tuple[int, int]:
        size = super().frame_size(video, num_frames, settings)
        if self._font and not _letter_size(video.height, video.width):
            raise LimitExceeded(
                f"the video has {video.width}x{video.height} pixels; this model draws the time on each frame, whose "
                f"shorter side must have at least {round(1 / _TEXT_SIZE)} pixels"
            )
        return size

    def frames(self, video: Video, indices: Sequence[int]) -> Iterator[Pixels]:
        decoded = super().frames(video, indices)
        if not self._font:
            yield from decoded
            return
        font = ImageFont.truetype(BytesIO(self._font), _letter_size(video.height, video.width))
        for index, frame in zip(indices, decoded, strict=True):
            yield _drawn(frame, f"time: {_clock(index / (video.fps or _UNSTATED_FPS))}", font)


def _letter_size(height: int, width: int) -> int:
    return int(min(height, width) * _TEXT_SIZE)


def _clock(time_s: float) -> str:
    """Return hours, minutes and seconds, computed as in the reference."""
    return f"{int(time_s // 3600):02d}:{int(time_s % 3600 // 60):02d}:{time_s % 3600 % 60:05.02f}"


def _drawn(frame: Pixels, text: str, font: ImageFont.FreeTypeFont) -> Pixels:
    """Return a frame with black letters in its upper left corner. The letters have a white border."""
    image = Image.fromarray(frame)
    border = int(font.size * _TEXT_SIZE)
    ImageDraw.Draw(image).text(
        (0, 0), text, font=font, fill=(0, 0, 0), stroke_width=border, stroke_fill=(255, 255, 255)
    )
    return np.asarray(image)


class ErnieModel(QwenModel):
    """The ERNIE-4.5-VL model. `module` is transformers' `Ernie4_5_VLMoeForConditionalGeneration`."""

    traits = replace(
        QwenModel.traits,
        mindie_layouts={},
        needs_ids=True,
        vision_parts=("model.vision_tower",),
        projector_parts=("model.resampler_model",),
    )
    patch_projection = None

    def __init__(self, module: Any, spec: ModelSpec, processor: ErnieProcessor) -> None:
        super().__init__(module, spec, processor)
        replace_mixtures(self.text_model.layers)
        is_media = torch.zeros(self.text_model.config.vocab_size, dtype=torch.bool)
        for one in processor.placeholders.values():
            is_media[[*one.before, one.token, *one.after]] = True
        self._is_media = is_media.to(spec.device)

    def layer_inputs(self, input_ids: Tensor, hidden: Tensor, splices: Sequence[Splice]) -> Tensor | None:
        """Return whether each token belongs to a media item, [T, 1]. The tokens before and after an item belong to it.

        This includes generated tokens with these ids, so that they do not depend on preemption. The reference treats
        them as text. A trained model does not generate them.
        """
        return self._is_media.index_select(0, input_ids).unsqueeze(1)

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        assert extra is not None
        return self.run_text_model(hidden, positions, paged, moe_mm_token_type_ids=extra.t())

    def call_visual(self, patches: Tensor, grids: Tensor) -> Any:
        out = self.module.model.vision_tower(patches, grid_thw=grids, **self.places(grids))
        out.pooler_output = self.module.model.resampler_model(out.last_hidden_state, grids)
        return out


def replace_mixtures(layers: Iterable[Any]) -> None:
    """Let each layer choose between experts for text and for media without waiting for the device.

    Experts that `nn/experts.py` has not arranged keep transformers' implementation.
    """
    for layer in layers:
        parts = [part for name in ("text_moe", "vision_moe") if (part := getattr(layer.mlp, name, None)) is not None]
        if parts and all(hasattr(part.experts, "arranged") for part in parts):
            for part in parts:
                # With a first expert, rows may choose experts that are not there, whose outputs are zeros.
                arranged = part.experts.arranged
                arranged.start = arranged.start or 0
            layer.mlp.forward = partial(_mixed, layer.mlp)


def _mixed(mixture: Any, hidden: Tensor, is_media: Tensor | None = None) -> tuple[Tensor, None]:
    """Run a mixture of experts with the signature of transformers' `Ernie4_5_VLMoeMoeBlock`.

    Args:
        mixture: The block, with a router and experts for text, others for media, and possibly shared experts.
        hidden: [1, T, hidden].
        is_media: Whether each token belongs to a media item, [1, T]. None means that all tokens are text.

    Returns:
        [1, T, hidden], and None for the scores of the routers.

    """
    rows = hidden[0]
    if is_media is None:
        mixed = _routed(mixture.text_moe, rows, None)
    else:
        own = is_media.t()
        mixed = _routed(mixture.text_moe, rows, own) + _routed(mixture.vision_moe, rows, ~own)
    if mixture.shared_experts is not None:
        mixed = mixed + mixture.shared_experts(rows)
    return mixed.unsqueeze(0), None


def _routed(part: Any, rows: Tensor, is_other: Tensor | None) -> Tensor:
    """Return the outputs of the experts for rows [T, hidden], or zeros where `is_other`, [T, 1], is true."""
    _, weights, chosen = part.gate(rows)
    if is_other is not None:
        chosen = chosen.masked_fill(is_other, part.num_experts)
    mixed: Tensor = part.experts(rows, chosen, weights)
    return mixed


class Ernie45VLMoe(PretrainedFamily):
    """ERNIE-4.5-VL (Baidu, 2025), run by transformers' modules."""

    model_types = ("ernie4_5_vl_moe",)
    published = "baidu/ERNIE-4.5-VL-28B-A3B-PT"
    kinds = ("image", "video")
    processor = ErnieProcessor
    module_name = "Ernie4_5_VLMoeForConditionalGeneration"
    model_class = ErnieModel
