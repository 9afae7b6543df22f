"""Tests for each key of Qwen-VL's configuration."""

import math
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models.qwen_vl import configuration
from mindie_mm.nn.checkpoint.config_keys import words
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.keys_contract import IDS, KeysContract, layer_of, rms_norm, turned
from tests.models.test_qwen_vl import position_table

FOLDER = GOLDEN / "qwen_vl"


class TestQwenVLKeys(KeysContract):
    name = "qwen_vl"
    refused: ClassVar = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "kv_channels": 128,
        "rotary_pct": 0.5,
        "no_bias": False,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "use_cache_quantization": True,
        "softmax_in_fp32": True,
        "n_embd": 256,
        "n_head": 4,
        "n_inner": 384,
        "n_layer": 2,
        "ffn_hidden_size": 384,
        "visual.output_dim": 128,
        "visual.n_queries": 250,
    }
    honoured: ClassVar = {
        "layer_norm_epsilon": 0.1,
        "rotary_emb_base": 100,
        "seq_length": 16,
        "use_dynamic_ntk": {"use_dynamic_ntk": False, "seq_length": 16},
        "use_logn_attn": {"use_logn_attn": False, "seq_length": 16},
    }
    towers: ClassVar = {"visual.heads": {"visual.heads": 2}}
    unused: ClassVar = {
        "attn_dropout_prob": 0.5,
        "emb_dropout_prob": 0.5,
        "scale_attn_weights": False,
        "bf16": True,
        "fp16": True,
        "fp32": True,
        "use_flash_attn": True,
        "onnx_safe": True,
        "tokenizer_type": "Other",
        "use_cache_kernel": True,
        "use_cache": False,
        "initializer_range": 3.0,
    }
    sizes = words(
        "vocab_size num_hidden_layers intermediate_size max_position_embeddings visual.image_size visual.patch_size",
        "visual.width visual.layers visual.mlp_ratio visual.image_start_id",
    )

    @classmethod
    def write_checkpoint(cls, out):
        weights = drawn_weights(FOLDER)
        write_checkpoint(FOLDER, out, {**weights, "transformer.visual.attn_pool.pos_embed": position_table(16, 256)})

    def reference(self, weights, config):
        own, eps, width = layer_of(weights, "transformer."), config["layer_norm_epsilon"], config["kv_channels"]
        trained, base = config["seq_length"], config["rotary_emb_base"]
        if config["use_dynamic_ntk"]:
            alpha = max(2 ** math.ceil(math.log2(len(IDS) / trained) + 1) - 1, 1)
            base = base * alpha ** (width / (width - 2))
        scales = torch.ones(len(IDS), 1)
        if config["use_logn_attn"]:
            scales[trained:, 0] = torch.tensor([math.log(i, trained) for i in range(trained + 1, len(IDS) + 1)])
        hidden = own["wte.weight"][IDS]
        for layer in range(config["num_hidden_layers"]):
            part = layer_of(own, f"h.{layer}.")
            mixed = linear(
                rms_norm(hidden, part["ln_1.weight"], eps), part["attn.c_attn.weight"], part["attn.c_attn.bias"]
            )
            query, key, value = (values.unflatten(-1, (-1, width)).transpose(0, 1) for values in mixed.chunk(3, -1))
            query, key = turned(query, base) * scales, turned(key, base)
            attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
            hidden = hidden + linear(attended, part["attn.c_proj.weight"])
            normed = rms_norm(hidden, part["ln_2.weight"], eps)
            gated = linear(normed, part["mlp.w1.weight"]) * silu(linear(normed, part["mlp.w2.weight"]))
            hidden = hidden + linear(gated, part["mlp.c_proj.weight"])
        return linear(rms_norm(hidden, own["ln_f.weight"], eps), weights["lm_head.weight"])

    def features(self, model):
        pixels = torch.randn(1, 3, 448, 448, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model.module.transformer["visual"](pixels)

    def test_missing_keys_have_the_originals_defaults(self, path):
        own = self.checkpoint(path, {})
        for name in ("max_position_embeddings", "use_dynamic_ntk", "use_logn_attn", "rotary_emb_base"):
            del own.config[name]
        found = configuration(own)
        assert (found["max_position_embeddings"], found["rotary_emb_base"]) == (8192, 10000)
        assert found["use_dynamic_ntk"]
        assert found["use_logn_attn"]
        assert found["visual"]["n_queries"] == 256

    @pytest.mark.parametrize("name", ["seq_length", "visual.heads"])
    def test_missing_required_keys_are_refused_by_name(self, name, path):
        own = self.checkpoint(path, {})
        part = own.config["visual"] if "." in name else own.config
        del part[name.rpartition(".")[2]]
        with pytest.raises(UnsupportedCheckpoint, match=rf"config\.json has no {name}"):
            configuration(own)
