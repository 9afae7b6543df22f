"""Tests for weights that have their authors' names, and tokens that authors add to a tokenizer."""

import json

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mindie_mm.nn.checkpoint.directory import tokenizer_length, with_special_tokens
from mindie_mm.nn.checkpoint.renaming import TRANSPOSED, UNBATCHED, Renaming, rename, third
from tests.models.small_checkpoints import save_tokenizer, save_unigram_tokenizer

RULES = (
    *(Renaming(rf"layer\.(\d)\.{part}", r"blocks.\1.qkv", third(index)) for index, part in enumerate("qkv")),
    Renaming(r"position", "pos", UNBATCHED),
    Renaming(r"(\w+)\.weight", r"\1", TRANSPOSED),
)


def test_each_weight_follows_the_first_rule_that_matches():
    qkv, position, head = torch.arange(12.0).view(6, 2), torch.ones(1, 4), torch.arange(6.0).view(2, 3)
    shapes = {**{f"layer.3.{part}": (2, 2) for part in "qkv"}, "position": (4,), "head.weight": (3, 2), "norm": (5,)}
    published = {"blocks.3.qkv": qkv, "pos": position, "head": head, "norm": torch.zeros(5), "other": torch.zeros(1)}
    renamed = rename(published.items(), shapes, RULES)
    for part, expected in zip("qkv", qkv.split(2), strict=True):
        assert torch.equal(renamed.weights[f"layer.3.{part}"], expected)
    assert torch.equal(renamed.weights["position"], position[0])
    assert torch.equal(renamed.weights["head.weight"], head.T)
    assert renamed.weights["norm"] is published["norm"], "a weight without a matching rule keeps its name"
    assert [*renamed.others] == ["other"]
    assert not renamed.misfits


def test_missing_weights_and_wrong_shapes_are_reported_with_published_names():
    shapes = {**{f"layer.0.{part}": (2, 2) for part in "qkv"}, "head.weight": (3, 2)}
    renamed = rename([("blocks.0.qkv", torch.zeros(5, 2))], shapes, RULES)
    assert set(renamed.misfits) == {("blocks.0.qkv", (5, 2), (6, 2))}
    assert renamed.published["head.weight"] == "head"
    assert not renamed.weights


@pytest.mark.parametrize("save", [save_tokenizer, save_unigram_tokenizer])
def test_added_tokens_have_the_same_ids_as_in_transformers(save, tmp_path):
    tokenizer = save(tmp_path, ("<unk>", "</s>", "<od>"), unk_token="<unk>", eos_token="</s>")
    added = ["<od>", "<loc_0>", "is", "<loc_1>"]
    described = with_special_tokens(json.loads((tmp_path / "tokenizer.json").read_text()), added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    found = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_tokens(added, special_tokens=True)
    assert found.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_length(described) == len(tokenizer)
    text = "a<loc_1> is <od><loc_0>"
    assert found.encode(text) == tokenizer.encode(text)
