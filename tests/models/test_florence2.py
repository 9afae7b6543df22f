"""Tests for Florence-2 against transformers, on random weights."""

from functools import partial
from typing import ClassVar

import openai
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import BartConfig, CLIPImageProcessor, Florence2Config, Florence2ForConditionalGeneration
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.models import load_model
from tests.models.contract import noise, run
from tests.models.seq2seq_contract import Seq2SeqContract, Seq2SeqReference
from tests.models.small_checkpoints import changed, save_json, save_tokenizer
from tests.transformers_reference import AutoTokenizer
from tests.warm import running_service
from tests.watching import metric, wait_until
from tools.demo import data_url

SIDE, FEATURES = 96, 10
BOS, PAD, EOS, IMAGE, PLACE = range(5)
TOKENS = ("<s>", "<pad>", "</s>", "<image>", "<loc_7>", "<loc_8>")
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "do_center_crop": False,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "image_seq_length": FEATURES,
}


def config():
    text = BartConfig(
        vocab_size=400,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=1024,
        init_std=0.2,
        scale_embedding=True,
    )
    vision = {
        "depths": [1, 1, 2, 1],
        "embed_dim": [8, 16, 16, 32],
        "num_heads": [2, 2, 2, 4],
        "num_groups": [2, 2, 2, 4],
        "window_size": 4,
        "projection_dim": 32,
        "initializer_range": 0.1,
    }
    return Florence2Config(text_config=text.to_dict(), vision_config=vision, image_token_id=IMAGE)


class Florence2Reference(Seq2SeqReference):
    decoder_input_ids = (EOS, BOS, 77, 300, 12, 12)

    def __init__(self, path):
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.image_token, tokenizer.image_token_id = "<image>", IMAGE
        images = CLIPImageProcessor.from_pretrained(path)
        images.image_seq_length = FEATURES
        model = Florence2ForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        super().__init__(model, Florence2Processor(images, tokenizer))

    def text(self, items):
        text = "".join(item.get("text", "") for item in items)
        return self.processor._construct_prompts(text)[0]


