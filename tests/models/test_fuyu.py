"""Tests for Fuyu against transformers, on random weights."""

from typing import ClassVar

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import FuyuConfig, FuyuForCausalLM, FuyuImageProcessor, FuyuProcessor, PreTrainedTokenizerFast

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import Embeddings, Media
from mindie_mm.models import family_named
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.tokenize import Tokenizer as OurTokenizer
from tests.models.contract import ExtremeShapes, FamilyContract, noise
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import changed, read_model, save_json, save_model
from tests.transformers_reference import AutoTokenizer

SPECIAL = ("<unk>", "<s>", "|ENDOFTEXT|")
MEDIA = ("|SPEAKER|", "|NEWLINE|", "<0x00>", "<0x01>", "<0x02>", "<0x03>", "<0x04>")
PIXELS = {"size": {"height": 48, "width": 80}, "patch_size": {"height": 8, "width": 8}}


def save_tokenizer(out):
    """Write a Unigram tokenizer whose pieces include image tokens, and which prepends "▁".

    The published tokenizer does the same.
    """
    letters = ["▁", *map(chr, range(33, 127)), "\n", "▁the", "▁is", "▁in"]
    pieces = [*((token, 0.0) for token in SPECIAL), *((token, -1.0) for token in MEDIA)]
    pieces += [(letter, -5.0 - index / 100) for index, letter in enumerate(letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="|ENDOFTEXT|"
    ).save_pretrained(out)
    return tokenizer


class Reference(BaseReference):
    markers: ClassVar = {"image": ""}

    def __init__(self, path):
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        super().__init__(
            read_model(FuyuForCausalLM, path),
            FuyuProcessor(FuyuImageProcessor.from_pretrained(path), tokenizer),
        )

    def inputs(self, items):
        images = [Image.fromarray(item["image"]) for item in items if "image" in item]
        text = self.text(items)
        if not images:
            return self.processor(text=[text], return_tensors="pt")
        return self.processor(text=[text], images=images, return_tensors="pt", return_legacy_image_output=False)


class TestFuyu(ExtremeShapes, FamilyContract):
    name = "fuyu"
    reference_class = Reference
    unspelled = True
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one image": [{"image": noise(30, 44)}, {"text": "What is it?"}],
        "in the middle of a text": [{"text": "Look: "}, {"image": noise(48, 80)}, {"text": " what is it?\n"}],
        "a large image": [{"image": noise(190, 140)}, {"text": "Describe it."}],
        "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
        "a high image": [{"image": noise(700, 15)}, {"text": "Where?"}],
        "no question": [{"image": noise(30, 44)}, {"text": ""}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(out)
        text = {
            "model_type": "persimmon",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "hidden_act": "relu2",
            "qk_layernorm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 25000.0, "partial_rotary_factor": 0.5},
        }
        ids = tokenizer.token_to_id
        config = FuyuConfig(text_config=text, patch_size=8, image_token_id=ids("|SPEAKER|"))
        save_model(out, FuyuForCausalLM, config, ids("|ENDOFTEXT|"), 0)
        save_json(out, preprocessor_config=PIXELS)

    def test_a_second_image_is_refused(self, tokenizer, path_file):
        with pytest.raises(LimitExceeded, match=r"2 items of kind image.*limit is 1"):
            tokenizer.tokenize([{"image": noise(9, 9)}, {"image": noise(8, 8)}], path_file)

    @pytest.mark.parametrize("spelled", ["|SPEAKER|", "|NEWLINE|", "<0x04>", "<s>", "|ENDOFTEXT|", "<<s>"])
    def test_text_makes_no_control_token_from_a_piece_of_the_vocabulary(self, spelled, path, tokenizer, path_file):
        """No text produces a control token, although the tokenizer's own pieces include control tokens."""
        vocabulary = family_named("fuyu").tokenizer(Checkpoint.open(path)).get_vocab()
        items = [{"image": noise(30, 40)}, {"text": f"a {spelled} b"}]
        plain = [{"image": noise(30, 40)}, {"text": "a b"}]
        ids, other = (tokenizer.tokenize(one, path_file, parse_special=False).tolist() for one in (items, plain))
        control = vocabulary[spelled.removeprefix("<") if spelled == "<<s>" else spelled]
        assert ids.count(control) == other.count(control)
        assert len(ids) > len(other) + 3

    def test_an_image_whose_resized_side_would_be_zero_is_refused(self, processor):
        line = noise(1, 900)
        with pytest.raises(LimitExceeded, match="900x1"):
            processor.plan(Media("image", line), line, {})

    def test_chat_works_without_a_template_in_the_checkpoint(self, path, tokenizer, model, path_file):
        message = [{"role": "user", "content": [{"type": "image", "image": noise(20, 20)}, {"type": "text", "text": "Hm?"}]}]  # fmt: skip # noqa: E501
        assert OurTokenizer.from_pretrained(path).has_template
        chat = tokenizer.tokenize_chat(message, path_file)
        plain = tokenizer.tokenize([{"image": noise(20, 20)}, {"text": "Hm?\n"}], path_file)
        assert (model.logits(chat) - model.logits(plain)).abs().max() == 0

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"do_pad": False}, "do_pad is False"),
            ({"padding_mode": "reflect"}, "padding_mode is 'reflect'"),
            ({"resample": 0}, "resample is 0"),
            ({"patch_size": {"height": 8, "width": 4}}, "patch_size is {'height': 8, 'width': 4}"),
            ({"patch_size": {"height": 4, "width": 4}}, "must be 8 pixels square"),
            ({"size": {"shortest_edge": 48}}, "size is {'shortest_edge': 48}"),
            ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
            ({"size": {"height": 50, "width": 80}}, "50x80"),
        ],
        ids=str,
    )
    def test_unsupported_settings_are_refused_by_name(self, change, named, path, tmp_path):
        self.assert_refused(changed(path, tmp_path / "other", "preprocessor_config", change), named)

    def test_embeddings_without_rows_and_columns_are_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match=r"have 12 features and the grid \(3, 5\); this model has no image"):
            tokenizer.tokenize([{"image": Embeddings(np.zeros((12, 64), np.float32), (3, 5))}], path_file)
