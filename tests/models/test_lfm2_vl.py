"""Tests for LFM2-VL against transformers, on random weights."""

from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration, Lfm2VlImageProcessor, Lfm2VlProcessor

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.models import load_model
from mindie_mm.nn.splice import plain_ids
from tests.models.contract import IMAGE_PROMPTS, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import changed, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

MARKS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
PLACES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column < 5)
SPECIAL_TOKENS = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS, *PLACES)
PIXELS = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "do_resize": False,
    "encoder_patch_size": 4,
    "tile_size": 32,
    "min_image_tokens": 4,
    "max_image_tokens": 30,
    "max_tiles": 4,
    "max_pixels_tolerance": 1.5,
    "resample": 3,
}
TEXT = {
    "model_type": "lfm2",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
EXPERTS = {
    **{name: value for name, value in TEXT.items() if name != "block_auto_adjust_ff_dim"},
    "model_type": "lfm2_moe",
    "num_dense_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
VISION = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 25,
    "vision_use_head": False,
}


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = Lfm2VlForConditionalGeneration
    processor_class = Lfm2VlProcessor
    parts = (Lfm2VlImageProcessor, AutoTokenizer)


def write(out, pixels=PIXELS, text=TEXT, **settings):
    tokenizer = save_tokenizer(
        out, SPECIAL_TOKENS, bos_token="<|startoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    ids = tokenizer.convert_tokens_to_ids
    settings = {"projector_hidden_size": 48, **settings}
    config = Lfm2VlConfig(text_config=text, vision_config=VISION, image_token_id=ids("<image>"), **settings)
    save_model(out, Lfm2VlForConditionalGeneration, config, ids("<|im_end|>"), ids("<|pad|>"))
    save_json(out, preprocessor_config=pixels)


class TestLfm2VL(FamilyContract):
    name = "lfm2_vl"
    write_checkpoint = staticmethod(write)
    int8_tolerance = 0.15  # 0.12 was measured, because a short convolution multiplies three quantized results
    reference_class = Reference
    prompts: ClassVar = {**IMAGE_PROMPTS, "a long image": [{"image": noise(20, 300)}, {"text": "Where?"}]}

    def test_images_of_any_size_have_the_references_ids(self, reference, model, tokenizer, path_file):
        for height, width in (
            (1, 1),
            (32, 40),
            (48, 60),
            (49, 61),
            (60, 48),
            (64, 80),
            (300, 50),
            (65, 400),
            (400, 401),
        ):
            items = [{"image": noise(height, width)}, {"text": "?"}]
            expected = reference.inputs(items)
            ids = tokenizer.tokenize(items, path_file).numpy()
            media = model.read(ids)
            assert plain_ids(ids, media).tolist() == expected["input_ids"][0].tolist(), (height, width)
            self.assert_arrays(expected, media, model)

    def test_images_that_would_take_too_many_tokens_are_refused(self, processor):
        image = noise(1, 400)
        with pytest.raises(LimitExceeded, match=r"400x1 pixels.* the limit is 30 \(max_image_tokens\)"):
            processor.plan(Media("image", image), image, {})

    @pytest.mark.parametrize(
        ("pixels", "settings"),
        [
            ({"use_thumbnail": False}, {"text": EXPERTS, "projector_use_layernorm": False}),
            ({"do_image_splitting": False, "do_normalize": False}, {"text": {**TEXT, "conv_bias": True}}),
        ],
        ids=["no thumbnail, experts", "no tiles, biases"],
    )
    def test_logits_under_other_settings_equal_the_references(self, pixels, settings, tmp_path, path_file):
        write(tmp_path, {**PIXELS, **pixels}, **settings)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_published_names_of_weights_are_read(self, path, reference, tokenized, tmp_path):
        out, tower = changed(path, tmp_path / "other", "generation_config", {}), "model.vision_tower."
        weights = load_file(path / "model.safetensors")
        plain = {name.replace(f"{tower}vision_model.", tower): weight for name, weight in weights.items()}
        published = {name.replace(tower, f"{tower}vision_model."): weight for name, weight in plain.items()}
        save_file(published, out / "model.safetensors", {"format": "pt"})
        found = self.logits(load_model(out, device="cpu", dtype="float32"), tokenized["one image"])
        assert (found - reference.logits(self.prompts["one image"])).abs().max() <= self.tolerance

    test_a_changed_setting_is_refused = refusals(
        [
            ("preprocessor_config", {"encoder_patch_size": 8}, "encoder_patch_size is 8"),
            ("preprocessor_config", {"downsample_factor": 4}, "downsample_factor is 4"),
            ("preprocessor_config", {"tile_size": 36}, r"tile_size=36 must be a multiple .*\(8\)"),
            ("preprocessor_config", {"min_tiles": 1}, "min_tiles is 1 and max_tiles is 4"),
            ("config", {"image_token_id": 7}, "image_token_id is 7, but the tokenizer's id"),
        ]
    )
