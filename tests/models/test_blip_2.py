"""Tests for BLIP-2 with OPT and with T5 against transformers, on random weights."""

import unicodedata
from typing import ClassVar

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
    OPTConfig,
    T5Config,
)

from mindie_mm.errors import InputError
from mindie_mm.nn.seq2seq import Seq2SeqModel
from tests.models.contract import FamilyContract, noise
from tests.models.references import PretrainedReference
from tests.models.seq2seq_contract import Seq2SeqContract, Seq2SeqReference
from tests.models.small_checkpoints import save_json, save_tokenizer, save_unigram_tokenizer
from tests.transformers_reference import AutoTokenizer

SIDE, QUERIES = 28, 6
# With the default range of weights, the tower's outputs are near 1e-10, so images would not affect the logits.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


OPT_CONFIG = OPTConfig(
    vocab_size=400,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    init_std=0.2,
)
T5_CONFIG = T5Config(
    vocab_size=400,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    initializer_factor=1.4,
    feed_forward_proj="gated-gelu",
    decoder_start_token_id=0,
)
DECODER_INPUT_IDS = (0, 77, 300, 12, 12, 5)


def config(image_token_index, text=OPT_CONFIG):
    return Blip2Config(
        vision_config={"image_size": SIDE, "patch_size": 14, **SMALL},
        qformer_config={"vocab_size": 30, **SMALL},
        text_config=text.to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=image_token_index,
    )


class Blip2Reference(PretrainedReference):
    model_class = Blip2ForConditionalGeneration
    processor_class = Blip2Processor
    parts = (BlipImageProcessor, AutoTokenizer)
    settings: ClassVar = {"num_query_tokens": QUERIES}

    def text(self, items):
        return "".join(item.get("text", "") for item in items)

    def inputs(self, items):
        return {name: value for name, value in super().inputs(items).items() if name != "token_type_ids"}

    @torch.inference_mode()
    def logits(self, items):
        inputs = self.inputs(items)
        # The whole model requires pixels, so text alone is given to the language model.
        whole = self.model if "pixel_values" in inputs else self.model.language_model
        return whole(**inputs).logits[0].float()

    @torch.inference_mode()
    def generate(self, items, count):
        inputs = self.inputs(items)
        if "pixel_values" in inputs:
            return super().generate(items, count)
        out = self.model.language_model.generate(**inputs, max_new_tokens=count, do_sample=False)
        return out[0, inputs["input_ids"].shape[1] :].tolist()


class TestBlip2(FamilyContract):
    name = "blip_2"
    reference_class = Blip2Reference
    unspelled = True
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"image": noise(90, 140)}, {"text": "Question: what is it? Answer:"}],
        "an image behind its question": [{"text": "what is it?"}, {"image": noise(28, 28)}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "no question": [{"image": noise(61, 83)}, {"text": ""}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(
            out, ("</s>", "<pad>", "<image>"), bos_token="</s>", eos_token="</s>", pad_token="<pad>"
        )
        # OPT puts its BOS token, which is also its EOS token, in front of every text.
        bos = tokenizer.convert_tokens_to_ids("</s>")
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("</s> $A", special_tokens=[("</s>", bos)])
        tokenizer.save_pretrained(out)
        torch.manual_seed(0)
        model = Blip2ForConditionalGeneration(config(tokenizer.convert_tokens_to_ids("<image>")))
        with torch.no_grad():
            model.query_tokens.normal_()
        for settings in (model.generation_config, model.language_model.generation_config):
            settings.eos_token_id, settings.pad_token_id = 399, 1
        model.save_pretrained(out)
        save_json(out, preprocessor_config={"size": {"height": SIDE, "width": SIDE}})

    def test_a_second_image_is_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match="2 items of kind image; the model's limit is 1"):
            tokenizer.tokenize([{"image": noise(30, 30)}] * 2, path_file)

    def test_a_chat_becomes_a_question(self, path, tokenizer, path_file):
        content = [{"type": "text", "text": "what is it?"}, {"type": "image", "image": noise(30, 30)}]
        ids = tokenizer.tokenize_chat([{"role": "user", "content": content}], path_file)
        text = AutoTokenizer.from_pretrained(path)("Question: what is it? Answer:")["input_ids"]
        assert ids[QUERIES:].tolist() == text


class Blip2T5Reference(Blip2Reference, Seq2SeqReference):
    decoder_input_ids = DECODER_INPUT_IDS

    def part(self, items):
        return (
            self.model if any("image" in item for item in items) else self.model.language_model
        )  # the whole model requires pixels

    logits = Seq2SeqReference.logits
    generate = Seq2SeqReference.generate


class TestBlip2T5(Seq2SeqContract):
    int8_tolerance = 0.2  # 0.13 was measured
    name = "blip_2"
    reference_class = Blip2T5Reference
    unspelled = True
    decoder_input_ids = DECODER_INPUT_IDS
    prompts = TestBlip2.prompts
    assert_arrays = TestBlip2.assert_arrays

    @classmethod
    def write_checkpoint(cls, out):
        named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        save_unigram_tokenizer(out, ("<pad>", "</s>", "<unk>", "<image>"), **named)
        torch.manual_seed(0)
        model = Blip2ForConditionalGeneration(config(3, T5_CONFIG))
        with torch.no_grad():
            model.query_tokens.normal_()
        model.save_pretrained(out)
        save_json(out, preprocessor_config={"size": {"height": SIDE, "width": SIDE}})

    def test_the_model_is_an_encoder_decoder(self, model):
        assert isinstance(model, Seq2SeqModel)
        assert model.rules.start_token_id == 0
        assert model.spec.eos_token_ids == (1,)

    @pytest.mark.parametrize("token", ["<pad>", "</s>", "<image>", "＜／s＞", "＜pad>", "<ｉmage＞"])  # noqa: RUF001
    @pytest.mark.parametrize("text", ["what is {}?", "{}{} {} a", "a{}", "{}"])
    def test_text_makes_no_control_token(self, token, text, path, tokenizer, path_file):
        """No text produces a control token, although the Unigram tokenizer itself would produce some.

        Its pieces include the control tokens, whether or not special tokens are recognized. It also normalizes
        full-width characters, so that they spell control tokens.
        """
        reference, text = AutoTokenizer.from_pretrained(path), text.format(*[token] * 3)
        plain = unicodedata.normalize("NFKC", token)
        assert reference.convert_tokens_to_ids(plain) in reference(text)["input_ids"][:-1]
        items = [{"image": noise(30, 30)}, {"text": text}]
        *ids, end = tokenizer.tokenize(items, path_file, parse_special=False).tolist()[QUERIES:]
        assert end == 1
        assert not {0, 1, 3} & {*ids}
        # If the text of a control token is split in two, the second part begins with a space, as after a control token.
        assert reference.decode(ids).replace(" ", "") == unicodedata.normalize("NFKC", text).replace(" ", "")

    def test_images_change_the_logits(self, model, tokenizer, path_file):
        prompts = [[{"image": noise(50, 50, seed)}, {"text": "?"}] for seed in range(2)]
        first, second = (self.logits(model, tokenizer.tokenize(items, path_file)) for items in prompts)
        assert (first - second).abs().max() > 100 * self.tolerance
