"""Tests for GLM-OCR against transformers, on random weights."""

from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from transformers import GlmOcrConfig, GlmOcrForConditionalGeneration

from tests.models.small_checkpoints import changed
from tests.models.test_glm4v import TEXT, VISION, GlmContract
from tests.models.test_glm4v import Glm46VReference as Glm46V
from tests.models.test_glm4v import TestGlm46V as Glm46VContract

# Keys of zai-org/GLM-OCR, with smaller sizes.
OCR_TEXT = {
    **TEXT,
    "head_dim": 24,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [4, 4, 4],
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
    },
}


class OcrReference(Glm46V):
    model_class = GlmOcrForConditionalGeneration


class TestGlmOcr(GlmContract):
    name = "glm_ocr"
    reference_class = OcrReference
    processor_names = Glm46VContract.processor_names
    ignored_options = Glm46VContract.ignored_options
    prompts: ClassVar = {name: GlmContract.prompts[name] for name in ("text", "two images", "mixed")}

    @classmethod
    def configuration(cls, tokens):
        config = GlmOcrConfig(text_config=OCR_TEXT, vision_config={**VISION, "attention_bias": True}, **tokens)
        return GlmOcrForConditionalGeneration, config

    def test_layers_for_speculative_decoding_are_not_loaded(self, path, reference, path_file, tmp_path):
        out = changed(path, tmp_path / "other", "generation_config", {})
        weights = load_file(path / "model.safetensors")
        weights["model.language_model.layers.16.eh_proj.weight"] = torch.zeros(64, 128)
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        self.assert_same(out, reference, path_file)
