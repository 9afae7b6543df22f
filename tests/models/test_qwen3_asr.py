"""Tests for Qwen3-ASR against transformers, on random weights."""

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
)

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import tone
from tests.models.contract import FamilyContract, refusals
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import read_model, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

NAMES = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *NAMES.values())
WEIGHTS = {"initializer_range": 0.1}  # large enough for clips to change the logits far beyond the tolerance
CHAT_TEMPLATE = (
    "<|im_start|>system\n{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}<|im_end|>\n"
    "<|im_start|>user\n{% for m in messages if m.content is not string %}{% for part in m.content %}"
    "{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endif %}{% endfor %}{% endfor %}"
    "<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BINS, CONTEXT = 16, 2048
"""Mel bins, and tokens of the context, in which a clip of 157 s fits."""


class Reference(BaseReference):
    markers: ClassVar = {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"}

    def inputs(self, items):
        clips = [item["audio"] for item in items if "audio" in item]
        return self.processor(text=[self.text(items)], audio=clips or None, return_tensors="pt")


class TestQwen3ASR(FamilyContract):
    name = "qwen3_asr"
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "a clip": [{"text": "Listen: "}, {"audio": tone(1.53)}, {"text": "What is it?"}],
        "a short clip": [{"audio": tone(0.03, hertz=900)}, {"text": "?"}],
        "whole chunks": [{"text": "Hark"}, {"audio": tone(2.0)}],
        "several windows": [{"audio": tone(19.37)}, {"text": "?"}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out,
            TOKENS,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            extra_special_tokens=NAMES,
            chat_template=CHAT_TEMPLATE,
        )
        ids = tokenizer.convert_tokens_to_ids
        Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=BINS), tokenizer).save_pretrained(out)
        config = Qwen3ASRConfig(
            audio_config={
                "num_mel_bins": BINS,
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "n_window_infer": 400,
                "downsample_hidden_size": 8,
                "output_dim": 64,
                **WEIGHTS,
            },
            text_config={
                "vocab_size": 400,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 128,
                "max_position_embeddings": CONTEXT,
                **WEIGHTS,
            },
            audio_token_id=ids("<|audio_pad|>"),
        )
        save_model(out, Qwen3ASRForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))

    @classmethod
    def make_reference(cls, path):
        return Reference(
            read_model(Qwen3ASRForConditionalGeneration, path),
            Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=BINS), AutoTokenizer.from_pretrained(path)),
        )

    def test_a_clip_that_exceeds_the_context_is_refused(self, tokenizer, path_file):
        with pytest.raises(LimitExceeded, match=r"lasts 158\.0 s; the limit of this model is 157 s\. Cut the clip"):
            tokenizer.tokenize([{"audio": np.zeros(158 * 16_000, np.float32)}], path_file)

    def test_a_second_clip_is_refused_as_by_the_reference(self, tokenizer, path_file):
        with pytest.raises(InputError, match="2 items of kind audio; the model's limit is 1"):
            tokenizer.tokenize([{"audio": tone(0.6)}] * 2, path_file)

    def test_a_long_clip_equals_the_reference(self, reference, model, tokenizer, path_file):
        """The spectrogram is computed in two pieces."""
        items = [{"audio": tone(40.01)}, {"text": "?"}]
        ids = tokenizer.tokenize(items, path_file)
        assert (
            plain_ids(ids.numpy(), model.read(ids.numpy())).tolist() == reference.inputs(items)["input_ids"][0].tolist()
        )
        assert (self.logits(model, ids) - reference.logits(items)).abs().max() <= self.tolerance

    test_other_chunks_are_refused = refusals(
        [("config", {"audio_config": {"num_mel_bins": BINS, "n_window": 25}}, "n_window is 25; only 50 is supported")]
    )

    def test_the_original_layout_gives_the_same_logits(self, path, model, tokenizer, tmp_path, path_file):
        original(path, tmp_path / "original")
        family = family_of(checkpoint := Checkpoint.open(tmp_path / "original"))
        assert family.unknown_keys(checkpoint) == []
        checkpoint.config["thinker_config"]["text_config"]["widht"] = 1
        assert family.unknown_keys(checkpoint) == ["thinker_config.text_config.widht"]
        other = load_model(tmp_path / "original", device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(tmp_path / "original") as own:
            for name in ("text", "a clip"):
                expected = tokenizer.tokenize(self.prompts[name], path_file)
                ids = own.tokenize(self.prompts[name], path_file)
                assert (other.logits(ids) - model.logits(expected).cpu()).abs().max() <= self.tolerance

    def test_a_forced_aligner_is_refused(self, path, tmp_path):
        out = original(path, tmp_path / "original")
        config = json.loads((out / "config.json").read_text())
        config["thinker_config"]["classify_num"] = 5000
        save_json(out, config=config)
        self.assert_refused(out, "classify_num; a forced aligner")


def original(path, out):
    """Write the checkpoint `path` in the layout of Qwen/Qwen3-ASR-1.7B, with the keys of its config.json."""
    shutil.copytree(path, out)
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": "default", "interleaved": True, "mrope_interleaved": True, "mrope_section": [2, 3, 3]}
    text = {**config["text_config"], "model_type": "qwen3_asr_text", "tie_word_embeddings": True}
    theta = text.pop("rope_parameters")["rope_theta"]
    audio = {**config["audio_config"], "model_type": "qwen3_asr_audio_encoder"}
    audio.pop("max_position_embeddings")
    thinker = {
        "model_type": "qwen3_asr_thinker",
        "audio_config": {**audio, "max_source_positions": 1500, "conv_chunksize": 500},
        "audio_token_id": config["audio_token_id"],
        "audio_start_token_id": TOKENS.index("<|audio_start|>"),
        "audio_end_token_id": TOKENS.index("<|audio_end|>"),
        "initializer_range": 0.02,
        "text_config": {**text, "rope_theta": theta, "rope_scaling": rope, "num_experts": 128, "mlp_only_layers": []},
    }
    save_json(
        out,
        config={
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": "qwen3_asr",
            "support_languages": ["Chinese", "English"],
            "thinker_config": thinker,
        },
        preprocessor_config={"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": BINS},
    )
    (out / "processor_config.json").unlink()
    weights = load_file(out / "model.safetensors")
    renamed = {}
    for name, weight in weights.items():
        for old, new in (
            ("model.language_model.", "thinker.model."),
            ("model.multi_modal_projector.linear_", "thinker.audio_tower.proj"),
            ("model.audio_tower.", "thinker.audio_tower."),
            ("lm_head.", "thinker.lm_head."),
        ):
            if name.startswith(old):
                renamed[name.replace(old, new)] = weight
    assert len(renamed) == len(weights)
    save_file(renamed, out / "model.safetensors", {"format": "pt"})
    return out
