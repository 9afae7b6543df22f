"""Tests for DeepSeek-VL in deepseek-ai's layout against transformers' classes with the same weights."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLHybridConfig,
    DeepseekVLHybridForConditionalGeneration,
    DeepseekVLHybridImageProcessor,
    DeepseekVLHybridProcessor,
    DeepseekVLImageProcessor,
    DeepseekVLProcessor,
    LlamaConfig,
    SamVisionConfig,
    SiglipVisionConfig,
)

from mindie_mm.models import family_named
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from tests.models import test_deepseek_vl as plain
from tests.models.contract import FamilyContract, noise, refusals, without_settings, without_weights
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import changed, save_json, save_tokenizer

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
TAG = "<image_placeholder>"
SIDE, FEATURES, HIGH = 32, 16, 64
TOWER = {"width": 32, "layers": 3, "heads": 4, "patch_size": 8, "mlp_ratio": 2.0}
"""Dimensions of the small tower. Published checkpoints omit them, because the name of the tower implies them."""
SAM = {"width": 32, "layers": 3, "heads": 4, "patch_size": 8, "window_size": 4, "prompt_embed_dim": 8}
LANGUAGE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float16",
    "vocab_size": 400,
}
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)


def vision_params() -> dict[str, Any]:
    """Return the `params` of deepseek-vl-1.3b-chat's vision tower with smaller dimensions."""
    name = {"model_name": "siglip_large_patch16_384", "select_feature": "same", "select_layer": -1}
    return {"image_size": SIDE, **name, **TOWER}


def config_of(tower: str, params: dict[str, Any], projector: str) -> dict[str, Any]:
    aligner = {"depth": 2, "input_dim": 32, "n_embed": 48, "projector_type": projector}
    return {
        "aligner_config": {"cls": "MlpProjector", "model_type": "aligner", "params": aligner},
        "architectures": ["MultiModalityCausalLM"],
        "language_config": LANGUAGE,
        "model_type": "multi_modality",
        "torch_dtype": "float32",
        "transformers_version": "4.38.2",
        "vision_config": {"cls": tower, "model_type": "vision", "params": params},
    }


def save_original(out: Path, config: dict[str, Any], pixels: dict[str, Any]) -> Any:
    """Write every file except the weights, and return the tokenizer."""
    tokenizer = save_tokenizer(out, (BOS, EOS, TAG), bos_token=BOS, eos_token=EOS, pad_token=EOS)
    processor = {"add_special_token": False, "ignore_id": -100, "image_tag": TAG, "mask_prompt": True}
    save_json(
        out,
        config=config,
        preprocessor_config={"image_processor_type": "VLMImageProcessor", "processor_class": "VLChatProcessor"}
        | pixels,
        processor_config=processor
        | {"num_image_tokens": FEATURES, "processor_class": "VLChatProcessor", "sft_format": "deepseek"},
        tokenizer_config={
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": BOS},
            "eos_token": {"__type": "AddedToken", "content": EOS},
            "model_max_length": 16384,
            "pad_token": None,
            "tokenizer_class": "LlamaTokenizerFast",
        },
    )
    tokenizer.add_bos_token = True
    tokenizer.image_token, tokenizer.image_token_id = TAG, tokenizer.convert_tokens_to_ids(TAG)
    return tokenizer


def draw(cls: type[Any], config: Any) -> Any:
    """Return a model with random weights, including the norms, so that a swap of two weights is detected."""
    torch.manual_seed(0)
    model = cls(config)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.2 * torch.randn_like(weight)
        else:
            weight.data = 0.1 * torch.randn_like(weight)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 1
    return model


