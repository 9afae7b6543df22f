"""Qwen2-Audio: sound through Whisper's encoder.

Source: arXiv 2407.10759; transformers' qwen2_audio, whose ids and spectrograms these are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.device import upload
from mindie_mm.errors import MediaError
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, PretrainedFamily, Processor, Spelling
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

SPECTROGRAM = "input_features"
"""The array of a clip's block: float32 [bins, frames]."""
_LEAST_FRAMES = 3
# What the first of the two convolutions before the encoder reaches beyond a clip's last frame, times the other's reach.
_FURTHER_FRAMES = 2
_CHAT_TEMPLATE = (
    "{% set audio_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'audio' %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The reference's own, for checkpoints without one."""


def num_features_of(num_frames: int) -> int:
    """Features of a clip: the second convolution halves its frames, and so does the pooling behind the encoder."""
    return _encoder_length(num_frames) // 2


def read_mel(checkpoint: Checkpoint, tower: Any) -> MelSettings:
    """Return how sound becomes the spectrograms that `tower`, its part of config.json, takes. UnsupportedCheckpoint."""
    where = f"{checkpoint.path} (audio)"
    settings = checkpoint.preprocessor("audio", {"WhisperFeatureExtractor": {"feature_size": 80}})
    check_settings(settings, {"feature_size": tower.num_mel_bins}, where)
    return MelSettings.read(settings, where)


def plan_audio(media: Media, data: Data, settings: MelSettings, further_frames: int = 0) -> Plan:
    """A clip of sound; its grid: its frames, and `further_frames` of silence are stored behind them.

    InputError, MediaError, LimitExceeded.
    """
    samples = open_audio(data, media.options.sampling_rate).decode(settings.rate, settings.max_samples)
    num_frames = settings.num_frames(len(samples))
    if num_frames < _LEAST_FRAMES:
        least = (_LEAST_FRAMES - 1) * settings.hop + 1
        raise MediaError(f"the clip has {len(samples)} samples, {settings.rate} a second; it must have {least}")
    stored = min(num_frames + further_frames, settings.max_frames)

    def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        write_log_mel(samples, settings, arrays[SPECTROGRAM])

    return Plan(
        num_features=num_features_of(num_frames),
        specs={SPECTROGRAM: ArraySpec((settings.num_bins, stored), "float32")},
        settings=f"sound of {media.options.sampling_rate}, {settings}, {stored} frames",
        write=write,
        grid=(num_frames,),
    )


def spell_clip(processor: Processor, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
    """`Processor.spelling` of a clip, whose frames need not be known."""
    if grid:
        made = len(grid) == 1 and num_features_of(grid[0]) == num_features
    else:
        made = num_features <= processor.max_tokens("audio")
    return Spelling() if made else None


def _encoder_length(num_frames: int) -> int:
    return (num_frames - 1) // 2 + 1


class Qwen2AudioProcessor(Processor):
    """The tokenizer's half: a clip's block holds `input_features`, float32 [bins, frames]; its grid: its frames."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = read_config("Qwen2AudioConfig", checkpoint)
        self.mel = read_mel(checkpoint, config.audio_config)
        token = checkpoint.config.get("audio_token_index", 151646)
        before, after = checkpoint.token_id("<|audio_bos|>"), checkpoint.token_id("<|audio_eos|>")
        self.feature_width = config.get_text_config().hidden_size
        self.placeholders = {"audio": Placeholder((before,), token, (after,))}

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Never the tokenizer's: that of a base model knows of text alone."""
        return own or _CHAT_TEMPLATE

    def max_tokens(self, kind: Kind) -> int:
        return num_features_of(self.mel.max_frames)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        return spell_clip(self, num_features, grid)

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros(self.mel.max_samples, np.float32)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        return plan_audio(media, data, self.mel, _FURTHER_FRAMES)


class Qwen2AudioModel(PretrainedModel):
    """Audio tower and decoder; `module` is transformers' Qwen2AudioForConditionalGeneration."""

    traits = Traits(projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, _: Qwen2AudioProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """The reference's, less the silence: it pads each clip to its window, and masks what it padded."""
        tower, device = self.module.model.audio_tower, self.spec.device
        spectrograms = [to_device(item.view, SPECTROGRAM, device) for item in items]
        longest = max(frames.shape[1] for frames in spectrograms)
        batch = torch.stack([F.pad(frames, (0, longest - frames.shape[1])) for frames in spectrograms])
        lengths = [_encoder_length(item.shape.grid[0]) for item in items]
        hidden = F.gelu(tower.conv2(F.gelu(tower.conv1(batch.to(self.spec.dtype)))))  # [items, width, time]
        hidden = hidden[..., : max(lengths)].transpose(1, 2)
        hidden = hidden + tower.embed_positions.weight[: hidden.shape[1]]
        mask = None
        if min(lengths) < hidden.shape[1]:
            inside = torch.arange(hidden.shape[1], device=device) < upload(lengths, device)[:, None]
            mask = inside[:, None, None].expand(-1, -1, hidden.shape[1], -1)
        for layer in tower.layers:
            hidden = layer(hidden, mask)
        pooled = tower.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2)
        features = self.module.model.multi_modal_projector(tower.layer_norm(pooled))
        return [rows[: item.shape.num_features] for rows, item in zip(features, items, strict=True)]


class Qwen2Audio(PretrainedFamily):
    """Qwen2-Audio (Chu et al., 2024, arXiv 2407.10759) over transformers' own modules."""

    model_types = ("qwen2_audio",)
    published = "Qwen/Qwen2-Audio-7B-Instruct"
    kinds = ("audio",)
    processor = Qwen2AudioProcessor
    module_name = "Qwen2AudioForConditionalGeneration"
    model_class = Qwen2AudioModel
