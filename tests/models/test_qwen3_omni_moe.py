"""Tests for Qwen3-Omni's thinker against transformers, on random weights."""

import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeProcessor, Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers import WhisperFeatureExtractor as FeatureExtractor

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import tone
from tests.models.contract import FamilyContract, clip
from tests.models.small_checkpoints import read_model, save_json, save_model, save_tokenizer
from tests.models.test_qwen2_5_omni import CHAT_TEMPLATE, FILMS, NAMES, TOKENS
from tests.models.test_qwen2_5_omni import Reference as Qwen25Reference
from tests.models.test_qwen2_5_omni import TestFilms as FilmsContract
from tests.models.test_qwen2_5_omni import TestQwen25Omni as Qwen25Contract
from tests.transformers_reference import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

BINS, CONTEXT = 16, 4096
WEIGHTS = {"initializer_range": 0.1}
PIXELS = {"patch_size": 16, "min_pixels": 4096, "max_pixels": 200_000}
VIDEO_SIZE = {"shortest_edge": 64 * 64, "longest_edge": 128 * 160}
TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
    **WEIGHTS,
}
AUDIO = {
    "num_mel_bins": BINS,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "n_window_infer": 200,
    "downsample_hidden_size": 8,
    "output_dim": 64,
    **WEIGHTS,
}
VISION = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
    **WEIGHTS,
}


class SmallVideosProcessor(Qwen3OmniMoeProcessor):
    """Reference processor that accepts small videos and transforms each clip as if it were alone."""

    videos_kwargs: ClassVar = {"size": VIDEO_SIZE}

    def _process_audio(self, audio, **kwargs):
        found = [super(SmallVideosProcessor, self)._process_audio([one], **kwargs) for one in audio]
        longest = max(one["input_features"].shape[-1] for one, _ in found)

        def padded(name):
            rows = [np.asarray(one[name]) for one, _ in found]
            return torch.from_numpy(
                np.concatenate(
                    [np.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, longest - row.shape[-1])]) for row in rows]
                )
            )

        counts = torch.cat([torch.as_tensor(one["num_audio_tokens"]) for one, _ in found])
        arrays = {name: padded(name) for name in ("input_features", "feature_attention_mask")}
        return {**arrays, "num_audio_tokens": counts}, [text for _, texts in found for text in texts]


def encoding_each_clip_alone(model):
    """Change the reference `model` so that it encodes each clip as if it were alone, and return the model."""
    whole = model.model.get_audio_features

    def each(input_features, feature_attention_mask=None, audio_feature_lengths=None, **kwargs):
        pairs = zip(input_features, feature_attention_mask, strict=True)
        found = [whole(one[None], mask[None], None, **kwargs) for one, mask in pairs]
        found[0].last_hidden_state = torch.cat([one.last_hidden_state for one in found])
        found[0].pooler_output = found[0].last_hidden_state
        return found[0]

    model.model.get_audio_features = each
    return model


def write_checkpoint(out):
    tokenizer = save_tokenizer(
        out,
        TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMES,
        chat_template=CHAT_TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids
    SmallVideosProcessor(
        Qwen2VLImageProcessor(**PIXELS),
        Qwen2VLVideoProcessor(**PIXELS),
        FeatureExtractor(feature_size=BINS),
        AutoTokenizer.from_pretrained(out),
    ).save_pretrained(out)
    file = out / "processor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "videos_kwargs": SmallVideosProcessor.videos_kwargs}))
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=AUDIO,
        vision_config=VISION,
        text_config=TEXT,
        image_token_id=ids("<|IMAGE|>"),
        video_token_id=ids("<|VIDEO|>"),
        audio_token_id=ids("<|AUDIO|>"),
        vision_start_token_id=ids("<|vision_bos|>"),
        vision_end_token_id=ids("<|vision_eos|>"),
        audio_start_token_id=ids("<|audio_bos|>"),
        audio_end_token_id=ids("<|audio_eos|>"),
        position_id_per_seconds=13,
    )
    save_model(out, Qwen3OmniMoeThinkerForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))


def make_reference(path):
    return Qwen25Reference(
        encoding_each_clip_alone(read_model(Qwen3OmniMoeThinkerForConditionalGeneration, path)),
        SmallVideosProcessor(
            Qwen2VLImageProcessor.from_pretrained(path),
            Qwen2VLVideoProcessor.from_pretrained(path),
            FeatureExtractor.from_pretrained(path),
            AutoTokenizer.from_pretrained(path),
        ),
    )


