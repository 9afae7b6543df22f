"""Tests for Kimi K2.5 against transformers, on random weights."""

import base64
import json
import shutil
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Kimi_K25ImageProcessor,
    Kimi_K25Processor,
    Kimi_K25VideoProcessor,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_named, load_model
from mindie_mm.models._latent_attention import PretrainedLatentAttention
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.tokenize import Tokenizer
from tests.media_samples import decode_all, encode_video, moving_frames
from tests.models.contract import ExtremeShapes, FamilyContract, clip, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer, VideoMetadata

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    "{% elif part['type'] == 'video' %}<|kimi_k25_video_placeholder|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>{% endif %}"
)
TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
}
VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
    "initializer_range": 0.2,
}


class Reference(PretrainedReference):
    markers: ClassVar = {
        "image": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        "video": "<|kimi_k25_video_placeholder|>",
    }
    model_class = Kimi_K25ForConditionalGeneration
    processor_class = Kimi_K25Processor
    parts = (Kimi_K25ImageProcessor, AutoTokenizer, Kimi_K25VideoProcessor)

    def __init__(self, path):
        """Run the tower on each chunk. By itself, the model fails for chunks of several frames."""
        super().__init__(path)
        self._run_chunks(self.model)

    def in_bfloat16(self):
        half = super().in_bfloat16()
        self._run_chunks(half.model)
        return half

    def _run_chunks(self, model):
        def of_images(pixel_values, image_grid_thw, **_):
            parts = pixel_values.split(image_grid_thw.prod(-1).tolist())
            pooled = [
                model.model.vision_tower(*pair).pooler_output
                for pair in zip(parts, image_grid_thw[:, None], strict=True)
            ]
            return BaseModelOutputWithPooling(
                pooler_output=[model.model.mm_projector(one).squeeze(1) for one in pooled]
            )

        def of_videos(pixel_values_videos, video_grid_thw, **_):
            return of_images(pixel_values_videos, video_grid_thw)

        model.model.get_image_features, model.model.get_video_features = of_images, of_videos