SIGLIP_NAMES = (
    (r"model\.vision_model\.embeddings\.position_embedding\.weight", r"{tower}.pos_embed"),
    (r"model\.vision_model\.embeddings\.patch_embedding\.(.+)", r"{tower}.patch_embed.proj.\1"),
    (r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.(.+)", r"{tower}.blocks.\1.attn.proj.\2"),
    (r"model\.vision_model\.encoder\.layers\.(\d+)\.layer_norm(\d)\.(.+)", r"{tower}.blocks.\1.norm\2.\3"),
    (r"model\.vision_model\.encoder\.layers\.(\d+)\.mlp\.fc(\d)\.(.+)", r"{tower}.blocks.\1.mlp.fc\2.\3"),
    (r"model\.vision_model\.post_layernorm\.(.+)", r"{tower}.norm.\1"),
)
LANGUAGE_NAMES = (
    (r"model\.language_model\.(.+)", r"language_model.model.\1"),
    (r"lm_head\.weight", "language_model.lm_head.weight"),
)


def published_weights(model: torch.nn.Module, names: Any, tower: str) -> dict[str, torch.Tensor]:
    """Rename transformers' weights to the published names by inverting its conversion script."""
    state, weights = model.state_dict(), {}
    for name in [name for name in state if name.endswith(("q_proj.weight", "q_proj.bias")) and "vision_model" in name]:
        layer, part = re.fullmatch(
            r"model\.vision_model\.encoder\.layers\.(\d+)\.self_attn\.q_proj\.(\w+)", name
        ).groups()
        parts = [state.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        weights[f"{tower}.blocks.{layer}.attn.qkv.{part}"] = torch.cat(parts)
    for name, weight in state.items():
        pattern, published = next(rule for rule in names if re.fullmatch(rule[0], name))
        weights[re.sub(pattern, published.format(tower=tower), name)] = weight
    weights[f"{tower}.pos_embed"] = weights[f"{tower}.pos_embed"].unsqueeze(0)
    # The original checkpoint contains these weights but does not use them.
    weights |= {f"{tower}.attn_pool.latent": torch.ones(1, 1, 32), f"{tower}.attn_pool.kv.weight": torch.ones(64, 32)}
    return {name: weight.clone().contiguous() for name, weight in weights.items()}


class Reference(BaseReference):
    markers: ClassVar = {"image": TAG}


class OriginalContract(FamilyContract):
    """Tests for both model sizes in deepseek-ai's layout."""

    prompts: ClassVar = plain.TestDeepseekVL.prompts
    assert_arrays = plain.TestDeepseekVL.assert_arrays
    references: ClassVar[dict[Path, Reference]] = {}

    def test_settings_of_an_unknown_class_are_refused(self, path, tmp_path):
        """If preprocessor_config.json has no settings, the error mentions it. processor_config.json is not read."""
        out = without_settings(path, tmp_path / "other")
        (out / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ZzImageProcessor"}))
        self.assert_refused(out, "preprocessor_config.json has no image_size")
        settings = json.loads((path / "preprocessor_config.json").read_text()) | {"image_processor_type": "ZzImage"}
        (out / "preprocessor_config.json").write_text(json.dumps(settings))
        self.assert_refused(out, "ZzImage")

    @classmethod
    def make_reference(cls, path):
        return cls.references[path]

    def assert_config_refused(self, path, out, change, named):
        """Assert that the checkpoint is refused after `change`, whose keys are paths such as `section.key`."""
        config = json.loads((path / "config.json").read_text())
        for name, value in change.items():
            *parts, last = name.split(".")
            part = config
            for one in parts:
                part = part[one]
            part[last] = value
        self.assert_refused(changed(path, out, "config", config), named)


class TestDeepseekVLOriginal(OriginalContract):
    name = "deepseek_vl"

    @classmethod
    def write_checkpoint(cls, out):
        config = config_of("CLIPVisionTower", vision_params(), "mlp_gelu")
        pixels = {"image_size": SIDE, "min_size": 3, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5]}
        pixels |= {"background_color": [127, 102, 76], "do_normalize": True, "rescale_factor": 1 / 255}
        tokenizer = save_original(out, config, pixels)
        converted = DeepseekVLConfig(
            text_config=LlamaConfig(**LANGUAGE | {"torch_dtype": "float32"}),
            vision_config=SiglipVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=SIDE,
                patch_size=8,
                hidden_act="gelu",
                vision_use_head=False,
            ),
            image_token_id=tokenizer.image_token_id,
            tie_word_embeddings=False,
        )
        model = draw(DeepseekVLForConditionalGeneration, converted)
        names = (*SIGLIP_NAMES, *ALIGNER_NAMES, *LANGUAGE_NAMES)
        save_file(published_weights(model, names, "vision_model.vision_tower"), out / "model.safetensors")
        size = {"height": SIDE, "width": SIDE}
        images = DeepseekVLImageProcessor(
            size=size, min_size=3, image_mean=pixels["image_mean"], image_std=pixels["image_std"]
        )
        processor = DeepseekVLProcessor(images, tokenizer, num_image_tokens=FEATURES)
        cls.references[out] = Reference(model, processor)

    def test_a_conversation_is_formatted_as_in_the_original(self, path, tokenizer, path_file):
        """Roles, separators and images have the same format as in deepseek-ai's code."""
        image = {"type": "image", "image": noise(30, 30)}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": " Look: "}, image, {"type": "text", "text": " ? "}]},
            {"role": "assistant", "content": "A square."},
            {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "this?"}, image]},
        ]
        text = f"{SYSTEM}\n\nUser: Look: {TAG} ?\n\nAssistant: A square.{EOS}User: And this?{TAG}\n\nAssistant:"
        processor = self.references[path].processor
        expected = processor(text=[text], images=[image["image"]] * 2, return_tensors="pt")["input_ids"][0].tolist()
        ids = tokenizer.tokenize_chat(messages, path_file)
        assert len(ids) == len(expected)
        assert [one for one in ids.tolist() if one >= 0] == [
            one for one, word in zip(expected, ids.tolist(), strict=True) if word >= 0
        ]

    def test_a_bin_file_and_a_tower_with_an_earlier_selected_layer_are_served(
        self, path, tmp_path, reference, path_file
    ):
        config = json.loads((path / "config.json").read_text())
        config["vision_config"]["params"] |= {"layers": 4, "select_layer": -2}
        other = changed(path, tmp_path / "other", "config", config)
        torch.save(load_file(other / "model.safetensors"), other / "pytorch_model.bin")
        (other / "model.safetensors").unlink()
        self.assert_same(other, reference, path_file)

    def test_a_tower_may_normalise_images_if_the_processor_does_not(self, path, tmp_path, reference, path_file):
        config = json.loads((path / "config.json").read_text())
        config["vision_config"]["params"] |= {"pixel_mean": [0.5, 0.4, 0.3], "pixel_std": [0.5, 0.5, 0.5]}
        other = changed(path, tmp_path / "other", "config", config)
        self.assert_refused(other, "do_normalize is True .* 1 of 1 towers have a pixel_mean")
        other = changed(other, tmp_path / "third", "preprocessor_config", {"do_normalize": False})
        self.assert_same(other, reference, path_file)
        other = changed(other, tmp_path / "fourth", "preprocessor_config", {"image_mean": [0.1, 0.2, 0.3]})
        self.assert_refused(other, "gives the padding color")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"gen_vision_config": {}}, "Janus"),
            ({"vision_config.cls": "HybridVisionTower"}, "vision_config.cls is 'HybridVisionTower'"),
            ({"vision_config.params.model_name": "sam_vit_b"}, "the tower is 'sam_vit_b'"),
            ({"vision_config.params.ignore_head": False}, "ignore_head is False"),
            ({"aligner_config.params.depth": 3}, "params.depth is 3"),
            ({"aligner_config.params.projector_type": "linear"}, "projector_type is 'linear'"),
            ({"aligner_config.params.n_embed": 64}, "n_embed=64 must be 48"),
            ({"aligner_config.params.input_dim": 64}, "input_dim=64 must be 32"),
            ({"language_config.model_type": "qwen2"}, "language_config.model_type is 'qwen2'"),
        ],
        ids=str,
    )
    def test_unsupported_settings_are_refused_by_name(self, change, named, path, tmp_path):
        self.assert_config_refused(path, tmp_path / "other", change, named)

    test_unsupported_settings_of_the_processor_are_refused_by_name = refusals(
        [
            ("processor_config", {"sft_format": "plain"}, "sft_format is 'plain'"),
            ("processor_config", {"add_special_token": True}, "add_special_token is True"),
            ("processor_config", {"image_tag": "<image>"}, "image_tag is '<image>'"),
            ("processor_config", {"num_image_tokens": 17}, "num_image_tokens is 17"),
            ("preprocessor_config", {"image_size": 48}, "size is"),
            ("preprocessor_config", {"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ]
    )

    @pytest.mark.parametrize("file", ["preprocessor_config.json", "tokenizer.json"])
    def test_a_missing_file_is_named(self, file, path, tmp_path):
        shutil.copytree(path, tmp_path / "other")
        (tmp_path / "other" / file).unlink()
        self.assert_refused(tmp_path / "other", file.replace(".", r"\."))

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda w: w.pop("aligner.layers.2.bias"), "lacks 1 weights; the first is aligner.layers.2.bias"),
            (
                lambda w: w.pop("vision_model.vision_tower.blocks.1.attn.qkv.bias"),
                "lacks 1 weights; the first is vision_model.vision_tower.blocks.1.attn.qkv.bias",
            ),
            (lambda w: w.pop("language_model.lm_head.weight"), "the first is language_model.lm_head.weight"),
            (lambda w: w.update(answer=torch.zeros(2)), "does not have; the first is answer"),
            (
                lambda w: w.update({"vision_model.vision_tower.blocks.1.attn.qkv.bias": torch.zeros(95)}),
                r"vision_model.vision_tower.blocks.1.attn.qkv.bias, which has shape \[95\] instead of \[96\]",
            ),
        ],
        ids=["projector", "qkv", "untied", "unknown", "shape does not match"],
    )
    def test_bad_weights_are_refused_by_their_published_names(self, change, named, path, tmp_path):
        self.assert_weights_refused(path, tmp_path, change, named)

    def test_the_end_token_comes_from_the_tokenizer(self, model):
        assert model.spec.eos_token_ids == (1,)

    @pytest.mark.parametrize("settings", [None, {}, {"eos_token": None}, {"eos_token": "<gone>"}], ids=str)
    def test_a_checkpoint_that_names_no_end_token_is_refused(self, settings, path, tmp_path):
        out = without_weights(path, tmp_path / "other")
        for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
            (out / file).unlink(missing_ok=True)
        if settings is not None:
            save_json(out, tokenizer_config=settings)
        self.assert_refused(out, "<gone>" if settings and settings["eos_token"] else r"tokenizer_config\.json")

    def test_an_end_token_in_special_tokens_map_is_used(self, path, tmp_path):
        out = without_weights(path, tmp_path / "other")
        (out / "tokenizer_config.json").unlink()
        save_json(out, special_tokens_map={"eos_token": {"content": EOS}})
        checkpoint = family_named(self.name).translated(Checkpoint.open(out))
        assert eos_token_ids(checkpoint) == (1,)


