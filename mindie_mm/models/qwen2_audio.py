"""Qwen2-Audio: audio through the encoder of Whisper.

Source: arXiv 2407.10759. Token ids and spectrograms match transformers' `qwen2_audio`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.device import upload
from mindie_mm.errors import CorruptReference, FeatureCountMismatch, TokenOutOfRange
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.models._clips import SPECTROGRAM, ClipProcessor, Clips, encoder_length, read_mel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Write
from mindie_mm.nn.mindie import Joined, OfPrompt, PromptLayout, mindie_pad
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

_EXTRACTORS = {"WhisperFeatureExtractor": {"feature_size": 80}}
_MASK = "feature_attention_mask"
# Layout of the handle words that MindIE's own processor writes.
_MINDIE = PromptLayout(
    (
        Joined("audio", SPECTROGRAM, "float32"),
        OfPrompt("input_ids"),
        OfPrompt("attention_mask"),
        Joined("audio", _MASK, "int64"),
    ),
    replaces_ids=True,
)
# Number of frames after the end of a clip that the two convolutions before the encoder read.
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
"""Chat template of the reference for checkpoints without a template."""


class Qwen2AudioProcessor(ClipProcessor):
    """Processor for Qwen2-Audio.

    In MindIE's wire format, all clips of a prompt share `input_features`, float32 [clips, bins, frames of 30 s], and
    `feature_attention_mask`, int64 [clips, frames of 30 s]. The ids of the prompt are in a segment, too.
    """

    traits = Traits(mindie_prompt_layout=_MINDIE)

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = read_config("Qwen2AudioConfig", checkpoint)
        self.clips = Clips(read_mel(checkpoint, config.audio_config, _EXTRACTORS), further_frames=_FURTHER_FRAMES)
        token = checkpoint.config.get("audio_token_index", 151646)
        before, after = checkpoint.token_id("<|audio_bos|>"), checkpoint.token_id("<|audio_eos|>")
        self.feature_width = config.get_text_config().hidden_size
        self.placeholders = {"audio": Placeholder((before,), token, (after,))}
        self.mindie_pad = mindie_pad(checkpoint.config)

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template.

        The tokenizer's template is ignored, because the template of base models is for text only.
        """
        return own or _CHAT_TEMPLATE

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        plan, write_spectrogram = super().plan(media, data, counts)
        bins, frames = self.clips.mel.num_bins, self.clips.mel.max_frames

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            write_spectrogram({SPECTROGRAM: arrays[SPECTROGRAM].reshape(bins, -1)})
            if _MASK in arrays:
                arrays[_MASK][...] = np.arange(frames) < plan.grid[0]

        specs = {SPECTROGRAM: ArraySpec((1, bins, frames), "float32"), _MASK: ArraySpec((1, frames), "int64")}
        return msgspec.structs.replace(plan, mindie_specs=specs), write


class Qwen2AudioModel(PretrainedModel):
    """The Qwen2-Audio model. `module` is transformers' `Qwen2AudioForConditionalGeneration`."""

    traits = Traits(mindie_prompt_layout=_MINDIE, projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen2AudioProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._clips, self._token = processor.clips, processor.placeholders["audio"].token

    def segment_items(self, ids: NDArray[np.int64], view: SegmentsView, start: int) -> list[MediaItem]:
        features, text, mask = self._checked(view)
        frames, least = mask.sum(axis=1), self._clips.least_frames
        if not np.array_equal(mask, np.arange(mask.shape[1]) < frames[:, np.newaxis]) or frames.min() < least:
            raise CorruptReference(f"{_MASK} must have ones for at least {least} frames, followed by zeros")
        lengths, is_clip = np.ones(len(text), np.int64), text == self._token
        if np.count_nonzero(is_clip) != len(features):
            raise FeatureCountMismatch(
                f"input_ids has {np.count_nonzero(is_clip)} placeholders, but {SPECTROGRAM} has {len(features)} clips"
            )
        lengths[is_clip] = [self._clips.num_features(count) for count in frames.tolist()]
        if lengths.sum() != len(ids):
            raise FeatureCountMismatch(f"the prompt has {len(ids)} tokens, but its segments need {lengths.sum()}")
        starts, expanded = (np.cumsum(lengths) - lengths)[is_clip].tolist(), np.repeat(text, lengths)
        return [
            MediaItem(
                np.arange(first, first + self._clips.num_features(count)),
                view.part({SPECTROGRAM: features[i, :, : count + _FURTHER_FRAMES]}),
                MediaShape("audio", self._token, self._clips.num_features(count), (count,)),
                prompt_ids=expanded,
            )
            for i, (first, count) in enumerate(zip(starts, frames.tolist(), strict=True))
        ]

    def _checked(self, view: SegmentsView) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Return the spectrograms, a copy of the ids with one placeholder per clip, and a copy of the frame mask."""
        if missing := [field.name for field in _MINDIE.fields if field.name not in view]:
            raise CorruptReference(f"the handle words of {', '.join(missing)} are 0; this model needs these arrays")
        # Copies, because the writer of the segments could still change what was checked.
        features, text, mask = view[SPECTROGRAM], view["input_ids"].copy(), view[_MASK].copy()
        clips, length = len(features), text.shape[-1]
        expected: dict[str, tuple[int, ...]] = {
            SPECTROGRAM: (clips, self._clips.mel.num_bins, self._clips.mel.max_frames),
            "input_ids": (1, length),
            "attention_mask": (1, length),
            _MASK: (clips, self._clips.mel.max_frames),
        }
        if (found := {name: view[name].shape for name in expected}) != expected:
            raise CorruptReference(f"the segments have the shapes {found}, but this model needs {expected}")
        if not (view["attention_mask"] == 1).all():
            raise CorruptReference("attention_mask contains values other than 1; prompts must not be padded")
        known = self.spec.embedding_size or self.spec.vocab_size
        if not (text.min() >= 0 and text.max() < known):
            raise TokenOutOfRange(f"a token id in [{text.min()}, {text.max()}] is not in [0, {known})")
        return features, text[0], mask

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the features of each clip.

        The reference pads all clips to the full window and masks the padding. This method pads them only to the longest
        clip.
        """
        tower, device = self.module.model.audio_tower, self.spec.device
        spectrograms = [to_device(item.view, SPECTROGRAM, device) for item in items]
        longest = max(frames.shape[1] for frames in spectrograms)
        batch = torch.stack([F.pad(frames, (0, longest - frames.shape[1])) for frames in spectrograms])
        lengths = [encoder_length(item.shape.grid[0]) for item in items]
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
    """Qwen2-Audio (Chu et al., 2024, arXiv 2407.10759), run by transformers' modules."""

    model_types = ("qwen2_audio",)
    published = "Qwen/Qwen2-Audio-7B-Instruct"
    kinds = ("audio",)
    processor = Qwen2AudioProcessor
    module_name = "Qwen2AudioForConditionalGeneration"
    model_class = Qwen2AudioModel
