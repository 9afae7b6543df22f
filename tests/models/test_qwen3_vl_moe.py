"""Tests for Qwen3-VL with a mixture of experts against transformers, on random weights."""

import json
import shutil
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from mindie_mm.device import QuantizedLinear
from mindie_mm.models import load_model
from tests.models.contract import FamilyContract
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.models.test_qwen3_vl import IMAGES, VIDEOS
from tests.models.test_qwen3_vl import Reference as Qwen3VLReference
from tests.models.test_qwen3_vl import TestQwen3VL as Qwen3VLContract
from tools.random_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS

TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [1],
    "initializer_range": 0.1,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 1e6},
}
BLOCK = 64
"""Rows and columns of the blocks of an FP8 weight."""
VISION = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}


class Reference(Qwen3VLReference):
    model_class = Qwen3VLMoeForConditionalGeneration


class TestQwen3VLMoe(FamilyContract):
    name = "qwen3_vl_moe"
    reference_class = Reference
    chooses_experts = True
    prompts: ClassVar = Qwen3VLContract.prompts
    assert_arrays = Qwen3VLContract.assert_arrays

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
        )
        ids = tokenizer.convert_tokens_to_ids
        config = Qwen3VLMoeConfig(
            text_config=TEXT,
            vision_config=VISION,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
        save_model(out, Qwen3VLMoeForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))
        save_json(out, preprocessor_config=IMAGES, video_preprocessor_config=VIDEOS)
        rewritten(out, out, turned)  # as published

    def test_weights_as_transformers_saves_them_give_the_same_logits(self, path, model, tokenized, tmp_path):
        """Published weights of experts have their inputs before their outputs. transformers saves the transpose."""
        saved = rewritten(path, tmp_path, turned)
        found = self.logits(load_model(saved, device="cpu", dtype="float32"), tokenized["text"])
        torch.testing.assert_close(found, self.logits(model, tokenized["text"]).cpu(), rtol=1e-4, atol=1e-4)
        self.write_checkpoint(tmp_path / "again")  # loading has not changed how transformers saves
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()

    def test_separate_weights_of_experts_give_the_same_logits(self, path, model, tokenized, tmp_path):
        separate_experts(path, tmp_path)
        found = self.logits(load_model(tmp_path, device="cpu", dtype="float32"), tokenized["text"])
        torch.testing.assert_close(found, self.logits(model, tokenized["text"]).cpu(), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("is_saved", [False, True], ids=["published", "saved"])
    def test_fp8_weights_of_experts_stay_in_8_bits(self, is_saved, path, tokenized, tmp_path):
        """The published FP8 checkpoints have one tensor of scales per tensor of experts."""
        scales: dict[str, torch.Tensor] = {}

        def quantized(name, weight):
            if ".experts." not in name:
                return weight
            rows, columns = (-(-size // BLOCK) for size in weight.shape[1:])
            own = 0.25 * 2.0 ** (torch.arange(len(weight) * rows * columns) % 5).view(-1, rows, columns)
            scales[f"{name}_scale_inv"] = own
            return (weight / spread(own, weight)).to(torch.float8_e4m3fn)

        saved = rewritten(path, tmp_path / "saved", lambda name, one: turned(name, one) if is_saved else one)
        copied = rewritten(saved, tmp_path / "fp8", quantized, scales)
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))

        def rounded(name, weight):
            if ".experts." not in name:
                return weight
            own = spread(scales[f"{name}_scale_inv"], weight)
            return (weight / own).to(torch.float8_e4m3fn).float() * own

        plain = rewritten(saved, tmp_path / "rounded", rounded)
        found, expected = (load_model(one, device="cpu", dtype="float32") for one in (copied, plain))
        kept = [layer.values.dtype for layer in found.module.modules() if isinstance(layer, QuantizedLinear)]
        assert kept == [torch.float8_e4m3fn] * 2 * 2 * TEXT["num_experts"], "in two of the three layers"
        found, expected = (self.logits(model, tokenized["text"]) for model in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_layers_with_experts_run_few_operators(self, model):
        assert model.runs_layers

    def test_routers_that_do_not_divide_by_the_sum_are_refused(self, path, tmp_path):
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        config = json.loads((path / "config.json").read_text())
        config["text_config"]["norm_topk_prob"] = False
        (tmp_path / "config.json").write_text(json.dumps(config))
        self.assert_refused(tmp_path, "norm_topk_prob is False")


def turned(name, weight):
    """Return the transpose of the weights of experts, and other weights as they are."""
    return weight.mT if ".experts." in name else weight


def spread(scales, weight):
    """Return the scale of each number of a weight [experts, rows, columns]."""
    rows = scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return rows.repeat_interleave(BLOCK, 2)[:, :, : weight.shape[2]]


def separate_experts(path, out):
    """Copy a checkpoint to `out`, with the weights of each expert stored separately."""
    shutil.copytree(path, out, dirs_exist_ok=True)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load((path / "model.safetensors").read_bytes()).items():
        stem, _, part = name.rpartition(".")
        for number, expert in enumerate(weight.mT if ".experts." in name else ()):
            halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            for one, value in halves if part == "gate_up_proj" else [(part, expert)]:
                weights[f"{stem}.{number}.{one}.weight"] = value.contiguous()
        if ".experts." not in name:
            weights[name] = weight
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def rewritten(path, out, change, more=()):
    """Copy a checkpoint to `out`, with `change` applied to the name and value of each weight, and `more` weights."""
    if out != path:
        shutil.copytree(path, out, dirs_exist_ok=True)
    stored = load((path / "model.safetensors").read_bytes())
    weights = {name: change(name, weight).contiguous() for name, weight in stored.items()}
    save_file(weights | dict(more), out / "model.safetensors", metadata={"format": "pt"})
    return out