ALIGNER_NAMES = (
    (r"model\.aligner\.linear1\.(.+)", r"aligner.layers.0.\1"),
    (r"model\.aligner\.linear2\.(.+)", r"aligner.layers.2.\1"),
)
_SAM = "vision_model.vision_tower_high.vision_tower"
SAM_NAMES = (
    (r"model\.high_res_vision_model\.vision_encoder\.pos_embed", f"{_SAM}.pos_embed"),
    (r"model\.high_res_vision_model\.vision_encoder\.patch_embed\.projection\.(.+)", rf"{_SAM}.patch_embed.proj.\1"),
    (
        r"model\.high_res_vision_model\.vision_encoder\.layers\.(\d+)\.layer_norm(\d)\.(.+)",
        rf"{_SAM}.blocks.\1.norm\2.\3",
    ),
    (r"model\.high_res_vision_model\.vision_encoder\.layers\.(\d+)\.attn\.(.+)", rf"{_SAM}.blocks.\1.attn.\2"),
    (r"model\.high_res_vision_model\.vision_encoder\.layers\.(\d+)\.mlp\.(.+)", rf"{_SAM}.blocks.\1.mlp.\2"),
    (r"model\.high_res_vision_model\.vision_encoder\.neck\.conv1\.weight", f"{_SAM}.neck.0.weight"),
    (r"model\.high_res_vision_model\.vision_encoder\.neck\.layer_norm1\.(.+)", rf"{_SAM}.neck.1.\1"),
    (r"model\.high_res_vision_model\.vision_encoder\.neck\.conv2\.weight", f"{_SAM}.neck.2.weight"),
    (r"model\.high_res_vision_model\.vision_encoder\.neck\.layer_norm2\.(.+)", rf"{_SAM}.neck.3.\1"),
    (r"model\.high_res_vision_neck\.conv1\.weight", f"{_SAM}.neck_hd.0.weight"),
    (r"model\.high_res_vision_neck\.layer_norm1\.(.+)", rf"{_SAM}.neck_hd.1.\1"),
    (r"model\.high_res_vision_neck\.conv2\.weight", f"{_SAM}.neck_hd.2.weight"),
    (r"model\.high_res_vision_neck\.layer_norm2\.(.+)", rf"{_SAM}.neck_hd.3.\1"),
    (r"model\.high_res_vision_proj\.conv1\.weight", f"{_SAM}.downsamples.0.weight"),
    (r"model\.high_res_vision_proj\.conv2\.weight", f"{_SAM}.downsamples.1.weight"),
    (r"model\.high_res_vision_alpha", f"{_SAM}.hd_alpha_downsamples"),
    (r"model\.aligner\.vision_proj\.(.+)", r"aligner.low_up_proj.\1"),
    (r"model\.aligner\.high_res_vision_proj\.(.+)", r"aligner.high_up_proj.\1"),
    (r"model\.aligner\.proj\.(.+)", r"aligner.layers.1.\1"),
)


