"""Tests for Gemma 3 against transformers, on random weights."""

import json
import shutil
from typing import ClassVar

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from mindie_mm.inputs import Media, Message
from mindie_mm.models import family_named, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import TEXT, VISION, read_model, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
SPECIAL = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *TOKENS.values())
TOWER = {**VISION, "num_hidden_layers": 2, "image_size": 56, "vision_use_head": False}
FEATURES = 16
WINDOW = 12
"""Size of the sliding window. Image features exceed it, so the last tokens of an image do not see its first tokens."""
LANGUAGE = {
    **TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "initializer_range": 0.15,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
PIXELS = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, "do_pan_and_scan": None}
SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def randomized(config):
    """Return a model with random weights where transformers initializes them to 0, so that images have an effect."""
    model = Gemma3ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "projection_weight" in name or "norm" in name:
            torch.nn.init.normal_(weight, 1.0 if "vision_tower" in name else 0.0, 0.2)
    # The head shares the embedding's weights. Larger weights would make the model repeat the same token forever.
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, 0.0, 0.03)
    torch.nn.init.normal_(model.model.language_model.norm.weight, 4.0, 0.2)
    return model


def write(out, pixels=PIXELS, vision=None, text=None, stated=None, **settings):
    tokenizer = save_tokenizer(
        out, SPECIAL, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", extra_special_tokens=TOKENS
    )
    ids = tokenizer.convert_tokens_to_ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids("<bos>"))]
    )
    tokenizer.save_pretrained(out)
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**{**TOWER, **(vision or {})}),
        text_config=Gemma3TextConfig(**{**LANGUAGE, **(text or {})}),
        image_token_index=ids("<image_soft_token>"),
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        **{"mm_tokens_per_image": FEATURES, **settings},
    )
    save_model(out, randomized, config, [ids("<eos>"), ids("<end_of_turn>")], ids("<pad>"))
    save_json(out, preprocessor_config=pixels, processor_config={"image_seq_length": FEATURES, **(stated or {})})


class Reference(BaseReference):
    markers: ClassVar = {"image": "<start_of_image>"}

    def __init__(self, path):
        images = Gemma3ImageProcessor.from_pretrained(path)
        stated = json.loads((path / "processor_config.json").read_text())
        processor = Gemma3Processor(images, AutoTokenizer.from_pretrained(path), **stated)
        # The processor's class replaces the crop settings by False. Use the settings of the checkpoint's file.
        asked = {name: value for name in SCAN if (value := getattr(images, name)) is not None}
        processor.images_kwargs = {**processor.images_kwargs, **asked}
        super().__init__(read_model(Gemma3ForConditionalGeneration, path), processor)


PROMPTS = {
    **IMAGE_PROMPTS,
    "a tall image": [{"image": noise(300, 7)}, {"text": "Where?"}],
    "an image across the window's edge": [{"text": "0123"}, {"image": noise(61, 83)}, {"text": "0" * 40}],
    "images beyond the window": [
        {"text": "9" * 50},
        {"image": noise(56, 56)},
        {"image": noise(40, 50)},
        {"text": "012345"},
    ],
}


