"""Processor and model of the thinkers of Qwen's omni models: images, videos, audio and text in, text out.

As in transformers and vLLM, the audio of a video is left out unless `use_audio_in_video` is set. The talker, which
speaks the answer, is not supported.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.device import upload
from mindie_mm.errors import CorruptReference, InputError, naming
from mindie_mm.inputs import Kind, Media, MediaOptions
from mindie_mm.media.audio.encoded_audio import num_audio_tracks
from mindie_mm.media.audio.mel import MelSettings
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.video.encoded_video import Video
from mindie_mm.models._clips import Clips, read_mel
from mindie_mm.models._films import FilmLayout, film_plan, is_film
from mindie_mm.models._mrope import Block, grid_block, positions_of
from mindie_mm.models._qwen import INTERVAL_GRIDS, PICOSECONDS, QwenModel, QwenProcessor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Spelling, Write
from mindie_mm.nn.model import ModelSpec, Positions
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.nn.splice import ItemView, MediaItem
from mindie_mm.nn.weights.pretrained import read_config
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape

_THINKER = "thinker_config"
_AUDIO_LEFT_OUT = "a video has audio, which is left out; set use_audio_in_video to include it"
_TRACKS_LEFT_OUT = (
    "a video has several audio tracks, of which only the one that players choose is used; send another track as an "
    "audio item"
)
_OF_ROPE = ("input_ids", "attention_mask", "image_grid_thw", "video_grid_thw")
"""Arrays that transformers needs to compute positions."""


class OmniProcessor(QwenProcessor):
    """Processor for the thinker of an omni model.

    Blocks of images and videos are the same as in Qwen2-VL. Blocks of audio clips are the same as in Qwen2-Audio. The
    grid of a video is (t, h, w, interval), where `interval` is the time between two steps of t in picoseconds. The grid
    of a clip is (frames,).

    The block of a video with its audio contains the arrays of both. Its grid is (t, h, w, interval, frames).
    """

    traits = replace(
        QwenProcessor.traits,
        grids=INTERVAL_GRIDS,
        mindie_layouts={},
        hears_videos=True,
        token_types=(),
    )
    extractors: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Names of the supported feature extractors, with their default settings."""
    video_size: ClassVar[Mapping[str, int]]
    """Limits on the pixels of a frame if processor_config.json states none."""
    default_fps: ClassVar[float]
    """Rate that the reference assumes for the frames of a video if the prompt states none."""
    audio_token: ClassVar[tuple[str, int]]
    """Key in config.json of the id that is repeated for each feature of a clip, with its default."""
    film_layout: ClassVar[type[FilmLayout]] = FilmLayout
    """Class of the layout of videos with their audio."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = thinker(checkpoint)
        super().__init__(checkpoint)
        joint, config = checkpoint.json("processor_config.json"), checkpoint.config
        read = read_config(self.config_name, checkpoint)
        self.clips = self.clips_of(read_mel(checkpoint, read.audio_config, self.extractors), read)
        # The reference's processor always overrides the size in the configuration of the video preprocessor.
        size = joint.get("videos_kwargs", {}).get("size", self.video_size)
        self.video = replace(self.video, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
        audio = (config.get("audio_start_token_id", 151647),), (config.get("audio_end_token_id", 151648),)
        placeholder = Placeholder(audio[0], config.get(*self.audio_token), audio[1])
        self.placeholders = {**self.placeholders, "audio": placeholder}
        seconds = config.get("position_id_per_seconds", 25), config.get("seconds_per_chunk", 2)
        self.films = self.film_layout(self.video.merge_size, self.clips.num_features, *seconds)

    def clips_of(self, mel: MelSettings, config: Any) -> Clips:
        """Return the arrays and placeholders of audio clips. `config` is the configuration of the thinker."""
        return Clips(mel)

    @property
    def speech(self) -> SpeechTraits:
        return SpeechTraits(window_s=self.clips.window_s)

    def max_tokens(self, kind: Kind) -> int:
        return self.clips.max_tokens if kind == "audio" else super().max_tokens(kind)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if kind == "audio":
            return self.clips.spelling(num_features, grid)
        if kind == "video" and is_film(grid):
            return self._spell_film(num_features, grid)
        return super().spelling(kind, num_features, grid)

    def _spell_film(self, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if not self.clips.is_possible(grid[4]) or min(grid) < 1:
            return None
        num_audio_tokens = self.clips.num_features(grid[4])
        if super().spelling("video", num_features - num_audio_tokens, grid[:4]) is None:
            return None
        return self.films.spelling(self.placeholders["video"], self.placeholders["audio"], grid)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        mask, grid = "feature_attention_mask", item.shape.grid
        if item.shape.kind == "audio":
            return self.clips.inputs(item, device, mask)
        inputs = super().item_inputs(item, device)
        if item.shape.kind == "video":
            inputs["video_second_per_grid"] = torch.tensor([grid[3] / PICOSECONDS])
            inputs |= self.clips.inputs(item, device, mask) if is_film(grid) else {}
        return inputs

    def rope_inputs(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        ids = batch["input_ids"]
        starts = ids[:, :-1] == self.config.vision_start_token_id
        if (ids[:, 1:] == self.config.audio_start_token_id)[starts].any():
            raise InputError(
                "a sample has a video with its audio, which cannot be packed. Use packing=0, or tokenize its row "
                "without use_audio_in_video"
            )
        given = {name: batch[name] for name in _OF_ROPE if name in batch}
        if (mask := batch.get("feature_attention_mask")) is not None:
            given["audio_seqlens"] = mask.sum(-1)
        if (seconds := batch.get("video_second_per_grid")) is not None:
            given["second_per_grids"] = seconds
        return given

    def further_numbers(self, kind: Kind, grid: tuple[int, ...]) -> int:
        return 1 if kind == "video" else 0

    def worst_case(self, kind: Kind) -> Data:
        return self.clips.worst_case() if kind == "audio" else super().worst_case(kind)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind == "audio":
            return self.clips.plan(media, data)
        plan, write = super().plan(media, data, counts)
        if media.kind != "video" or not isinstance(data, bytes) or not (num_tracks := num_audio_tracks(data)):
            return plan, write
        if not media.options.use_audio_in_video:
            return msgspec.structs.replace(plan, left_out=_AUDIO_LEFT_OUT), write
        with naming("the audio of the video"):
            plan, write = film_plan((plan, write), self.clips.plan(Media("audio", None), data))
        return msgspec.structs.replace(plan, left_out=_TRACKS_LEFT_OUT if num_tracks > 1 else ""), write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if kind == "audio":
            return self.clips.specs(grid)
        pixels = super().specs_of(kind, grid)
        return {**pixels, **self.clips.specs(grid[4:])} if kind == "video" and is_film(grid) else pixels

    def video_grid(
        self, patches: tuple[int, int, int], video: Video, indices: Sequence[int], options: MediaOptions
    ) -> tuple[int, ...]:
        # Use the requested rate, as in the reference. If the caller supplies frames, use the rate of the sampled
        # frames.
        rate = options.fps or self.default_fps
        if options.sample_fps is not None:
            rate = len(indices) / video.num_frames * options.sample_fps
        return (*patches, round(self.video.temporal_patch_size / rate * PICOSECONDS))


class OmniModel(QwenModel):
    """The thinker of an omni model."""

    traits = replace(QwenModel.traits, mindie_layouts={})

    def __init__(self, module: Any, spec: ModelSpec, processor: OmniProcessor) -> None:
        super().__init__(module, spec, processor)
        self.clips, self._films = processor.clips, processor.films
        self._audio_token = processor.placeholders["audio"].token

    def _describe(self, view: ItemView) -> MediaShape:
        shape = super()._describe(view)
        if shape.kind != "video" or not is_film(shape.grid):
            return shape
        if min(shape.grid) < 1 or self._films.num_features(shape.grid) != shape.num_features:
            raise CorruptReference(f"the block states {shape.num_features} features, but the grid {shape.grid}")
        return replace(shape, second_token=self._audio_token)

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        """Return the positions of a prompt. Each token of an audio clip advances the position by one, as text does."""
        return positions_of(length, [self._block(item) for item in items if item.shape.kind != "audio"])

    def _block(self, item: MediaItem) -> Block:
        grid = item.shape.grid
        if item.shape.second_token is not None:
            return self._films.block(item.start, grid)
        t, h, w = grid[:3]
        merged = (t, h // self._merge, w // self._merge)
        return grid_block(item.start, merged, *(self._films.spacing(grid) if item.shape.kind == "video" else ()))

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        clips = [item for item in items if item.shape.kind == "audio" or item.shape.second_token is not None]
        sights = [item for item in items if item.shape.kind != "audio"]
        heard = iter([F.pad(rows, (0, self.spec.extra_width)) for rows in self.hear(clips)] if clips else ())
        seen: Iterator[Tensor] = iter(())
        if sights:
            features: Tensor = self.visual_features(sights)
            seen = iter(
                features.flatten(0, -2).split([self._films.num_frame_tokens(item.shape.grid) for item in sights])
            )
        return [self._perceived(item, seen, heard) for item in items]

    def _perceived(self, item: MediaItem, seen: Iterator[Tensor], heard: Iterator[Tensor]) -> Tensor:
        """Return the features of `item`, from the next features of each tower that it needs."""
        if item.shape.kind == "audio":
            return next(heard)
        if item.shape.second_token is None:
            return next(seen)
        frames, audio = next(seen), next(heard)
        is_audio = upload(self._films.is_audio(item.shape.grid), self.spec.device)
        features = frames.new_empty(item.shape.num_features, frames.shape[1])
        features[~is_audio], features[is_audio] = frames, audio.to(features.dtype)
        return features

    @abstractmethod
    def hear(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the features of audio clips and of the audio of videos, [num_features, hidden_size] each."""


class OmniFamily(PretrainedFamily):
    """A family whose checkpoints have a thinker and other parts, or only a thinker."""

    kinds = ("image", "video", "audio")
    unused_weights = ("talker.*", "token2wav.*", "code2wav.*")

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        prefix = f"{_THINKER}." if _THINKER in checkpoint.config else ""
        return [prefix + name for name in super().unknown_keys(checkpoint)]

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return thinker(checkpoint)


def thinker(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the thinker's section as its config.json, if config.json has that section."""
    return replace(checkpoint, config=checkpoint.config.get(_THINKER, checkpoint.config))
