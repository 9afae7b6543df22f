"""Tests for DeepSeek-OCR-2 against transformers, on random weights."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import _deepseek_ocr2_original as original
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.shm import release
from tests.models.contract import ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

# isort: split
from transformers.models.deepseek_ocr2.image_processing_deepseek_ocr2 import DeepseekOcr2ImageProcessor
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor

PUBLISHED = Path(__file__).parents[1] / "published" / "deepseek_ocr2"
SPECIAL = ("<s>", "</s>", "<pad>", "<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<td>")
# A tile has 48x48 patches and an image 64x64, as in the published checkpoint, because the numbers of queries are fixed.
PIXELS = {
    "image_processor_type": "DeepseekOcr2ImageProcessor",
    "size": {"height": 128, "width": 128},
    "tile_size": 96,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TEXT = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
}
SAM = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_channels": 8,
    "image_size": 128,
    "patch_size": 2,
    "global_attn_indexes": [],
    "downsample_channels": [12, 32],
    "initializer_range": 0.2,
}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = DeepseekOcr2ForConditionalGeneration
    processor_class = DeepseekOcr2Processor
    parts = (DeepseekOcr2ImageProcessor, AutoTokenizer)
    settings: ClassVar = {"patch_size": 2}


def save_framed(out):
    """Write a tokenizer that begins every text with BOS."""
    tokenizer = save_tokenizer(out, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save_pretrained(out)
    return tokenizer.convert_tokens_to_ids


class Weighted(DeepseekOcr2ForConditionalGeneration):
    """Model whose positions are not 0, the initial value in transformers."""

    def __init__(self, config):
        super().__init__(config)
        for name, weight in self.named_parameters():
            if "pos_embed" in name or "rel_pos" in name:
                torch.nn.init.normal_(weight, std=0.2)


def write(out, **sam):
    ids = save_framed(out)
    config = DeepseekOcr2Config(
        text_config={**TEXT, "mlp_layer_types": ["dense", "sparse", "sparse"], "initializer_range": 0.1,
                     "eos_token_id": 1, "bos_token_id": 0},
        vision_config={"sam_config": {**SAM, **sam}, "encoder_config": ENCODER},
        image_token_id=ids("<image>"),
    )  # fmt: skip
    save_model(out, Weighted, config, ids("</s>"), ids("<pad>"))
    save_json(out, preprocessor_config=PIXELS, processor_config={"patch_size": 2, "downsample_ratio": 4})


class TestDeepseekOCR2(ExtremeShapes, FamilyContract):
    name = "deepseek_ocr2"
    reference_class = Reference
    chooses_experts = True
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"image": noise(90, 70)}, {"text": "\n<|grounding|>What is it?"}],
        "two images": [{"image": noise(20, 29)}, {"text": " and "}, {"image": noise(170, 90)}, {"text": "?"}],
        "a long image": [{"image": noise(9, 96)}, {"text": "Where?"}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        write(out)

    def test_weights_have_the_published_names(self, path):
        """Transformers saves the weights under the names that deepseek-ai has published."""
        names = {re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in load_file(path / "model.safetensors")}
        assert names == {*json.loads((PUBLISHED / "weight_names.json").read_text())}

    def test_a_chat_has_no_roles(self, reference, model, tokenizer, path_file):
        pixels = noise(61, 83)
        content = [{"type": "image", "image": pixels}, {"type": "text", "text": "<|grounding|>Convert the image. "}]
        ids = tokenizer.tokenize_chat([{"role": "user", "content": content}], path_file).numpy()
        text = "<image>\n<|grounding|>Convert the image."
        expected = reference.processor(text=[text], images=[Image.fromarray(pixels)], return_tensors="pt")
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("preprocessor_config", {"tile_size": 64}, "tile_size is 64 .* a tile 144"),
            ("preprocessor_config", {"size": {"height": 128, "width": 96}}, "an image must have 256 features"),
            ("preprocessor_config", {"max_patches": 9}, "max_patches"),
            ("preprocessor_config", {"crop_to_patches": False}, "crop_to_patches"),
            ("processor_config", {"patch_size": 4}, "patch_size"),
        ]
    )


@pytest.mark.slow
def test_global_attention_and_interpolated_positions_equal_the_references(tmp_path):
    write(tmp_path, num_hidden_layers=2, global_attn_indexes=[1])
    reference, contract, path_file = Reference(tmp_path), TestDeepseekOCR2(), tmp_path / "shm_name.txt"
    contract.prompts = {"one image": [{"image": noise(90, 140)}, {"text": "?"}]}
    contract.assert_same(tmp_path, reference, path_file)
    release(path_file)


TEXT_KEYS = {key: value for key, value in TEXT.items() if key != "initializer_range"}
SIZES = {
    "projector_config": {"input_dim": 32, "n_embed": 48},
    "vision_config": {
        "width": {
            "qwen2-0-5b": {"dim": 32},
            "sam_vit_b": {
                "width": 24,
                "layers": 2,
                "heads": 2,
                "global_attn_indexes": [],
                "downsample_channels": [12, 16],
            },
        }
    },
    "language_config": TEXT_KEYS,
    **TEXT_KEYS,
}


def merged(config, changes):
    """Return `config` with `changes`, which may change single keys of a section."""
    return {
        **config,
        **{key: merged(config[key], value) if isinstance(value, dict) else value for key, value in changes.items()},
    }


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Return a small checkpoint in deepseek-ai's layout."""
    monkeypatch.setattr(original, "_ENCODER", {**original._ENCODER, **ENCODER})
    folder = tmp_path / "published"
    folder.mkdir()
    ids = save_framed(folder)
    config = merged(json.loads((PUBLISHED / "config.json").read_text()), SIZES)
    save_json(folder, config={**config, "torch_dtype": "float32"})
    shutil.copyfile(PUBLISHED / "processor_config.json", folder / "processor_config.json")
    read = DeepseekOcr2Config.from_dict(original.translate(Checkpoint.open(folder)).config)
    save_model(tmp_path, Weighted, read, ids("</s>"), ids("<pad>"))
    shutil.copyfile(tmp_path / "model.safetensors", folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_the_published_layout_equals_transformers(published, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(published, theirs)
    files = original.translate(Checkpoint.open(published))
    save_json(theirs, config=files.config)
    (theirs / "processor_config.json").unlink()
    save_json(theirs, preprocessor_config={**PIXELS, "size": {"height": 1024, "width": 1024}, "tile_size": 768})

    class FullSize(Reference):
        settings: ClassVar = {}

    contract, path_file = TestDeepseekOCR2(), tmp_path / "shm_name.txt"
    contract.prompts = {"one image": [{"image": noise(90, 769)}, {"text": "?"}], "text": [{"text": "a red square"}]}
    contract.assert_same(published, FullSize(theirs), path_file)
    release(path_file)


def test_the_published_configuration_is_understood(published):
    """The real config.json has the sizes of the published weights."""
    checkpoint = Checkpoint.open(published)
    config = json.loads((PUBLISHED / "config.json").read_text())
    assert family_of(checkpoint).__name__ == "DeepseekOCR2"
    assert family_of(checkpoint).unknown_keys(replace(checkpoint, config=config)) == []
    assert family_of(checkpoint).unknown_keys(replace(checkpoint, config={**config, "widht": 1})) == ["widht"]
    read = DeepseekOcr2Config.from_dict(original.translate(replace(checkpoint, config=config)).config)
    assert read.text_config.mlp_layer_types == ["dense"] + ["sparse"] * 11
    assert (read.text_config.head_dim, read.text_config.max_position_embeddings) == (128, 8192)
    sam = read.vision_config.sam_config
    assert (sam.num_hidden_layers, sam.mlp_dim, sam.downsample_channels) == (12, 3072, [512, 896])
    assert read.vision_config.encoder_config.rope_parameters["rope_theta"] == 1_000_000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_mla": True}, "use_mla is True"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True"),
        (
            {"language_config": {"hidden_size": 64}},
            r"language_config\.hidden_size is 64; hidden_size at the top level is 48",
        ),
        ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector_type is 'mlp_gelu'"),
        ({"projector_config": {"input_dim": 64}}, "projector_config.input_dim=64 must be 32"),
        ({"vision_config": {"image_size": 640}}, "image_size is 640"),
    ],
    ids=str,
)
def test_unsupported_settings_of_the_published_layout_are_refused(published, change, named):
    config = merged(json.loads((published / "config.json").read_text()), change)
    with pytest.raises(UnsupportedCheckpoint, match=named):
        original.translate(replace(Checkpoint.open(published), config=config))


@pytest.mark.parametrize("stated", [{}, {"architectures": ["DeepseekOCRForCausalLM"]}], ids=str)
def test_other_models_of_the_same_type_are_refused_by_name(stated, tmp_path):
    """DeepSeek-OCR has the model_type of DeepSeek-VL2, too."""
    save_json(
        tmp_path, config={"model_type": "deepseek_vl_v2", "vision_config": {"model_name": "deeplip_b_l"}, **stated}
    )
    with pytest.raises(UnsupportedCheckpoint, match=r"'deepseek_vl_v2'.*no family supports") as error:
        load_model(tmp_path, device="cpu")
    assert all(name in str(error.value) for name in stated.get("architectures", ()))
