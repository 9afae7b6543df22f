"""The thinker of Qwen2.5-Omni: images, videos, audio and text in, text out.

Source: arXiv 2503.20215. Token ids, grids, pixels and spectrograms match transformers' `qwen2_5_omni`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.models._clips import SPECTROGRAM
from mindie_mm.models._omni import OmniFamily, OmniModel, OmniProcessor
from mindie_mm.models._tower_places import window_places
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device


class Qwen25OmniProcessor(OmniProcessor):
    """Processor for Qwen2.5-Omni."""

    config_name = "Qwen2_5OmniThinkerConfig"
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen2VLVideoProcessor",)
    extractors: ClassVar = {"WhisperFeatureExtractor": {"feature_size": 80}}
    video_size: ClassVar = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    default_fps = 2.0
    audio_token = ("audio_token_index", 151646)


class Qwen25OmniModel(OmniModel):
    """The thinker of Qwen2.5-Omni. `module` is transformers' `Qwen2_5OmniThinkerForConditionalGeneration`."""

    def places(self, grids: Tensor) -> dict[str, Tensor]:
        return super().places(grids) | window_places(self.module.model.visual, grids, self.spec.device)

    def hear(self, items: Sequence[MediaItem]) -> list[Tensor]:
        device = self.spec.device
        spectrograms = [to_device(item.view, SPECTROGRAM, device) for item in items]
        # Indices are computed on the host. The tower would compute them on the device and synchronize in each layer.
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as theirs

        frames = [item.shape.grid[-1] for item in items]
        lengths = torch.tensor(frames)
        tower = self.module.model.audio_tower
        chunks, chunk_lengths = theirs.chunk_and_pad_features(torch.cat(spectrograms, dim=1), lengths, tower.n_window)
        features: Tensor = tower(
            padded_feature=chunks,
            chunk_lengths=upload(chunk_lengths, device),
            valid_indices=upload(theirs.get_valid_indices(chunk_lengths), device),
            pool_indices=upload(theirs.get_pool_indices(lengths), device),
            cu_seqlens=theirs.get_audio_cu_seqlens(chunk_lengths),
        ).last_hidden_state
        return list(features.flatten(0, -2).split([self.clips.num_features(count) for count in frames]))


class Qwen25Omni(OmniFamily):
    """The thinker of Qwen2.5-Omni (Xu et al., 2025, arXiv 2503.20215), run by transformers' modules."""

    model_types = ("qwen2_5_omni", "qwen2_5_omni_thinker")
    published = "Qwen/Qwen2.5-Omni-7B"
    processor = Qwen25OmniProcessor
    module_name = "Qwen2_5OmniThinkerForConditionalGeneration"
    model_class = Qwen25OmniModel
    other_keys = ("vision_start_token_id", "vision_end_token_id")