class TestKimiK25(ExtremeShapes, FamilyContract):
    name = "kimi_k25"
    reference_class = Reference
    chooses_experts = True
    int8_tolerance = 0.15  # the tower and the latents are narrow
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a video": [{"video": clip(4, 64, 100)}, {"text": "Which way?"}],
        "mixed": [
            {"image": noise(61, 83)},
            {"text": "then"},
            {"video": clip(6, 30, 20)},
            {"text": "then"},
            {"image": noise(28, 28)},
        ],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="[PAD]", chat_template=CHAT_TEMPLATE
        )
        ids = tokenizer.convert_tokens_to_ids
        config = Kimi_K25Config(
            text_config=TEXT,
            vision_config=VISION,
            projection_hidden_size=VISION["hidden_size"],
            image_token_id=ids("<|media_pad|>"),
            video_token_id=ids("<|kimi_k25_video_placeholder|>"),
            vision_start_token_id=ids("<|media_begin|>"),
            vision_end_token_id=ids("<|media_end|>"),
            tie_word_embeddings=False,
        )
        save_model(out, Kimi_K25ForConditionalGeneration, config, ids("<|im_end|>"), ids("[PAD]"))
        settings = {"size": {"max_height": 24, "max_width": 24}, "max_patches": 128}
        images = {**settings, "image_processor_type": "Kimi_K25ImageProcessor"}
        videos = {**settings, "max_patches": 32, "video_processor_type": "Kimi_K25VideoProcessor"}
        save_json(out, preprocessor_config=images, video_preprocessor_config=videos)

    test_a_changed_setting_is_refused = refusals(
        [
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"size": {"max_height": 4}}, "must have max_height and an equal max_width"),
            ("video_preprocessor_config", {"temporal_patch_size": 5}, "takes at most 4 frames"),
            ("video_preprocessor_config", {"patch_size": 16}, "patch_size is 16"),
            ("config", {"projection_hidden_size": 9}, "projection_hidden_size"),
        ]
    )

    @pytest.mark.parametrize(("frames", "fps"), [(20, Fraction(4)), (31, Fraction(30000, 1001)), (1, Fraction(2))])
    def test_frames_are_sampled_and_timed_as_the_reference_does(
        self, frames, fps, reference, model, tokenizer, path_file
    ):
        data = encode_video(moving_frames(frames, width=84, height=60), fps=fps)
        expected = reference.processor(
            text=[reference.markers["video"] + "Which way?"],
            videos=[torch.from_numpy(decode_all(data)).permute(0, 3, 1, 2)],
            video_metadata=[VideoMetadata(frames, float(fps), duration=frames / float(fps))],
            return_tensors="pt",
        )
        ids = tokenizer.tokenize([{"video": data}, {"text": "Which way?"}], path_file)
        items = model.read(ids.numpy())
        assert plain_ids(ids.numpy(), items).tolist() == expected["input_ids"][0].tolist()
        self.assert_arrays(expected, items, model)

    def test_no_image_has_more_features_than_the_largest(self, processor):
        for kind, sizes in processor.sizes.items():
            height, width = processor._largest[kind]
            most = sizes.tokens(height, width)
            for near in range(1, 400, 3):
                assert all(sizes.tokens(near, far) <= most for far in (*range(1, 400, 7), 2000, 19_000))

    def test_the_cache_holds_one_latent_per_token(self, model):
        assert {(layer.num_kv_heads, *layer.widths) for layer in model.spec.layers} == {(1, 24 + 8, 24)}

    def test_the_published_layout_gives_the_same_logits(self, path, model, tokenized, path_file, tmp_path):
        """The vocabulary has no id for videos, whose features then replace the token of images."""
        write_published(path, tmp_path / "own")
        own = load_model(tmp_path / "own", device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(tmp_path / "own") as tokenizer:
            for name, items in self.prompts.items():
                ids = tokenizer.tokenize(items, path_file)
                plain = plain_ids(ids.numpy(), own.read(ids.numpy()))
                expected = plain_ids(tokenized[name].numpy(), model.read(tokenized[name].numpy()))
                assert plain.tolist() == [11 if index == 12 else index for index in expected.tolist()]
                torch.testing.assert_close(
                    self.logits(own, ids), self.logits(model, tokenized[name]).cpu(), rtol=1e-4, atol=1e-4
                )

    def test_settings_of_the_published_layout_are_known_or_refused(self, path, tmp_path):
        published = write_published(path, tmp_path / "own")
        family, config = family_named(self.name), json.loads((published / "config.json").read_text())
        assert family.unknown_keys(Checkpoint.open(published)) == []
        config["vision_config"]["merge_type"] = "other"
        (published / "config.json").write_text(json.dumps(config))
        self.assert_refused(published, "vision_config.merge_type is 'other'")

    def test_quantized_latent_projections_are_refused(self, model):
        own = DeepseekV3Attention(model.module.config.text_config, 0)
        own.kv_b_proj.weight.data = own.kv_b_proj.weight.data.to(torch.float8_e4m3fn)
        own.kv_b_proj.weight.requires_grad_(False)
        own.kv_b_proj.__class__ = type("Quantized", (torch.nn.Linear,), {})
        with pytest.raises(UnsupportedCheckpoint, match="kv_b_proj of layer 0 is quantized"):
            PretrainedLatentAttention(own)

    def test_a_vocabulary_of_tiktoken_is_split_as_by_the_published_code(self, path, tmp_path):
        published = write_published(path, tmp_path / "own")
        (published / "tokenizer.json").unlink()
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [b"En", b"gl", b"ish", b"Engl", b"English", "中".encode()[:2], "中".encode(), "文".encode()]
        lines = (b" ".join((base64.b64encode(token), b"%d" % rank)) for rank, token in enumerate(tokens))
        (published / "tiktoken.model").write_bytes(b"\n".join(lines))
        named = {"264": "[BOS]", "266": "<|im_end|>", "270": "<|media_pad|>"}
        decoder = {index: {"content": token, "special": True} for index, token in named.items()}
        settings = {"added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "<|im_end|>"}
        (published / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = family_named(self.name).tokenizer(Checkpoint.open(published))
        assert tokenizer("中文English中<|media_pad|>")["input_ids"][-3:] == [260, 262, 270]
        assert tokenizer.convert_tokens_to_ids("<|reserved_token_265|>") == 265
        assert len(tokenizer) == 264 + 256
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
        texts = ("中文English混合 it's OK", "HTMLParser 12345  x\n\n")
        spans = [[text[slice(*span)] for _, span in split(text)] for text in texts]
        assert spans == [
            ["中文", "English", "混合", " it's", " OK"],
            ["HTMLParser", " ", "123", "45", " ", " x", "\n\n"],
        ]
        assert tokenizer.decode(tokenizer("中文 it's")["input_ids"]) == "中文 it's"
        (published / "tiktoken.model").unlink()
        with pytest.raises(UnsupportedCheckpoint, match=r"neither tiktoken\.model nor tokenizer\.json; copy"):
            family_named(self.name).tokenizer(Checkpoint.open(published))


def write_published(path, out):
    """Copy a checkpoint in the layout of moonshotai, with its names of keys, settings and weights."""
    shutil.copytree(path, out)
    config = json.loads((path / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    rope = text.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    text |= {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    text |= {
        "rope_theta": theta,
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
        "seq_aux": True,
        "ep_size": 1,
    }
    published = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": config["image_token_id"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": text,
        "vision_config": {
            "vt_hidden_size": vision["hidden_size"],
            "vt_intermediate_size": vision["intermediate_size"],
            "vt_num_attention_heads": vision["num_attention_heads"],
            "vt_num_hidden_layers": vision["num_hidden_layers"],
            "init_pos_emb_height": vision["pos_emb_height"],
            "init_pos_emb_width": vision["pos_emb_width"],
            "init_pos_emb_time": vision["pos_emb_time"],
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": vision["hidden_size"],
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "text_hidden_size": text["hidden_size"],
            "video_attn_type": "spatial_temporal",
        },
    }
    settings = {
        "in_patch_limit": 128,
        "in_patch_limit_each_frame": 32,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": 24,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "sample_fps": 2.0,
        "timestamp_mode": "hh:mm:ss.fff",
    }
    save_json(out, config=published, preprocessor_config={"media_proc_cfg": settings})
    (out / "video_preprocessor_config.json").unlink()
    weights = load_file(path / "model.safetensors")
    for made, own in (  # transformers' save_pretrained does not restore these names
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("model.mm_projector.", "mm_projector."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ):
        weights = {own + key.removeprefix(made) if key.startswith(made) else key: weights[key] for key in weights}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