class TestGemma3(ExtremeShapes, FamilyContract):
    name = "gemma3"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    prompts: ClassVar = PROMPTS

    def test_a_chat_has_a_second_bos_only_on_request(self, path, tmp_path):
        shutil.copytree(path, tmp_path / "chat")
        template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
        (tmp_path / "chat/chat_template.jinja").write_text(template)
        with Tokenizer.from_pretrained(tmp_path / "chat") as tokenizer:
            usual, repeated = (
                tokenizer.answer(TokenizeRequest(messages=[Message("user", "0123")], options=options)).ids
                for options in (PromptOptions(), PromptOptions(repeat_special_tokens=True))
            )
        assert repeated.tolist() == [usual[0], *usual]

    @pytest.mark.parametrize(
        ("settings", "pixels"),
        [
            ({}, SCAN),
            ({"text": {"sliding_window": 18}}, {**SCAN, "pan_and_scan_max_num_crops": 1}),
            ({}, {**SCAN, "pan_and_scan_min_ratio_to_activate": 1.0}),
            ({"text": {"sliding_window": FEATURES}}, {**SCAN, "pan_and_scan_min_ratio_to_activate": 2.5}),
            ({"text": {"sliding_window": FEATURES + 1}}, {"resample": 3, "do_normalize": False}),
            ({"text": {"sliding_window": 30}}, {"image_mean": [0.1, 0.2, 0.3], "size": 56}),
            ({"text": {"sliding_window": 1}}, {"do_rescale": False}),
            ({"text": {"layer_types": ["full_attention"] * 4, "attention_bias": True}}, {}),
            ({"text": {"layer_types": ["sliding_attention"] * 4}}, {}),
            ({"text": {"rope_parameters": None, "query_pre_attn_scalar": 4}}, {}),
            # Pooling by 8 // 3 = 2 gives 16 features, more than mm_tokens_per_image.
            ({"mm_tokens_per_image": 9}, {}),
            ({"mm_tokens_per_image": 4, "stated": {"image_seq_length": 4}}, {}),
        ],
        ids=str,
    )
    def test_logits_under_other_settings_equal_the_references(self, settings, pixels, tmp_path, path_file):
        write(tmp_path, {**PIXELS, **pixels}, **settings)
        self.assert_same(tmp_path, Reference(tmp_path), path_file)

    def test_the_tokens_of_an_image_form_one_bidirectional_span(self, model, tokenizer, path_file):
        ids = tokenizer.tokenize(self.prompts["two images"], path_file)
        span_ids = model.bidirectional_spans(len(ids), model.read(ids.numpy())).tolist()
        token = model.module.config.image_token_id
        first = [-1] * 4 + [0] * FEATURES
        assert span_ids[: len(first)] == first
        assert span_ids.count(1) == FEATURES
        plain = plain_ids(ids.numpy(), model.read(ids.numpy())).tolist()
        assert [group >= 0 for group in span_ids] == [index == token for index in plain]
        assert model.bidirectional_spans(len(ids), []) is None

    def test_crops_equal_the_references(self, path, tmp_path):
        other = shutil.copytree(path, tmp_path / "other")
        save_json(other, preprocessor_config={**PIXELS, **SCAN})
        processor, images = family_named(self.name).processor(Checkpoint.open(other)), Gemma3ImageProcessor(**SCAN)
        arguments = {name: value for name, value in SCAN.items() if name != "do_pan_and_scan"}
        for height in range(1, 200, 3):
            for width in range(1, 200, 2):
                expected = images.pan_and_scan_batched(torch.empty(1, 3, height, width, device="meta"), **arguments)
                pixels = noise(1, 1).repeat(height, 0).repeat(width, 1)
                plan, _ = processor.plan(Media("image", pixels), pixels, {"image": 1})
                assert plan.grid == ((len(expected),) if expected else ()), (height, width)
                found = [pixels[crop].shape for crop in processor.crops(height, width)]
                assert found == [(*crop.shape[-2:], 3) for crop in expected]

    def test_the_worst_case_with_crops_takes_the_most_tokens(self, path, tmp_path):
        other = shutil.copytree(path, tmp_path / "other")
        for most, ratio in ((1, 1.0), (1, 1.9), (4, 1.2), (2, 7.5)):
            scan = {"pan_and_scan_max_num_crops": most, "pan_and_scan_min_ratio_to_activate": ratio}
            save_json(other, preprocessor_config={**PIXELS, **SCAN, **scan})
            self.test_the_worst_case_takes_the_most_tokens(family_named(self.name).processor(Checkpoint.open(other)))

    def test_logits_are_soft_capped(self, tmp_path, path_file):
        """The logits are capped as in Gemma3ForCausalLM, but not as in Gemma3ForConditionalGeneration.

        That class of transformers ignores the setting.
        """
        write(tmp_path, text={"final_logit_softcapping": 2.0})
        reference, model = Reference(tmp_path), load_model(tmp_path, device="cpu", dtype="float32")
        capping = Gemma3ForCausalLM(reference.model.config.text_config).eval()
        capping.model.load_state_dict(reference.model.model.language_model.state_dict())
        with Tokenizer.from_pretrained(tmp_path) as tokenizer, torch.inference_mode():
            found = {name: model.logits(tokenizer.tokenize(items, path_file)) for name, items in self.prompts.items()}
            text = capping(reference.inputs(self.prompts["text"])["input_ids"]).logits[0]
        assert (found["text"] - text).abs().max() <= self.tolerance
        for name, items in self.prompts.items():
            plain = reference.logits(items)
            assert plain.abs().max() > 2
            assert (found[name] - torch.tanh(plain / 2) * 2).abs().max() <= self.tolerance, name

    @pytest.mark.parametrize("grid", [(0, 0), (1,), (-1,)])
    def test_embeddings_whose_grid_does_not_fit_are_refused(self, grid, processor):
        assert processor.spelling("image", FEATURES, grid) is None

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"image_token_index": 2}, "image_token_index is 2"),
            ("config", {"mm_tokens_per_image": 100}, "mm_tokens_per_image is 100"),
            (
                "config",
                {"vision_config": {"model_type": "clip_vision_model"}},
                "vision_config.model_type is 'clip_vision_model'",
            ),
            ("config", {"text_config": {**LANGUAGE, "attn_logit_softcapping": 50.0}}, "attn_logit_softcapping is 50.0"),
            (
                "config",
                {"text_config": {**LANGUAGE, "use_bidirectional_attention": True}},
                "use_bidirectional_attention",
            ),
            ("config", {"text_config": {**LANGUAGE, "sliding_window": None}}, "sliding_window is None"),
            ("processor_config", {"image_seq_length": 256}, "image_seq_length is 256"),
            ("preprocessor_config", {"do_resize": False}, "do_resize is False"),
            ("preprocessor_config", {"size": {"height": 28, "width": 56}}, "the tower takes images of 56x56"),
            ("preprocessor_config", {"resample": 0}, "resample is 0"),
            ("preprocessor_config", {"image_processor_type": "SiglipImageProcessor"}, "SiglipImageProcessor"),
            (
                "preprocessor_config",
                {**SCAN, "pan_and_scan_max_num_crops": 21},
                "max_num_crops=21 must be between 1 and",
            ),
            ("preprocessor_config", {**SCAN, "pan_and_scan_max_num_crops": 0}, "max_num_crops=0"),
        ]
    )
