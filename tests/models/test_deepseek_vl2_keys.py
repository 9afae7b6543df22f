"""Tests for each key of DeepSeek-VL2's configuration."""

import json
import shutil
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_named
from mindie_mm.models.deepseek_vl2 import configuration
from mindie_mm.nn.checkpoint.config_keys import words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.keys_contract import IDS, KeysContract, layer_of, rms_norm, turned

FOLDER = GOLDEN / "deepseek_vl2"


def fed_forward(hidden, part, name):
    gate, up, down = (part[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    return linear(silu(linear(hidden, gate)) * linear(hidden, up), down)


def chosen_experts(scores, part, config):
    """Return the chosen experts of each token, int64 [tokens, experts per token]."""
    ranked = scores + part["mlp.gate.e_score_correction_bias"] if config["topk_method"] == "noaux_tc" else scores
    if config["topk_method"] != "greedy":
        grouped = ranked.unflatten(-1, (config["n_group"], -1))
        best = grouped.topk(2 if config["topk_method"] == "noaux_tc" else 1, -1).values.sum(-1)
        kept = best.topk(config["topk_group"], -1).indices
        mask = torch.zeros_like(best).scatter(1, kept, 1).unsqueeze(-1).expand_as(grouped)
        ranked = grouped.masked_fill(mask == 0, -torch.inf).flatten(1)
    return ranked.topk(config["num_experts_per_tok"], -1).indices


def mixture(hidden, part, config):
    logits = linear(hidden, part["mlp.gate.weight"])
    scores = logits.softmax(-1) if config.get("scoring_func", "softmax") == "softmax" else logits.sigmoid()
    chosen = chosen_experts(scores, part, config)
    weights = scores.gather(1, chosen)
    if config.get("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.get("routed_scaling_factor", 1.0)
    mixed = torch.zeros_like(hidden)
    for row, experts in enumerate(chosen.tolist()):
        for weight, expert in zip(weights[row], experts, strict=True):
            mixed[row] += weight * fed_forward(hidden[row], part, f"mlp.experts.{expert}")
    return mixed + fed_forward(hidden, part, "mlp.shared_experts")


def paired(heads):
    """Move the first number of each neighboring pair to the first half, and the second number to the second half."""
    return torch.cat([heads[..., ::2], heads[..., 1::2]], -1)


def plain_heads(hidden, part, config):
    query, key, value = (
        linear(hidden, part[f"self_attn.{name}_proj.weight"]).unflatten(-1, (config["num_attention_heads"], -1))
        for name in "qkv"
    )
    base = config.get("rope_theta", 10000.0)
    return turned(query.transpose(0, 1), base), turned(key.transpose(0, 1), base), value.transpose(0, 1)


def latent_heads(hidden, part, config):
    """Compute queries, keys and values of multi-head latent attention without absorbing any projection."""
    heads, rank, base = config["num_attention_heads"], config["kv_lora_rank"], config.get("rope_theta", 10000.0)
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    query = linear(hidden, part["self_attn.q_proj.weight"]).unflatten(-1, (heads, -1)).transpose(0, 1)
    plain, rotated = query.split([nope, rope], -1)
    latent, shared = linear(hidden, part["self_attn.kv_a_proj_with_mqa.weight"]).split([rank, rope], -1)
    latent = rms_norm(latent, part["self_attn.kv_a_layernorm.weight"], 1e-6)
    made = linear(latent, part["self_attn.kv_b_proj.weight"]).unflatten(-1, (heads, -1)).transpose(0, 1)
    key, value = made[..., :nope], made[..., nope:]
    shared = turned(paired(shared.unsqueeze(0)), base).expand(heads, -1, -1)
    return torch.cat([plain, turned(paired(rotated), base)], -1), torch.cat([key, shared], -1), value


class DeepseekVL2Keys(KeysContract):
    name = "deepseek_vl2"
    refused: ClassVar = {
        "tile_tag": "1D",
        "global_view_pos": "tail",
        "vision_config.image_size": 448,
        "vision_config.global_pool": "avg",
        "vision_config.ignore_head": False,
        "vision_config.class_token": True,
        "vision_config.cls": "CLIPVisionTower",
        "vision_config.params": {"select_layer": -1},
        "projector_config.input_dim": 32,
        "projector_config.n_embed": 64,
        "projector_config.projector_type": "mlp_gelu",
        "projector_config.depth": 3,
        "projector_config.mlp_ratio": 2,
        "projector_config.downsample_ratio": 3,
        "projector_config.token_pooling": True,
        "projector_config.cls": "MlpProjector",
        "projector_config.params": {"depth": 2},
        "language_config.hidden_act": "gelu",
        "language_config.attention_bias": True,
        "language_config.rope_scaling": {"type": "yarn", "factor": 40},
        "language_config.tie_word_embeddings": True,
        "language_config.topk_method": "random",
        "language_config.scoring_func": "relu",
    }
    towers: ClassVar = {"vision_config.heads": {"vision_config.heads": 2}}
    unused: ClassVar = {
        "tie_word_embeddings": True,
        "vision_config.num_classes": 7,
        "vision_config.use_checkpoint": True,
        "vision_config.weight_init": "jax",
        "vision_config.deterministic": True,
        "vision_config.num_recomputing_layers": 2,
        "language_config.attention_dropout": 0.5,
        "language_config.aux_loss_alpha": 0.5,
        "language_config.seq_aux": False,
        "language_config.ep_size": 2,
        "language_config.lm_head": False,
        "language_config.rm_head": True,
        "language_config.pretraining_tp": 2,
        "language_config.initializer_range": 3.0,
        "language_config.use_cache": False,
    }
    sizes = words(
        "candidate_resolutions vision_config.width vision_config.layers vision_config.mlp_ratio",
        "vision_config.patch_size vision_config.model_name",
        *(
            f"language_config.{name}"
            for name in words(
                "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads",
                "num_key_value_heads n_shared_experts n_routed_experts moe_layer_freq first_k_dense_replace use_mla",
                "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim max_position_embeddings",
                "n_group topk_group bos_token_id",  # groups are changed together with topk_method
            )
        ),
    )

    @classmethod
    def write_checkpoint(cls, out):
        write_checkpoint(cls.folder, out, drawn_weights(cls.folder))

    def reference(self, weights, config):
        config, own = config["language_config"], layer_of(weights, "language.model.")
        eps, dense = config.get("rms_norm_eps", 1e-6), config["first_k_dense_replace"]
        hidden = own["embed_tokens.weight"][IDS]
        for layer in range(config["num_hidden_layers"]):
            part = layer_of(own, f"layers.{layer}.")
            normed = rms_norm(hidden, part["input_layernorm.weight"], eps)
            heads = (latent_heads if config["use_mla"] else plain_heads)(normed, part, config)
            attended = scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1).flatten(1)
            hidden = hidden + linear(attended, part["self_attn.o_proj.weight"])
            normed = rms_norm(hidden, part["post_attention_layernorm.weight"], eps)
            hidden = hidden + (fed_forward(normed, part, "mlp") if layer < dense else mixture(normed, part, config))
        return linear(rms_norm(hidden, own["norm.weight"], eps), weights["language.lm_head.weight"])

    def features(self, model):
        pixels = torch.randn(2, 3, 384, 384, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model.module.projector(model.module.vision(pixels))


class TestDeepseekVL2Keys(DeepseekVL2Keys):
    folder = FOLDER / "plain"
    honoured: ClassVar = {
        "language_config.rope_theta": 100.0,
        "language_config.rms_norm_eps": 0.1,
        "language_config.norm_topk_prob": True,
        "language_config.routed_scaling_factor": 3.0,
        "language_config.num_experts_per_tok": 2,
        "language_config.scoring_func": "sigmoid",
        "language_config.topk_method": {
            "language_config.topk_method": "group_limited_greedy",
            "language_config.n_group": 4,
            "language_config.topk_group": 2,
        },
    }

    def test_missing_keys_have_the_originals_defaults(self, path):
        own = self.checkpoint(path, {})
        del own.config["language_config"]["max_position_embeddings"], own.config["vision_config"]["width"]
        with pytest.raises(UnsupportedCheckpoint, match=r"input_dim=64 must be 1024"):
            configuration(own)
        own.config["vision_config"]["width"] = 64
        found = configuration(own)["language_config"]
        assert (found["max_position_embeddings"], found["rms_norm_eps"], found["rope_theta"]) == (2048, 1e-6, 10000.0)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("patch_size", 16),
            ("downsample_ratio", 4),
            ("normalize", False),
            ("sft_format", "plain"),
            ("candidate_resolutions", [[768, 384], [384, 384]]),
        ],
        ids=str,
    )
    def test_unsupported_settings_of_the_processor_are_refused_by_name(self, name, value, path, tmp_path):
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        file = tmp_path / "processor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        with pytest.raises(UnsupportedCheckpoint, match=rf"{name}(=| is )"):
            family_named(self.name).processor(Checkpoint.open(tmp_path))

    def test_a_section_that_is_no_object_is_refused(self, path):
        with pytest.raises(UnsupportedCheckpoint, match="language_config=3 must be an object"):
            configuration(self.checkpoint(path, {"language_config": 3}))

    def test_prompts_begin_with_the_tokenizers_bos_despite_config_json(self, path):
        processor = family_named(self.name).processor(self.checkpoint(path, {"language_config.bos_token_id": 7}))
        assert processor.frame([5], 0) == [0, 5]


class TestDeepseekVL2LatentKeys(DeepseekVL2Keys):
    folder = FOLDER / "latent"
    honoured: ClassVar = {
        "language_config.rope_theta": 100.0,
        "language_config.rms_norm_eps": 0.1,
        "language_config.norm_topk_prob": False,
        "language_config.routed_scaling_factor": 3.0,
        "language_config.num_experts_per_tok": 2,
        "language_config.scoring_func": "softmax",
        "language_config.topk_group": {"language_config.n_group": 4, "language_config.topk_group": 2},
    }
