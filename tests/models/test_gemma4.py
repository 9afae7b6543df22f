"""Tests for Gemma 4 against transformers, on random weights."""

from __future__ import annotations

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
)

from mindie_mm.engine.core import Engine
from mindie_mm.errors import InputError, MediaError
from mindie_mm.inputs import Media
from mindie_mm.models import load_model
from mindie_mm.nn.paged_cache import KVLayer, SharedLayer
from mindie_mm.settings.config import EngineConfig
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import tone
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, clip, noise, refusals, run
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import changed, read_model, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

NAMES = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
}
TOKENS = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", *NAMES.values(), "<|video|>")
TEXT = {
    "attention_bias": False,
    "attention_k_eq_v": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.1,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 8192,
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "pad_token_id": 0,
    "sliding_window": 16,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size": 400,
    "vocab_size_per_layer_input": 400,
}
VISION = {
    "head_dim": 8,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 64,
    "model_type": "gemma4_vision",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 400,
    "use_clipped_linears": True,
}
AUDIO = {
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "model_type": "gemma4_audio",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "output_proj_dims": 48,
    "subsampling_conv_channels": [64, 8],
}
PIXELS = {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}


def write(out, text=None, vision=None, pixels=None, **settings):
    tokenizer = save_tokenizer(
        out, TOKENS, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", extra_special_tokens=NAMES
    )
    ids = tokenizer.convert_tokens_to_ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids("<bos>"))]
    )
    tokenizer.save_pretrained(out)
    tokens = {"boi_token_id": ids("<|image>"), "eoi_token_id": ids("<image|>"), "image_token_id": ids("<|image|>")}
    tokens |= {"boa_token_id": ids("<|audio>"), "eoa_token_index": ids("<audio|>"), "audio_token_id": ids("<|audio|>")}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**TEXT, **(text or {})},
        "vision_config": {**VISION, **(vision or {})},
        "audio_config": AUDIO,
        "video_token_id": ids("<|video|>"),
        **tokens,
        **settings,
    }
    Gemma4Processor(
        Gemma4AudioFeatureExtractor(feature_size=64),
        Gemma4ImageProcessor(**PIXELS, **(pixels or {})),
        AutoTokenizer.from_pretrained(out),
        Gemma4VideoProcessor(**PIXELS, num_frames=4),
    ).save_pretrained(out)
    save_json(out, config=config)
    save_model(out, randomized, Gemma4Config.from_pretrained(out), [ids("<eos>"), ids("<turn|>")], ids("<pad>"))
    save_json(out, config=config)


def randomized(config):
    """Return a model with random weights where transformers initializes them to constants."""
    model = Gemma4ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "position_embedding_table", "per_dim_scale")):
            torch.nn.init.normal_(weight, 0.5 if "language_model.layers" in name and "_norm." in name else 1.0, 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("_max", "_min")):
            buffer.fill_(5.0 if name.endswith("_max") else -5.0)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3)
    # The head shares the embedding's weights. Larger weights would make the model repeat the same token forever.
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, 0.0, 0.05)
    return model


class Reference(BaseReference):
    markers: ClassVar = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}

    def __init__(self, path):
        model = read_model(Gemma4ForConditionalGeneration, path)
        super().__init__(model, Gemma4Processor.from_pretrained(path))

    def inputs(self, items):
        given = {
            "images": [Image.fromarray(item["image"]) for item in items if "image" in item],
            "videos": [item["video"] for item in items if "video" in item],
            "audio": [item["audio"] for item in items if "audio" in item],
        }
        given = {name: media for name, media in given.items() if media}
        sampling = {"do_sample_frames": False} if "videos" in given else {}
        return self.processor(text=[self.text(items)], return_tensors="pt", **given, **sampling)


PROMPTS = {
    **{name: IMAGE_PROMPTS[name] for name in ("text", "one image", "a long image")},
    "a video": [{"text": "Watch: "}, {"video": clip(3, 60, 80)}, {"text": "What happens?"}],
    "an audio clip": [{"audio": tone(0.61)}, {"text": "What is said?"}],
    "everything": [
        {"audio": tone(0.3)},
        {"image": noise(50, 70)},
        {"text": " and "},
        {"video": clip(2, 40, 40)},
        {"audio": tone(0.9)},
        {"text": "?"},
    ],
}