class TestFlorence2(Seq2SeqContract):
    name = "florence2"
    embeds_media_tokens = False
    reference_class = Florence2Reference
    unspelled = True
    decoder_input_ids = Florence2Reference.decoder_input_ids
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "a task": [{"image": noise(90, 140)}, {"text": "<DETAILED_CAPTION>"}],
        "a task on an input": [{"text": "<REGION_TO_OCR> <loc_7><loc_8> "}, {"image": noise(28, 28)}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "no question": [{"image": noise(61, 83)}, {"text": ""}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(out, TOKENS, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
        # BART puts every text between these tokens.
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
        tokenizer.save_pretrained(out)
        torch.manual_seed(0)
        model = Florence2ForConditionalGeneration(config())
        # These are the published settings except for beam search, which one test requests itself.
        model.generation_config.update(
            decoder_start_token_id=EOS,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            forced_bos_token_id=BOS,
            forced_eos_token_id=EOS,
            no_repeat_ngram_size=3,
        )
        model.save_pretrained(out)
        save_json(out, preprocessor_config=PREPROCESSOR)

    def test_a_second_image_is_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match="2 items of kind image; the model's limit is 1"):
            tokenizer.tokenize([{"image": noise(30, 30)}] * 2, path_file)

    def test_a_task_token_with_other_text_is_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match="<OD> does not accept further text"):
            tokenizer.tokenize([{"image": noise(30, 30)}, {"text": "<OD> of cats"}], path_file)

    def test_a_chat_of_more_than_one_message_is_refused(self, tokenizer, path_file):
        image = {"type": "image", "image": noise(30, 30)}
        message = {"role": "user", "content": [{"type": "text", "text": "<CAPTION>"}, image]}
        expected = tokenizer.tokenize([{"text": "<CAPTION>"}, {"image": noise(30, 30)}], path_file)
        assert tokenizer.tokenize_chat([message], path_file)[FEATURES:].tolist() == expected[FEATURES:].tolist()
        with pytest.raises(InputError, match="one message"):
            tokenizer.tokenize_chat([{"role": "system", "content": "Be brief."}, message], path_file)

    @pytest.mark.parametrize(("parse_special", "parsed"), [(False, []), (True, [EOS, BOS])])
    def test_text_can_spell_location_tokens(self, parse_special, parsed, tokenizer, path_file):
        items = [{"image": noise(30, 30)}, {"text": "<loc_7></s><image><s><loc_8>"}]
        text = tokenizer.tokenize(items, path_file, parse_special=parse_special)[FEATURES:].tolist()
        assert [token for token in text if token < len(TOKENS)] == [BOS, PLACE, *parsed, PLACE + 1, EOS]

    def test_the_first_and_last_tokens_are_forced(self, model, tokenized):
        """BOS is forced as the first token.

        EOS is forced as the last allowed token, unless the request forbids EOS there.
        """
        for settings, last in (({}, True), ({"ignore_eos": True}, False), ({"min_tokens": 5}, False)):
            outputs, _ = run(self.engine(model), [*tokenized.values()], max_tokens=5, **settings)
            for output in outputs.values():
                assert len(output) == 5
                assert output[0] == BOS
                assert (output[-1] == EOS) == last

    @pytest.mark.parametrize(("setting", "value"), [("min_length", 4), ("encoder_no_repeat_ngram_size", 2)])
    def test_unsupported_generation_rules_are_refused(self, path, tmp_path, setting, value):
        other = changed(path, tmp_path / "other", "generation_config", {setting: value})
        with pytest.raises(UnsupportedCheckpoint, match=f"{setting} to {value}"):
            load_model(other, device="cpu")

    def test_beams_are_ignored_with_a_warning(self, path, tmp_path, caplog):
        load_model(changed(path, tmp_path / "other", "generation_config", {"num_beams": 3}), device="cpu")
        assert "num_beams to 3; outputs are decoded without beam search" in caplog.text

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"image_seq_length": 577}, "image_seq_length is 577; only 10 is supported"),
            ({"size": {"shortest_edge": 96}}, "images to several sizes"),
            (
                {"size": {"height": 1632, "width": 96}, "image_seq_length": 154},
                "position embeddings for at most 50 x 50",
            ),
        ],
    )
    def test_preprocessing_that_does_not_fit_the_tower_is_refused(self, path, tmp_path, changes, message):
        self.assert_refused(changed(path, tmp_path / "other", "preprocessor_config", changes), message)

    @pytest.mark.slow
    def test_the_openai_client_is_answered(self, path, model, tokenizer, path_file, tmp_path):
        """The test covers usage, log-probabilities, streams, stop strings, refusals and a client that disconnects."""
        pixels = noise(50, 70)
        drawn = {"type": "image_url", "image_url": {"url": data_url(Image.fromarray(pixels))}}
        content = [drawn, {"type": "text", "text": "<CAPTION>"}]
        likely = {PLACE: 50.0, PLACE + 1: 50.0}
        ids = tokenizer.tokenize([{"image": pixels}, {"text": "<CAPTION>"}], path_file)
        outputs, _ = run(self.engine(model), [ids], max_tokens=12, logit_bias=likely)
        shown = [token for token in outputs[0] if token not in (BOS, EOS)]
        expected = AutoTokenizer.from_pretrained(path).decode(shown, clean_up_tokenization_spaces=False)
        assert "<loc_7>" in expected
        assert "<loc_8>" in expected
        settings = {"spool": tmp_path / "spool", "arena_bytes": 2**25, "kv_cache_bytes": 2**25, "dtype": "float32"}
        with (
            running_service(settings, tmp_path / "log", path) as running,
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
        ):
            bias = {str(token): value for token, value in likely.items()}
            ask = partial(client.chat.completions.create, model=running.model, temperature=0, logit_bias=bias)
            asked = partial(ask, messages=[{"role": "user", "content": content}])
            whole = asked(max_tokens=12, logprobs=True, top_logprobs=2)
            (choice,) = whole.choices
            assert (choice.message.content, choice.finish_reason) == (expected, "length")
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 12)
            assert len(choice.logprobs.content) == 12
            chunks = list(asked(max_tokens=12, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
            assert chunks[-1].choices[0].finish_reason == "length"
            stopped = asked(max_tokens=12, stop="<loc_8>").choices[0]
            assert (stopped.message.content, stopped.finish_reason) == (expected.partition("<loc_8>")[0], "stop")
            for messages, error in (
                ([{"role": "user", "content": [drawn, drawn]}], "2 items of kind image; the model's limit is 1"),
                ([{"role": "system", "content": "Hi"}, {"role": "user", "content": content}], "one message"),
            ):
                with pytest.raises(openai.BadRequestError, match=error):
                    ask(messages=messages, max_tokens=3)
            with pytest.raises(openai.BadRequestError, match="beam search is not supported for encoder-decoder"):
                asked(max_tokens=3, logit_bias={}, extra_body={"use_beam_search": True})
            with pytest.raises(
                openai.BadRequestError, match="length is 1024 tokens; the request needs 1025 output tokens"
            ):
                asked(max_tokens=1025)
            with asked(max_tokens=1024, stream=True, extra_body={"ignore_eos": True}) as stream:
                next(iter(stream))
            wait_until(lambda: metric(running, "request_success_total", finished_reason="abort") == 1)
            assert running.wait_until_free()["blocks"] == 0
