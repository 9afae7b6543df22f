"""Tests for Chameleon against transformers, on random weights."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    ChameleonImageProcessor,
    ChameleonProcessor,
)

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.models import load_model
from mindie_mm.nn.splice import plain_ids
from tests.models.contract import IMAGE_PROMPTS, FamilyContract, noise, refusals
from tests.models.references import PretrainedReference
from tests.models.small_checkpoints import save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<racm3:break>", "<eoss>", "<image>", "<reserved08706>")
CODES = 48
PIXELS = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
FEATURES = 64


class Reference(PretrainedReference):
    markers: ClassVar = {"image": "<image>"}
    model_class = ChameleonForConditionalGeneration
    processor_class = ChameleonProcessor
    parts = (ChameleonImageProcessor, AutoTokenizer)

    def in_bfloat16(self):
        """Return None, because rounded pixels would give other image tokens. The family keeps pixels in float32."""


class TestChameleon(FamilyContract):
    name = "chameleon"
    reference_class = Reference
    prompts: ClassVar = {
        **IMAGE_PROMPTS,
        "an image of the size": [{"image": noise(32, 32)}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, SPECIAL, bos_token="<s>", eos_token="</s>", pad_token="<pad>", sep_token="<reserved08706>"
        )
        ids = tokenizer.convert_tokens_to_ids
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", ids("<s>"))]
        )
        tokenizer.save_pretrained(out)
        names = ["".join(chr(ord("A") + int(digit)) for digit in str(code)) for code in range(CODES)]
        images = {f"IMGIMG{name}Z": 400 + index for index, name in enumerate(names)}
        config = ChameleonConfig(
            vocab_size=400 + CODES,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            vocabulary_map={**tokenizer.get_vocab(), **images},
            vq_config={
                "embed_dim": 16,
                "num_embeddings": CODES,
                "latent_channels": 32,
                "resolution": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 2, 2],
                "num_res_blocks": 1,
            },
        )
        save_model(out, ChameleonForConditionalGeneration, config, ids("</s>"), ids("<pad>"))
        save_json(out, preprocessor_config=PIXELS, processor_config={"image_seq_length": FEATURES})

    def test_images_become_the_references_image_tokens(self, reference, model, tokenizer, path_file):
        """An image has the same tokens alone and in a batch. Each image must have many different tokens."""
        pixels = [noise(50, 40), noise(33, 64)]
        ids = [tokenizer.tokenize([{"image": image}], path_file) for image in pixels]
        items = [item for each in ids for item in model.read(each.numpy())]
        pixels = torch.cat([model.normalized(item).cpu() for item in items])
        tokens = reference.model.get_image_tokens(pixels)
        embedding = model.module.model.embed_tokens
        for alone, together, own in zip(items, model.encode(items), tokens, strict=True):
            assert torch.equal(together, embedding(own.to(together.device)))
            assert torch.equal(model.encode([alone])[0], together)
            assert len(own.unique()) > 8

    def test_image_tokens_are_the_same_in_bfloat16(self, path, device, model, tokenizer, path_file):
        half = load_model(path, device=device, dtype="bfloat16")
        items = model.read(tokenizer.tokenize(self.prompts["two images"], path_file).numpy())
        for full, rounded in zip(model.encode(items), half.encode(items), strict=True):
            assert torch.equal(full.to(torch.bfloat16), rounded)

    def test_image_tokens_have_the_lowest_logits(self, model, tokenizer, path_file):
        logits = model.logits(tokenizer.tokenize(self.prompts["one image"], path_file))
        assert (logits[:, 400:] == torch.finfo(torch.float32).min).all()
        assert (logits[:, :400] > -1e6).all()

    def test_chat_works_without_a_template_in_the_checkpoint(self, tokenizer, model, path_file):
        image = noise(40, 40)
        message = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hm?"}]}]
        chat, plain = tokenizer.tokenize_chat(message, path_file), [{"image": image}, {"text": "\nHm?"}]
        found, expected = (ids.numpy() for ids in (chat, tokenizer.tokenize(plain, path_file)))
        assert np.array_equal(plain_ids(found, model.read(found)), plain_ids(expected, model.read(expected)))

    def test_an_image_that_would_become_enormous_is_refused(self, processor):
        line = np.zeros((1, 6_000_000, 3), np.uint8)
        with pytest.raises(LimitExceeded, match="resized to 192000000x32"):
            processor.plan(Media("image", line), line, {})

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("preprocessor_config", {"do_center_crop": False}, "do_center_crop is False"),
            ("preprocessor_config", {"resample": 0}, "resample is 0"),
            ("preprocessor_config", {"crop_size": {"height": 64, "width": 64}}, "smaller than crop_size"),
            ("preprocessor_config", {"size": {"shortest_edge": 32, "longest_edge": 64}}, "smaller than crop_size"),
            ("preprocessor_config", {"crop_size": {"height": 16, "width": 32}}, "an image has 32 tokens"),
            ("processor_config", {"image_seq_length": 65}, "image_seq_length is 65"),
            ("config", {"vocabulary_map": None}, "None in vocabulary_map"),
            ("tokenizer_config", {"sep_token": None}, "no sep_token"),
        ]
    )
