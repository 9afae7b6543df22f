"""Tests for PaddleOCR-VL against transformers, on random weights."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Media
from mindie_mm.models import load_model
from mindie_mm.nn.splice import plain_ids
from tests.models.contract import ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import changed, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

# isort: split
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import PaddleOCRVLImageProcessor
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|begin_of_sentence|>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_START|>",
    "<|IMAGE_END|>",
    "<|video_pad|>",
)
IMAGE = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
# The published template: the images of a message come before its text.
TEMPLATE = """\
{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}
{%- if not cls_token is defined -%}{%- set cls_token = "<|begin_of_sentence|>" -%}{%- endif -%}
{%- if not eos_token is defined -%}{%- set eos_token = "</s>" -%}{%- endif -%}
{{- cls_token -}}
{%- for message in messages -%}
    {%- if message["role"] == "user" -%}
        {{- "User: " -}}
        {%- for content in message["content"] -%}
            {%- if content["type"] == "image" -%}
                {{ "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>" }}
            {%- endif -%}
        {%- endfor -%}
        {%- for content in message["content"] -%}
            {%- if content["type"] == "text" -%}{{ content["text"] }}{%- endif -%}
        {%- endfor -%}
        {{ "\\n" -}}
    {%- elif message["role"] == "assistant" -%}
        {{- "Assistant: " -}}
        {%- for content in message["content"] -%}
            {%- if content["type"] == "text" -%}{{ content["text"] }}{%- endif -%}
        {%- endfor -%}
        {{ eos_token -}}
    {%- elif message["role"] == "system" -%}
        {%- for content in message["content"] -%}
            {%- if content["type"] == "text" -%}{{ content["text"] + "\\n" }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant: " -}}{%- endif -%}"""
# Settings of PaddlePaddle/PaddleOCR-VL, with smaller limits.
IMAGES = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_pixels": 60_000,
    "merge_size": 2,
    "min_pixels": 6000,
    "patch_size": 14,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "temporal_patch_size": 1,
}
# Keys of PaddlePaddle/PaddleOCR-VL, with smaller sizes.
TEXT = {
    "vocab_size": 400,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
    "use_bias": False,
}
VISION = {
    "model_type": "paddleocr_vl",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "image_size": 84,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-06,
    "num_attention_heads": 4,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
}
PUBLISHED = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_paddleocr_vl.PaddleOCRVLConfig"},
    "attention_probs_dropout_prob": 0.0,
    "compression_ratio": 1.0,
    "hidden_dropout_prob": 0.0,
    "ignored_index": -100,
    "max_sequence_length": None,
    "model_type": "paddleocr_vl",
    "pad_token_id": 0,
    "rope_is_neox_style": True,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_3d_rope": True,
    "use_cache": False,
    "use_flash_attention": False,
    "weight_share_add_bias": True,
}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": IMAGE}
    model_class = PaddleOCRVLForConditionalGeneration
    processor_class = PaddleOCRVLProcessor
    parts = (PaddleOCRVLImageProcessor, AutoTokenizer)


class TestPaddleOCRVL(ExtremeShapes, FamilyContract):
    name = "paddleocr_vl"
    reference_class = Reference
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
        "two images": [{"image": noise(200, 290)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        ids = save_tokenizer(
            out,
            TOKENS,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<unk>",
            cls_token="<|begin_of_sentence|>",
            chat_template=TEMPLATE,
            extra_special_tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        ).convert_tokens_to_ids
        config = {
            **PUBLISHED,
            **TEXT,
            "initializer_range": 0.1,
            "vision_config": {**VISION, "initializer_range": 0.1},
            "image_token_id": ids("<|IMAGE_PLACEHOLDER|>"),
            "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|IMAGE_START|>"),
            "vision_end_token_id": ids("<|IMAGE_END|>"),
        }
        save_json(out, preprocessor_config=IMAGES, config=config)
        read = PaddleOCRVLConfig.from_pretrained(out)
        read.tie_word_embeddings = False  # transformers prefers the default of the text model
        save_model(out, PaddleOCRVLForConditionalGeneration, read, ids("</s>"), ids("<unk>"))
        save_json(out, config=config)

    def test_a_chat_is_rendered_as_the_reference_does(self, reference, model, tokenizer, path_file):
        pixels = noise(61, 83)
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "OCR:"}, {"type": "image", "image": pixels}]},
        ]
        text = reference.processor.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=True)
        assert text == f"<|begin_of_sentence|>Be brief.\nUser: {IMAGE}OCR:\nAssistant: "
        expected = reference.processor(text=[text], images=[Image.fromarray(pixels)], return_tensors="pt")
        ids = tokenizer.tokenize_chat(messages, path_file).numpy()
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    def test_published_weights_have_their_own_names(self, path, reference, path_file, tmp_path):
        out = changed(path, tmp_path / "other", "generation_config", {})
        weights = load_file(path / "model.safetensors")
        assert {"mlp_AR.linear_1.weight", "model.embed_tokens.weight", "lm_head.weight"} <= weights.keys()
        # The published checkpoint contains these weights, which the original code does not use either.
        weights["visual.vision_model.embeddings.packing_position_embedding.weight"] = torch.zeros(4, 64)
        weights["visual.vision_model.head.probe"] = torch.zeros(1, 1, 64)
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        self.assert_same(out, reference, path_file)

    def test_a_missing_head_is_not_replaced_by_the_embeddings(self, path, tmp_path):
        """The class ties the head to the embeddings by default, but the published config.json does not."""
        shutil.copytree(path, tmp_path / "headless")
        weights = load_file(path / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, tmp_path / "headless" / "model.safetensors", {"format": "pt"})
        model = load_model(tmp_path / "headless", device="cpu")
        assert not model.spec.has_head
        with pytest.raises(UnsupportedCheckpoint, match=r"no output layer \(lm_head\)"):
            model.logits(torch.tensor([1, 2]))

    def test_an_elongated_image_is_refused(self, processor):
        pixels = noise(28, 6000)
        with pytest.raises(LimitExceeded, match=r"6000x28 pixels.*at most 200 times"):
            processor.plan(Media("image", pixels), pixels, {"image": 1})

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("preprocessor_config", {"temporal_patch_size": 2}, "temporal_patch_size is 2, but the tower .* takes 1"),
            ("preprocessor_config", {"patch_size": 16}, "patch_size is 16, but the tower"),
            ("preprocessor_config", {"merge_size": 1}, "merge_size is 1, but the tower"),
            ("preprocessor_config", {"do_resize": False}, "do_resize"),
        ]
    )
