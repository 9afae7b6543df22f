"""Qwen3-ASR: speech recognition with the audio encoder of Qwen3-Omni and the decoder of Qwen3.

Source: arXiv 2601.21337. Token ids and spectrograms match transformers' `qwen3_asr`. A clip may be as long as the
context allows. Checkpoints may have transformers' layout, or the layout of Qwen's first repositories, whose config.json
has a section `thinker_config`. The second layout is translated in memory by the rules of transformers'
convert_qwen3_asr_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.models._chunked_encoder import check_encoder, chunked_length, encode_clips, longest_clip
from mindie_mm.models._clips import SPECTROGRAM, ClipProcessor, Clips, read_mel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.renaming import Renaming
from mindie_mm.nn.family import Placeholder
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config

_DEFAULTS: Mapping[str, Any] = {"feature_size": 128, "min_length": 8000}
_ANSWER_START = "<asr_text>"
"""Token between the language of an answer and the transcript."""
_WRITES_ASSISTANT = re.compile(r"""['"]assistant['"]|role['"\]]*\s*(?:\+|-?\}\})""")
"""Pattern of a template that compares a role with the assistant's, or writes roles."""
_LAST_MESSAGE = (
    "{% if messages[-1].role == 'assistant' and not add_generation_prompt %}<|im_start|>assistant\n"
    "{{ messages[-1].content }}<|im_end|>\n{% endif %}"
)
_THINKER = "thinker_config"
_MROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved", "interleaved"})
"""Rotary settings without effect, because all axes of a position are equal in a prompt of text and audio clips."""
_RENAMINGS = (
    Renaming(r"model\.language_model\.(.+)", r"thinker.model.\1"),
    Renaming(r"model\.multi_modal_projector\.linear_(\d)\.(.+)", r"thinker.audio_tower.proj\1.\2"),
    Renaming(r"model\.(.+)", r"thinker.\1"),
    Renaming(r"lm_head\.(.+)", r"thinker.lm_head.\1"),
)


class Qwen3ASRProcessor(ClipProcessor):
    """Processor for Qwen3-ASR."""

    traits = Traits(max_items={"audio": 1})
    mask = "input_features_mask"

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = _translated(checkpoint)
        config = read_config("Qwen3ASRConfig", checkpoint)
        check_encoder(config.audio_config, str(checkpoint.path))
        classes = dict.fromkeys(("Qwen3ASRFeatureExtractor", "WhisperFeatureExtractor"), _DEFAULTS)
        mel = read_mel(checkpoint, config.audio_config, classes)
        longest = longest_clip(config.text_config.max_position_embeddings)
        self.clips = Clips(
            replace(mel, pads=False, max_samples=longest * mel.hop),
            chunked_length,
            least_frames=1,
            chunk=2 * config.audio_config.n_window,
        )
        self.feature_width = config.text_config.hidden_size
        before, after = (_marker_id(checkpoint, end) for end in ("start", "end"))
        self.placeholders = {"audio": Placeholder((before,), config.audio_token_id, (after,))}

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template. A template that leaves out the assistant's messages also writes the last one.

        The first repositories append the language of the answer to the rendered prompt instead.
        """
        source = super().template(own, tokenizers, kinds)
        return source if source is None or _WRITES_ASSISTANT.search(source) else source + _LAST_MESSAGE

    @property
    def speech(self) -> SpeechTraits:
        from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME  # imported late: slow

        return SpeechTraits(
            window_s=self.clips.window_s,
            transcribe="",
            translate=None,
            languages=LANGUAGE_CODE_TO_NAME,
            with_prompt="{prompt}",
            prompt_role="system",
            opening=f"language {{language}}{_ANSWER_START}",
            answer_start=_ANSWER_START,
        )


class Qwen3ASRModel(PretrainedModel):
    """The Qwen3-ASR model. `module` is transformers' `Qwen3ASRForConditionalGeneration`."""

    traits = Traits(projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Qwen3ASRProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        clips = [to_device(item.view, SPECTROGRAM, self.spec.device).to(self.spec.dtype) for item in items]
        hidden = encode_clips(self.module.model.audio_tower, clips, pads=True)
        features: Tensor = self.module.model.multi_modal_projector(hidden)
        return list(features.split([item.shape.num_features for item in items]))


class Qwen3ASR(PretrainedFamily):
    """Qwen3-ASR (Qwen Team, 2026, arXiv 2601.21337), run by transformers' modules."""

    model_types = ("qwen3_asr",)
    published = "Qwen/Qwen3-ASR-1.7B"
    kinds = ("audio",)
    processor = Qwen3ASRProcessor
    module_name = "Qwen3ASRForConditionalGeneration"
    model_class = Qwen3ASRModel
    other_keys = (
        *("support_languages", "audio_start_token_id", "audio_end_token_id"),
        # The original code ignores these keys, most of which belong to mixtures of experts.
        *("audio_config.max_source_positions", "audio_config.conv_chunksize", "audio_config.tie_word_embeddings"),
        *(f"text_config.{name}" for name in ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size")),
        *(f"text_config.{name}" for name in ("norm_topk_prob", "num_experts", "num_experts_per_tok")),
        *(f"text_config.{name}" for name in ("output_router_logits", "router_aux_loss_coef")),
    )

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        names = super().unknown_keys(replace(_translated(checkpoint), renamings=None))
        prefix = f"{_THINKER}." if _THINKER in checkpoint.config else ""
        return [prefix + name if "." in name else name for name in names]

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return _translated(checkpoint)


def _marker_id(checkpoint: Checkpoint, end: str) -> int:
    """Return the id of the token before (start) or after (end) a clip."""
    stated = checkpoint.config.get(f"audio_{end}_token_id")
    return checkpoint.token_id(f"<|audio_{end}|>") if stated is None else stated


def _translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout. Raise UnsupportedCheckpoint for the forced aligner."""
    thinker = checkpoint.config.get(_THINKER)
    if checkpoint.renamings is not None or not isinstance(thinker, dict):
        return checkpoint
    if "classify_num" in thinker:
        raise UnsupportedCheckpoint(
            f"{checkpoint.path}: {_THINKER} has classify_num; a forced aligner, which classifies time stamps, does not "
            "generate text and is not supported"
        )
    audio = {**thinker.get("audio_config", {}), "model_type": "qwen3_asr_encoder"}
    text = {**thinker.get("text_config", {}), "model_type": "qwen3"}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rotary := text.get(name), dict):
            text[name] = {key: value for key, value in rotary.items() if key not in _MROPE_KEYS}
    config = {
        **{key: value for key, value in checkpoint.config.items() if key != _THINKER},
        **{key: value for key, value in thinker.items() if key.startswith("audio_")},
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "audio_config": audio,
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
    }
    return checkpoint.translated(config, {}, _RENAMINGS)
