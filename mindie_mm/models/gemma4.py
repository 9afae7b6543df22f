"""Gemma 4: images and video frames in their aspect ratio, and audio clips through a conformer.

Layers of the decoder differ in the width of their keys, later layers read the keys of earlier layers, and each layer
has its own embedding of each token. Token ids, pixels, spectrograms and logits match transformers' `gemma4`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.audio.usm import UsmSettings
from mindie_mm.media.image.encoded_image import Data, Resample, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.video.frames import Sampling, stepped
from mindie_mm.models._gemma import SPECTROGRAM, clip_inputs, enclosed, planned_clip, soft_capped, spans_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import PIXELS, Item, padded
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.pixels import Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, Splice
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_PIXELS: Mapping[str, Any] = {
    "resample": 3,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "patch_size": 16,
    "pooling_kernel_size": 3,
}
_IMAGE: Mapping[str, Any] = {**_PIXELS, "do_normalize": False, "max_soft_tokens": 280}
_VIDEO: Mapping[str, Any] = {**_PIXELS, "max_soft_tokens": 70, "num_frames": 32, "do_sample_frames": True}
_BUDGETS = (70, 140, 280, 560, 1120)
"""Numbers of features per image that the reference accepts as a limit."""
_TEXTS: Mapping[Kind, Mapping[str, str]] = {
    "image": {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
    "audio": {"boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>"},
}
"""Keys of tokenizer_config.json for the tokens before, of and after an item, with the usual texts of these tokens."""
_VIDEO_TOKEN = "<|video|>"  # noqa: S105 - not a password
_UNSTATED_FPS = 24.0
_MAX_SAMPLES = 480_000
"""Maximum length of an audio clip in samples. No setting of the reference raises it."""
_FRAMES_AT_ONCE = 32
"""Maximum number of images or frames that the tower encodes at once."""


@dataclass(frozen=True, slots=True)
class _ImageSettings:
    """Settings of images or of the frames of videos."""

    patch: int
    """Side of a patch in pixels."""
    cell: int
    """Side in pixels of the square that becomes one feature."""
    most: int
    """Maximum number of features."""
    resample: Resample

    @classmethod
    def read(cls, settings: Mapping[str, Any], vision: Any, where: str) -> Self:
        needed = {name: getattr(vision, name) for name in ("patch_size", "pooling_kernel_size")}
        check_settings(settings, {**needed, "do_resize": True}, where)
        if (most := settings["max_soft_tokens"]) not in _BUDGETS:
            raise UnsupportedCheckpoint(f"{where}: max_soft_tokens is {most!r}; only {_BUDGETS} are supported")
        return cls(
            vision.patch_size, vision.patch_size * vision.pooling_kernel_size, most, resample_of(settings, where)
        )

    def cells(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of features of an image."""
        # In the order of the reference, because rounding decides some sizes. It counts patches, whose side drops out.
        factor = math.sqrt(self.most * self.cell**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.cell) for side in (height, width))
        if not rows:
            return 1, min(width // height, self.most)
        if not columns:
            return min(height // width, self.most), 1
        return rows, columns

    def pixels(self, cells: Sequence[int]) -> tuple[int, int]:
        """Return the height and width in pixels of an image with these rows and columns of features."""
        return cells[0] * self.cell, cells[1] * self.cell

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width in pixels of an image that has `most` features."""
        rows = next(rows for rows in range(math.isqrt(self.most), 0, -1) if self.most % rows == 0)
        return self.pixels((rows, self.most // rows))


class Gemma4Processor(Processor):
    """Processor for Gemma 4.

    The block of an image or a video contains `pixel_values`, uint8 [images or frames, height, width, 3]. The grid is
    the number of features (rows, columns) of each image. For a video, the time of each frame in whole seconds
    follows.

    The block of an audio clip contains `input_features`, float32 [frames, bins]. The grid is (frames,).
    """

    traits = Traits(
        needs_ids=True,
        token_types=("mm_token_type_ids",),
        packs_apart=True,
        grids={
            "image": "the numbers of rows and columns of features",
            "video": "the numbers of rows and columns of features of a frame, and the time of each frame in seconds",
        },
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Gemma4Config", checkpoint)
        text, vision = config.text_config, config.vision_config
        self.feature_width = text.hidden_size
        if text.use_bidirectional_attention == "all":
            raise UnsupportedCheckpoint(f"{where}: use_bidirectional_attention is 'all', but a decoder is causal")
        if vision is None:
            raise UnsupportedCheckpoint(f"{where}: there is no vision_config; a text model needs no multimodal worker")
        self._enclosed = {"image": enclosed(checkpoint, "image", _TEXTS["image"], config.image_token_id)}
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        image = checkpoint.preprocessor("image", {"Gemma4ImageProcessor": _IMAGE})
        self._image_settings: dict[Kind, _ImageSettings] = {"image": _ImageSettings.read(image, vision, where)}
        self.normalizations: dict[Kind, Normalization] = {"image": Normalization.read(image)}
        video = checkpoint.preprocessor("video", {"Gemma4VideoProcessor": _VIDEO})
        self._image_settings["video"] = _ImageSettings.read(video, vision, f"{where} (videos)")
        self.normalizations["video"] = Normalization.read(video)
        self._sampling = Sampling.read(video, context_length(text) // self._image_settings["video"].most)
        if (token := checkpoint.token_id(_VIDEO_TOKEN)) != config.video_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: video_token_id is {config.video_token_id}, but the tokenizer's id of {_VIDEO_TOKEN} is "
                f"{token}"
            )
        self.placeholders["video"] = Placeholder((), token, ())
        if config.audio_config is not None:
            self._enclosed["audio"] = enclosed(checkpoint, "audio", _TEXTS["audio"], config.audio_token_id)
            self.placeholders["audio"] = Placeholder((), config.audio_token_id, ())
            settings = checkpoint.preprocessor("audio", {"Gemma4AudioFeatureExtractor": {"feature_size": 128}})
            bins = config.audio_config.subsampling_conv_channels[0]  # transformers takes this for the number of bins
            check_settings(settings, {"feature_size": bins}, f"{where} (audio)")
            self._usm = UsmSettings.read(settings, _MAX_SAMPLES, f"{where} (audio)", semicausal=True)

    def max_tokens(self, kind: Kind) -> int:
        if kind == "audio":
            return _num_features(self._usm.num_frames(_MAX_SAMPLES))
        return self._image_settings[kind].most * (self._sampling.limit if kind == "video" else 1)

    def worst_case(self, kind: Kind) -> Data:
        if kind == "audio":
            return np.zeros(_MAX_SAMPLES, np.float32)
        shape = *self._image_settings[kind].largest, 3
        return np.zeros((self._sampling.limit, *shape) if kind == "video" else shape, np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        token = self.placeholders[kind].token
        if kind == "audio":
            is_possible = num_features <= self.max_tokens(kind)
            if grid:
                is_possible &= len(grid) == 1 and _num_features(grid[0]) == num_features
            text = "".join(self._enclosed["audio"])
            return Spelling(text, [(token,) * num_features]) if is_possible else None
        if len(grid) < 2 or min(grid) < 0 or (kind == "image" and len(grid) > 2):
            return None
        seconds = grid[2:] if kind == "video" else (0,)
        each = grid[0] * grid[1]
        if not each or each > self._image_settings[kind].most or each * len(seconds) != num_features:
            return None
        start, image, end = self._enclosed["image"]
        one = f"{start}{image}{end}"
        if kind == "video":
            one = " ".join(f"{time // 60:02d}:{time % 60:02d} {start}{_VIDEO_TOKEN}{end}" for time in seconds)
        return Spelling(one, [(token,) * each] * len(seconds))

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        match media.kind:
            case "audio":
                return self._plan_audio(media, data)
            case "video":
                return self._plan_video(media, data)
        image, settings = open_image(data), self._image_settings["image"]
        grid = settings.cells(image.height, image.width)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            arrays["pixel_values"][0] = resize(image.decode(), *settings.pixels(grid), settings.resample)

        return self._plan("image", grid, math.prod(grid), f"image {settings}"), write

    def _plan_video(self, media: Media, data: Data) -> tuple[Plan, Write]:
        video, settings = open_video(data, media.options.sample_fps), self._image_settings["video"]
        count = self._sampling.count(video, media.options)
        indices = stepped(video.num_frames, count)
        video.count(indices)
        cells, fps = settings.cells(video.height, video.width), video.fps or _UNSTATED_FPS

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            for place, frame in zip(arrays["pixel_values"], video.decode(indices), strict=True):
                place[...] = resize(frame, *settings.pixels(cells), settings.resample)

        grid = (*cells, *(int(index / fps) for index in indices))
        return self._plan("video", grid, math.prod(cells) * len(indices), f"frames {indices}, {settings}"), write

    def _plan_audio(self, media: Media, data: Data) -> tuple[Plan, Write]:
        frames, settings, write = planned_clip(media, data, self._usm)
        return self._plan("audio", (frames,), _num_features(frames), settings), write

    def _plan(self, kind: Kind, grid: tuple[int, ...], num_features: int, settings: str) -> Plan:
        return Plan(num_features, self.specs_of(kind, grid), f"gemma4 {settings}", grid)

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return normalized patches, float32 [images, patches, patch * patch * 3], row by row."""
        pixels, patch = super().normalized(item, device), self._image_settings["image"].patch
        return pixels.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)

    def places(self, grid: tuple[int, ...]) -> Tensor:
        """Return the column and row of each patch of an image, int64 [patches, 2]."""
        rows, columns = (
            side // self._image_settings["image"].patch for side in self._image_settings["image"].pixels(grid)
        )
        return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        kind, grid = item.shape.kind, item.shape.grid
        if kind == "audio":
            return clip_inputs(item, device)
        settings, patches = self._image_settings[kind], self.normalized(item, device)
        most = settings.most * (settings.cell // settings.patch) ** 2
        places = padded(self.places(grid).unsqueeze(0), (most, 2), -1).expand(len(patches), -1, -1)
        inputs = {PIXELS[kind]: padded(patches, (most, patches.shape[2])), f"{kind}_position_ids": places}
        return inputs if kind == "image" else inputs | {"num_frames_per_video": torch.tensor([len(patches)])}

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if not grid:
            return {}
        if kind == "audio":
            return {SPECTROGRAM: ArraySpec((grid[0], self._usm.num_bins), "float32")}
        frames = len(grid) - 2 if kind == "video" else 1
        return {"pixel_values": ArraySpec((frames, *self._image_settings[kind].pixels(grid), 3), "uint8")}


def _num_features(num_frames: int) -> int:
    """Return the number of features of an audio clip. Two convolutions halve the number of frames."""
    return -(-num_frames // 4)


class Gemma4Model(ImageModel, PretrainedModel):
    """The Gemma 4 model. `module` is transformers' `Gemma4ForConditionalGeneration`."""

    traits = Traits(needs_ids=True, vision_parts=("model.vision_tower",), projector_parts=("model.embed_vision",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Gemma4Processor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._places = processor.places
        self._text = module.config.text_config
        self._media_tokens = [placeholder.token for placeholder in processor.placeholders.values()]

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Encode the items. Images of the same size are a batch, so that no patch is padding."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, item in enumerate(items):
            size = () if item.shape.kind == "audio" else item.shape.grid[:2]
            groups.setdefault(size, []).append(index)
        found: dict[int, Tensor] = {}
        for size, indices in groups.items():
            own = [items[index] for index in indices]
            features = self._encode_images(own) if size else self._encode_audio(own)
            found |= dict(zip(indices, features, strict=True))
        return [found[index] for index in range(len(items))]

    def _encode_images(self, items: Sequence[MediaItem]) -> list[Tensor]:
        model, patches = self.module.model, torch.cat([self.normalized(item) for item in items])
        positions = upload(self._places(items[0].shape.grid), patches.device).expand(len(patches), -1, -1)
        encoded = [
            model.embed_vision(model.vision_tower(part, own).last_hidden_state)
            for part, own in zip(patches.split(_FRAMES_AT_ONCE), positions.split(_FRAMES_AT_ONCE), strict=True)
        ]
        return list(torch.cat(encoded).split([item.shape.num_features for item in items]))

    def _encode_audio(self, items: Sequence[MediaItem]) -> list[Tensor]:
        model, device = self.module.model, self.spec.device
        clips = [to_device(item.view, SPECTROGRAM, device).to(self.spec.dtype) for item in items]
        longest = max(map(len, clips))
        batch = torch.stack([pad(clip, (0, 0, 0, longest - len(clip))) for clip in clips])
        lengths = torch.tensor([len(clip) for clip in clips])
        mask = upload(torch.arange(longest) < lengths.unsqueeze(1), device)
        features = model.embed_audio(model.audio_tower(batch, mask).last_hidden_state)
        return [rows[: item.shape.num_features] for rows, item in zip(features, items, strict=True)]

    def bidirectional_spans(self, length: int, items: Sequence[MediaItem]) -> Tensor | None:
        """Return a span for each image and each frame, if the checkpoint has bidirectional attention.

        Only layers with a sliding window use the spans.
        """
        if self._text.use_bidirectional_attention is None:
            return None
        return spans_of(length, [item for item in items if item.shape.kind != "audio"])

    def layer_inputs(self, input_ids: Tensor, hidden: Tensor, splices: Sequence[Splice]) -> Tensor | None:
        """Return the embeddings of each token for all layers, [T, layers * width].

        Placeholders have the embeddings of the padding token.
        """
        if not self._text.hidden_size_per_layer_input:
            return None
        is_media = input_ids == self._media_tokens[0]
        for token in self._media_tokens[1:]:
            is_media = is_media | (input_ids == token)
        ids = input_ids.masked_fill(is_media, self._text.pad_token_id)
        embedded: Tensor = self.text_model.embed_tokens_per_layer(ids)
        return embedded

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        further: dict[str, Any] = {"only_local_spans": True}
        if extra is not None:
            further["per_layer_inputs"] = extra.view(1, len(hidden), self._text.num_hidden_layers, -1)
        return self.run_text_model(hidden, positions, paged, **further)

    def head(self, hidden: Tensor) -> Tensor:
        return soft_capped(super().head(hidden), self._text.final_logit_softcapping)


class Gemma4(PretrainedFamily):
    """Gemma 4 (Gemma Team, 2026), run by transformers' modules."""

    model_types = ("gemma4",)
    published = "google/gemma-4-E2B-it"
    kinds = ("image", "video", "audio")
    processor = Gemma4Processor
    module_name = "Gemma4ForConditionalGeneration"
    other_keys = (
        "text_config.num_global_key_value_heads",  # only read if attention_k_eq_v is set
        "text_config.expert_intermediate_size",  # an earlier name of moe_intermediate_size
        "vision_config.global_head_dim",  # equal to head_dim
        # Repetitions of eoa_token_index, and of max_soft_tokens of the preprocessor.
        *("eoa_token_id", "vision_soft_tokens_per_image", "vision_config.default_output_length"),
    )
    model_class = Gemma4Model
