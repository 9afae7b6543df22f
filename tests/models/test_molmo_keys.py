"""Tests for each key of Molmo's configuration, including the keys of its training code."""

from typing import ClassVar

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models.molmo import configuration
from mindie_mm.nn.checkpoint.config_keys import words
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.keys_contract import IDS, KeysContract, layer_of, rms_norm, turned

FOLDER = GOLDEN / "molmo" / "d"


class TestMolmoKeys(KeysContract):
    name = "molmo"
    refused: ClassVar = {
        "vocab_size": 10**6,
        "layer_norm_type": "default",
        "layer_norm_with_affine": False,
        "attention_layer_norm_with_affine": False,
        "bias_for_layer_norm": True,
        "include_bias": True,
        "activation_type": "gelu",
        "block_type": "moe",
        "block_group_size": 2,
        "multi_query_attention": True,
        "head_dim": 64,
        "rope": False,
        "rope_impl": "interleave",
        "rope_full_precision": False,
        "alibi": True,
        "float32_attention": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "weight_tying": True,
        "normalize_input_embeds": True,
        "image_pooling_2d": "attention",
        "image_pooling_h": 3,
        "image_pooling_w": 1,
        "image_projector": "linear",
        "image_padding_embed": "regress",
        "fix_image_padding": True,
        "fix_image_input_idx": 1,
        "use_cls_feature": True,
        "unconditioned": True,
        "crop_mode": "resize",
        "overlap_margins": [2, 2],
        "pad_value": 0.5,
        "use_col_tokens": False,
        "message_formatting": "none",
        "always_start_with_space": False,
        "d_model": 128,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 3,
        "mlp_hidden_size": 320,
        "vision_backbone.image_num_key_value_heads": 2,
        "vision_backbone.image_model_type": "siglip",
        "vision_backbone.image_default_input_size": [224, 224],
        "vision_backbone.image_patch_size": 16,
        "vision_backbone.image_num_pos": 257,
        "vision_backbone.image_mlp_activations": "gelu",
        "vision_backbone.attention_dropout": 0.1,
        "vision_backbone.resize_mode": "siglip",
    }
    honoured: ClassVar = {
        "rope_theta": 100.0,
        "layer_norm_eps": 0.1,
        "norm_after": True,
        "clip_qkv": 0.3,
        "scale_logits": True,
    }
    towers: ClassVar = {
        "vit_layers": {"vit_layers": [-1, -3]},
        "vision_backbone.image_num_heads": {
            "vision_backbone.image_num_heads": 2,
            "vision_backbone.image_num_key_value_heads": None,
            "vision_backbone.image_head_dim": 32,
        },
        "vision_backbone.image_norm_eps": {"vision_backbone.image_norm_eps": 0.1},
    }
    unused: ClassVar = {
        "use_position_ids": False,
        "attention_type": "flash",
        "tie_word_embeddings": True,
        "mlp_ratio": 8,
        "max_sequence_length": 7,
        "alibi_bias_max": 4.0,
        "precision": "bf16",
        "attention_dropout": 0.5,
        "residual_dropout": 0.5,
        "embedding_dropout": 0.5,
        "response_residual_dropout": 0.5,
        "response_attention_dropout": 0.5,
        "image_feature_dropout": 0.5,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 3.0,
        "init_cutoff_factor": 3.0,
        "new_embedding_init_range": 3.0,
        "initializer_range": 3.0,
        "query_pre_attn_scalar": 100,
        "tokenizer": {"identifier": "other"},
        "pad_tokenizer": False,
        "low_cpu_fsdp": False,
        "llm_load_path": "/other",
        "vit_load_path": "/other",
        "gin_bindings": "other",
        "loss_token_weighting": "other",
        "multi_annotation_weighting": "other",
        "softmax_auxiliary_loss": True,
        "softmax_auxiliary_loss_scale": 0.1,
        "use_cache": False,
        "vision_backbone.image_pos_patch_size": 16,
        "vision_backbone.image_dropout_rate": 0.5,
        "vision_backbone.residual_dropout": 0.5,
        "vision_backbone.fsdp_wrap": True,
        "vision_backbone.initializer_range": 3.0,
    }
    sizes = words(
        "embedding_size additional_vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads",
        "num_key_value_heads max_position_embeddings qkv_bias attention_layer_norm overwrite_earlier_images",
        "vision_backbone.image_emb_dim vision_backbone.image_num_layers vision_backbone.image_head_dim",
        "vision_backbone.image_mlp_dim",
    )

    @classmethod
    def write_checkpoint(cls, out):
        write_checkpoint(FOLDER, out, drawn_weights(FOLDER))

    def reference(self, weights, config):
        eps, width, heads = config["layer_norm_eps"], config["hidden_size"], config["num_attention_heads"]
        kv_width = width // heads * config["num_key_value_heads"]
        own = layer_of(weights, "model.transformer.")
        hidden = own["wte.embedding"][IDS]
        for layer in range(config["num_hidden_layers"]):
            part = layer_of(own, f"blocks.{layer}.")

            def attended(hidden, part=part):
                mixed = linear(hidden, part["att_proj.weight"], part["att_proj.bias"])
                if config.get("clip_qkv"):
                    mixed = mixed.clip(-config["clip_qkv"], config["clip_qkv"])
                query, key, value = (
                    values.unflatten(-1, (-1, width // heads)).transpose(0, 1)
                    for values in mixed.split([width, kv_width, kv_width], -1)
                )
                query, key = turned(query, config["rope_theta"]), turned(key, config["rope_theta"])
                key, value = (values.repeat_interleave(heads // len(values), 0) for values in (key, value))
                out = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
                return linear(out, part["attn_out.weight"])

            def fed_forward(hidden, part=part):
                values, gate = linear(hidden, part["ff_proj.weight"]).chunk(2, -1)
                return linear(silu(gate) * values, part["ff_out.weight"])

            for step, scale in ((attended, part["attn_norm.weight"]), (fed_forward, part["ff_norm.weight"])):
                if config["norm_after"]:
                    hidden = hidden + rms_norm(step(hidden), scale, eps)
                else:
                    hidden = hidden + step(rms_norm(hidden, scale, eps))
        logits = linear(rms_norm(hidden, own["ln_f.weight"], eps), own["ff_out.weight"])
        return logits / width**0.5 if config.get("scale_logits") else logits

    def features(self, model):
        generator = torch.Generator().manual_seed(0)
        patches = torch.randn(2, 576, 588, generator=generator)
        with torch.no_grad():
            return model.module.model.vision_backbone(patches, torch.zeros(2, 576, dtype=torch.int64))

    def test_missing_keys_have_the_originals_defaults(self, path):
        own = self.checkpoint(path, {})
        for name in ("clip_qkv", "qkv_bias", "max_position_embeddings", "layer_norm_eps", "rope_theta"):
            del own.config[name]
        found = configuration(own)
        assert (found["clip_qkv"], found["qkv_bias"], found["max_position_embeddings"]) == (None, False, 2048)
        assert (found["layer_norm_eps"], found["rope_theta"]) == (1e-5, 10000.0)

    def test_a_null_embedding_size_is_the_vocabulary_size(self, path):
        assert self.load(path, {"embedding_size": None}).spec.vocab_size == 640

    def test_a_clipping_value_must_be_positive(self, path):
        with pytest.raises(UnsupportedCheckpoint, match=r"clip_qkv=-1"):
            configuration(self.checkpoint(path, {"clip_qkv": -1}))
