"""The thinker of Qwen3-Omni: images, videos, audio and text in, text out.

Source: arXiv 2509.17765. Token ids, grids, pixels and spectrograms match transformers' `qwen3_omni_moe`. The vision
tower and the decoder are those of Qwen3-VL with a mixture of experts. A clip may be as long as the context allows.

Two details differ from transformers, so that an item's features and positions do not depend on other items:

- A clip is transformed as if it were alone in its prompt. transformers pads the clips of a prompt to the longest one.
- Positions are integers, as in vLLM: times are rounded down. They are fractions in transformers if 26 is not a multiple
  of the rate at which a video was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from mindie_mm.media.audio.mel import MelSettings
from mindie_mm.models._chunked_encoder import check_encoder, chunked_length, encode_clips, longest_clip
from mindie_mm.models._clips import SPECTROGRAM, Clips
from mindie_mm.models._films import MergedFilmLayout
from mindie_mm.models._omni import OmniFamily, OmniModel, OmniProcessor
from mindie_mm.models._qwen3 import DeepstackModel
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device


class Qwen3OmniMoeProcessor(OmniProcessor):
    """Processor for Qwen3-Omni."""

    config_name = "Qwen3OmniMoeThinkerConfig"
    image_types = ("Qwen2VLImageProcessor",)
    video_types = ("Qwen2VLVideoProcessor",)
    extractors: ClassVar = {"WhisperFeatureExtractor": {"feature_size": 80}}
    video_size: ClassVar = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
    default_fps = 1.0
    audio_token = ("audio_token_id", 151646)
    film_layout = MergedFilmLayout

    def clips_of(self, mel: MelSettings, config: Any) -> Clips:
        check_encoder(config.audio_config, "config.json")
        longest = longest_clip(config.text_config.max_position_embeddings)
        return Clips(replace(mel, pads=False, max_samples=longest * mel.hop), chunked_length, least_frames=2)


class Qwen3OmniMoeModel(DeepstackModel, OmniModel):
    """The thinker of Qwen3-Omni. `module` is transformers' `Qwen3OmniMoeThinkerForConditionalGeneration`."""

    traits = replace(OmniModel.traits, projector_parts=("model.visual.merger", "model.visual.merger_list"))

    def hear(self, items: Sequence[MediaItem]) -> list[Tensor]:
        tower = self.module.model.audio_tower
        clips = [to_device(item.view, SPECTROGRAM, self.spec.device).to(self.spec.dtype) for item in items]
        features: Tensor = tower.proj2(tower.act(tower.proj1(encode_clips(tower, clips, pads=False))))
        return list(features.split([chunked_length(item.shape.grid[-1]) for item in items]))


class Qwen3OmniMoe(OmniFamily):
    """The thinker of Qwen3-Omni (Xu et al., 2025, arXiv 2509.17765), run by transformers' modules."""

    model_types = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
    published = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
    processor = Qwen3OmniMoeProcessor
    module_name = "Qwen3OmniMoeThinkerForConditionalGeneration"
    model_class = Qwen3OmniMoeModel
    other_keys = (
        *("vision_start_token_id", "vision_end_token_id", "audio_end_token_id", "seconds_per_chunk"),
        # The published checkpoint states these keys, which transformers ignores.
        *(f"{section}_config.tie_word_embeddings" for section in ("audio", "text", "vision")),
        *(f"text_config.{name}" for name in ("shared_expert_intermediate_size", "use_qk_norm", "use_sliding_window")),
        *(f"vision_config.{name}" for name in ("apply_vit_abs_pos_embed", "image_size", "in_chans")),
        *(f"vision_config.{name}" for name in ("spatial_patch_size", "tokens_per_second")),
    )