class TestGemma4(ExtremeShapes, FamilyContract):
    name = "gemma4"
    reference_class = Reference
    prompts: ClassVar = PROMPTS
    settings_file = "processor_config.json"
    ignored_options: ClassVar = ("fps",)

    @classmethod
    def write_checkpoint(cls, out):
        write(out)

    def test_settings_of_the_large_models_without_audio(self, tmp_path, path_file):
        """Their keys are values, too, and images are bidirectional in layers with a window. One is a mixture."""
        text = {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "top_k_experts": 2,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
        }
        write(tmp_path, text, {"standardize": True}, audio_config=None)
        self.prompts = {name: PROMPTS[name] for name in ("one image", "a video")}
        reference, model = Reference(tmp_path), load_model(tmp_path, device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(tmp_path) as tokenizer:
            tokenized = {name: tokenizer.tokenize(items, path_file) for name, items in self.prompts.items()}
            self.test_ids_and_arrays_equal_the_references(reference, model, tokenized)
            self.test_logits_equal_the_references(reference, model, tokenized)
            self.assert_packs(reference, model, tokenized)
            engine = Engine(model, EngineConfig(max_num_batched_tokens=160))
            outputs, errors = run(engine, [*tokenized.values()], max_tokens=8)
            assert not errors
            assert [*outputs.values()] == [reference.generate(items, 8) for items in self.prompts.values()]
            with pytest.raises(InputError, match="does not accept audio inputs; it accepts image, video"):
                tokenizer.tokenize(PROMPTS["an audio clip"], path_file)

    def test_weights_of_layers_that_read_other_keys_are_not_needed(self, path, reference, path_file, tmp_path):
        """Published checkpoints contain them."""
        out = shutil.copytree(path, tmp_path / "other")
        weights = load_file(path / "model.safetensors")
        names = [name for name in weights if name.startswith("model.language_model.layers.1.self_attn.k_")]
        assert names
        weights |= {name.replace("layers.1", "layers.3"): weights[name].clone() for name in names}
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        self.prompts = {"text": PROMPTS["text"]}
        self.assert_same(out, reference, path_file)

    def test_layers_have_their_own_keys_or_those_of_an_earlier_layer(self, model):
        first, second, *others = model.spec.layers
        assert (first, second) == (KVLayer(2, 16), KVLayer(2, 32))
        assert others == [SharedLayer(0), SharedLayer(1)]
        cache = model.spec.allocate_cache(2, 4)
        assert cache.keys[2] is cache.keys[0]
        assert cache.values[3] is cache.values[1]
        assert model.spec.kv_token_bytes == 4 * 2 * 2 * (16 + 32)

    def test_a_clip_shorter_than_a_frame_is_refused(self, processor, reference):
        frames = []
        for length in (160, 161, 320, 321, 480, 1000, 1281):
            samples = np.zeros(length, np.float32)
            mask = reference.processor.feature_extractor([samples], return_tensors="np")["input_features_mask"]
            if mask.any():
                frames.append(processor.plan(Media("audio", samples), samples, {})[0].grid[0])
                assert frames[-1] == mask.sum()
            else:
                with pytest.raises(MediaError, match=f"{length} samples at 16000 Hz; it must have at least 161"):
                    processor.plan(Media("audio", samples), samples, {})
        assert len(frames) == 6

    def test_embeddings_of_text_are_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match="prompt_embeds are not supported"):
            tokenizer.tokenize([{"prompt_embeds": torch.zeros(3, 64)}], path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"image_token_id": 2}, "image_token_id is 2, but .* is 6"),
            ("config", {"video_token_id": 2}, "video_token_id is 2, but .* is 11"),
            ("config", {"vision_config": None}, "there is no vision_config"),
            ("config", {"text_config": {**TEXT, "use_bidirectional_attention": "all"}}, "is 'all'"),
            ("config", {"vision_config": {**VISION, "pooling_kernel_size": 3}}, "pooling_kernel_size is 2; only 3"),
            (
                "config",
                {"audio_config": {**AUDIO, "subsampling_conv_channels": [32, 8]}},
                "feature_size is 64; only 32",
            ),
        ]
    )

    @pytest.mark.parametrize(
        ("part", "change", "named"),
        [
            ("image_processor", {"max_soft_tokens": 100}, "max_soft_tokens is 100"),
            ("video_processor", {"patch_size": 16}, "patch_size is 16; only 4"),
            ("feature_extractor", {"dither": 0.1}, "dither is 0.1"),
        ],
    )
    def test_unsupported_preprocessing_is_refused_by_name(self, part, change, named, path, tmp_path):
        settings = json.loads((path / "processor_config.json").read_text())[part] | change
        self.assert_refused(changed(path, tmp_path / "other", "processor_config", {part: settings}), named)