class TestDeepseekVLHybridOriginal(OriginalContract):
    name = "deepseek_vl_hybrid"

    @pytest.mark.parametrize("tower", ["high_res_cfg", "low_res_cfg"])
    def test_a_tower_without_its_first_patch_is_refused(self, tower, path, tmp_path):
        vision = json.loads((path / "config.json").read_text())["vision_config"]
        vision["params"][tower]["select_feature"] = "patch"
        other = changed(path, tmp_path / "other", "config", {"vision_config": vision})
        self.assert_refused(other, "select_feature is 'patch'")

    def test_unknown_keys_of_its_towers_are_named(self, path):
        own = Checkpoint.open(path)
        config = json.loads((path / "config.json").read_text())
        config["vision_config"]["params"]["low_res_cfg"]["widht"] = 1
        config["aligner_config"]["params"]["deptj"] = 2
        named = family_named(self.name).unknown_keys(replace(own, config=config))
        assert named == ["aligner_config.params.deptj", "vision_config.params.low_res_cfg.widht"]

    @classmethod
    def write_checkpoint(cls, out):
        mean, std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
        high = {"ckpt_path": "", "image_size": HIGH, "model_name": "sam_b_downsample", "output_dim": 1024}
        high |= {"pixel_mean": mean, "pixel_std": std, "select_feature": "same", "select_layer": -1, **SAM}
        high["global_attn_indexes"] = [1, 2]
        low = vision_params() | {"ckpt_path": "", "output_dim": 1024, "pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3}
        params = {
            "concat_type": "tuple",
            "freeze_high": True,
            "freeze_low": True,
            "high_res_cfg": high,
            "low_res_cfg": low,
        }
        config = config_of("HybridVisionTower", params, "low_high_hybrid_split_mlp_gelu")
        pixels = {"image_size": HIGH, "min_size": 3, "image_mean": mean, "image_std": std, "do_normalize": False}
        tokenizer = save_original(out, config, pixels | {"background_color": [122, 117, 104]})
        converted = DeepseekVLHybridConfig(
            text_config=LlamaConfig(**LANGUAGE | {"torch_dtype": "float32"}),
            vision_config=SiglipVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=SIDE,
                patch_size=8,
                hidden_act="gelu",
                vision_use_head=False,
            ),
            high_res_vision_config=SamVisionConfig(
                hidden_size=32,
                output_channels=8,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=HIGH,
                patch_size=8,
                window_size=4,
                global_attn_indexes=[1, 2],
                mlp_dim=128,
            ),
            image_token_id=tokenizer.image_token_id,
            tie_word_embeddings=False,
        )
        model = draw(DeepseekVLHybridForConditionalGeneration, converted)
        names = (*SIGLIP_NAMES, *SAM_NAMES, *LANGUAGE_NAMES)
        weights = published_weights(model, names, "vision_model.vision_tower_low.vision_tower")
        weights |= {f"vision_model.{one}_layer_norm.weight": torch.ones(1024) for one in ("high", "low")}
        save_file(weights, out / "model.safetensors")
        images = DeepseekVLHybridImageProcessor(
            size={"height": SIDE, "width": SIDE},
            high_res_size={"height": HIGH, "width": HIGH},
            min_size=3,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            high_res_image_mean=mean,
            high_res_image_std=std,
            resample=2,
        )
        processor = DeepseekVLHybridProcessor(images, tokenizer, num_image_tokens=FEATURES)
        cls.references[out] = Reference(model, processor)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"vision_config.params.concat_type": "add"}, "concat_type is 'add'"),
            (
                {"vision_config.params.high_res_cfg.model_name": "sam_vit_l"},
                "tower is 'sam_vit_l'; only sam_b_downsample",
            ),
            ({"vision_config.params.low_res_cfg.pixel_mean": None}, "1 of 2 towers have a pixel_mean"),
            ({"aligner_config.params.projector_type": "mlp_gelu"}, "projector_type is 'mlp_gelu'"),
        ],
        ids=str,
    )
    def test_unsupported_settings_are_refused_by_name(self, change, named, path, tmp_path):
        self.assert_config_refused(path, tmp_path / "other", change, named)

    def test_bad_weights_are_refused_by_their_published_names(self, path, tmp_path):
        name = f"{_SAM}.neck_hd.1.bias"
        self.assert_weights_refused(path, tmp_path, lambda weights: weights.pop(name), f"the first is {name}")