class TestQwen3OmniMoe(FamilyContract):
    name = "qwen3_omni_moe"
    chooses_experts = True
    prompts: ClassVar = {
        **{name: Qwen25Contract.prompts[name] for name in ("text", "one image", "one clip", "two clips", "all")},
        "a video": [{"video": clip(6, 96, 128)}, {"text": "Which way?"}],
        "several windows": [{"audio": tone(5.37)}, {"text": "?"}],
        "audio, then video": [{"audio": tone(0.4)}, {"video": clip(4, 96, 64)}, {"text": "?"}],
    }
    assert_arrays = Qwen25Contract.assert_arrays
    assert_positions = Qwen25Contract.assert_positions

    @classmethod
    def write_checkpoint(cls, out):
        write_checkpoint(out)

    @classmethod
    def make_reference(cls, path):
        return make_reference(path)

    @pytest.mark.parametrize("name", ["all", "a video", "one image", "audio, then video"])
    def test_positions_equal_the_references(self, name, reference, model, tokenized):
        self.assert_positions(reference, model, tokenized[name], reference.inputs(self.prompts[name]))

    def test_clips_that_are_too_long_or_too_short_are_refused(self, tokenizer, path_file):
        with pytest.raises(LimitExceeded, match=r"lasts 320\.0 s; the limit of this model is 315 s\. Cut the clip"):
            tokenizer.tokenize([{"audio": np.zeros(320 * 16_000, np.float32)}], path_file)
        with pytest.raises(MediaError, match=r"the audio clip has 319 samples .*; it must have at least 320"):
            tokenizer.tokenize([{"audio": tone(1)[:319]}], path_file)

    def test_the_thinker_of_a_whole_checkpoint_is_served(self, path, model, tokenized, tmp_path, path_file):
        """Published checkpoints also have the weights of the talker and of the vocoder."""
        for file in path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((path / "config.json").read_text())
        save_json(
            tmp_path,
            config={
                "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
                "model_type": "qwen3_omni_moe",
                "enable_audio_output": True,
                "thinker_config": {**config, "seconds_per_chunk": 2},
                "talker_config": {},
                "code2wav_config": {},
            },
        )
        weights = {f"thinker.{name}": weight for name, weight in load_file(path / "model.safetensors").items()}
        weights |= {"talker.model.norm.weight": torch.ones(3), "code2wav.code_embedding.weight": torch.ones(3)}
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        family = family_of(checkpoint := Checkpoint.open(tmp_path))
        assert family is family_of(Checkpoint.open(path))
        assert family.unknown_keys(checkpoint) == []
        other = load_model(tmp_path, device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(tmp_path) as tokenizer:
            found = other.logits(tokenizer.tokenize(self.prompts["all"], path_file))
        assert (found - self.logits(model, tokenized["all"])).abs().max() <= self.tolerance


class TestQwen3Films(FilmsContract):
    contract = TestQwen3OmniMoe
    test_audio_above_the_window_is_refused = None  # the window is the context

    @pytest.mark.parametrize("fps", [None, 0.5, 1.0, 2.0])
    @pytest.mark.parametrize("name", FILMS)
    def test_ids_and_positions_equal_the_references(self, name, fps, reference, model, tokenizer, path_file):
        self.assert_positions(name, fps, reference, model, tokenizer, path_file)

    @pytest.mark.parametrize("fps", [0.7, 3.0, 4.0])
    @pytest.mark.parametrize("name", FILMS)
    def test_fractions_of_positions_are_rounded_down(self, name, fps, reference, model, tokenizer, path_file):
        inputs = self.inputs(reference, name, fps)
        ids = tokenizer.tokenize(self.prompt(name, fps), path_file).numpy()
        items = model.read(ids)
        assert plain_ids(ids, items).tolist() == inputs["input_ids"][0].tolist()
        found = model.positions(len(ids), items).prompt
        expected, _ = reference.model.model.get_rope_index(
            inputs["input_ids"],
            None,
            inputs["video_grid_thw"],
            attention_mask=inputs["attention_mask"],
            use_audio_in_video=True,
            audio_seqlens=inputs["feature_attention_mask"].sum(-1),
            second_per_grids=inputs["video_second_per_grid"],
        )
        assert (expected[:, 0] - found).abs().max() < 1


del FilmsContract, Qwen25Contract  # pytest would collect them again
