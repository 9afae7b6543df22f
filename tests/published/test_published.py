"""Tests that small copies of published checkpoints give the same results as transformers, or are refused."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import transformers_reference  # noqa: F401 - must be imported before transformers looks for torchvision

# isort: split
import transformers
from transformers import AutoProcessor

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Text
from mindie_mm.models import family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from tests.models.contract import FamilyContract, media_texts, noise
from tests.models.references import Reference
from tests.published.checkpoints import ELSEWHERE, FOLDER, ONLY_CONFIGS, REFUSED, SIZES, write_small

pytestmark = pytest.mark.slow  # the tests for the families compare the same with small checkpoints

MARKERS = {
    "fuyu": "",
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
    "llava": "<image>",
    "llava_next": "<image>",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>"),
}
VARIANTS = {
    "gemma3_medgemma27b",
    "idefics3_aeon_smolvlm256",
    "idefics3_granite_docling",
    "llava15_lora",
    "qwen25_vl_3b_agri",
    "qwen2_vl_ain",
    "qwen3_vl_8b_lora",
}
"""Checkpoints that differ little from another one, or from the checkpoint in the tests for their family."""
ITEMS = [{"image": noise(150, 190)}, {"text": "What is in the image?"}]
TEXT = [{"text": "a red square"}]


class PublishedReference(Reference):
    """Model and processor that transformers loads from a checkpoint directory."""

    markers: ClassVar = {}

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        cls = getattr(transformers, config["architectures"][0])
        read = cls.config_class.from_pretrained(path)
        if config["model_type"] == "fuyu":
            # If text_config has no rope_theta, transformers 4 uses 25000 and transformers 5 uses 10000.
            read.text_config.rope_parameters["rope_theta"] = 25_000.0
        super().__init__(
            cls.from_pretrained(path, config=read, dtype=torch.float32), AutoProcessor.from_pretrained(path)
        )
        self.markers = {"image": MARKERS[config["model_type"]]}

    def inputs(self, items: Any) -> Any:
        if self.markers["image"]:
            return super().inputs(items)
        self.processor.tokenizer.model_input_names = ["input_ids", "attention_mask"]
        images = {"images": [item["image"] for item in items if "image" in item]}
        options = {**images, "return_legacy_image_output": False} if images["images"] else {}
        return self.processor(text=[self.text(items)], return_tensors="pt", **options)


def contract_of(path: Path) -> FamilyContract:
    """Return the test class of the family that a checkpoint belongs to."""
    name = family_of(Checkpoint.open(path)).__module__.rpartition(".")[2]
    module = importlib.import_module(f"tests.models.test_{name}")
    found = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, FamilyContract))
    return next(value for value in found if getattr(value, "name", None) == name)()


def equal(first: Any, second: Any) -> int:
    """Return the length of the common prefix."""
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1), len(first))


@pytest.mark.parametrize("name", SIZES)
def test_spelled_control_tokens_change_no_other_ids_and_raw_prompts_equal_transformers(name, tmp_path):
    write_small(name, tmp_path)
    family = family_of(Checkpoint.open(tmp_path))
    encode, processor = family.tokenizer(Checkpoint.open(tmp_path)), family.processor(Checkpoint.open(tmp_path))
    hidden = media_texts(processor, encode)
    tokens = {one.content for one in encode.added_tokens_decoder.values() if one.special} - hidden
    control = {*encode.convert_tokens_to_ids([*tokens, *hidden])} - {encode.unk_token_id}
    with Tokenizer.from_pretrained(tmp_path) as tokenizer:

        def chat(text: str) -> list[int]:
            texts = {"user": ("hello world", text), "assistant": ("a red square",)}
            turns = [("user", 0), ("assistant", 0), ("user", 1)]
            return tokenizer.tokenize_chat([{"role": role, "content": texts[role][at]} for role, at in turns]).tolist()

        raw = "".join(f"{token} a {token}b" for token in sorted(tokens))
        request = TokenizeRequest(items=[Text(raw)], chat=False, options=PromptOptions(add_special_tokens=False))
        assert tokenizer.answer(request).ids.tolist() == encode(raw, add_special_tokens=False)["input_ids"]
        if not tokenizer.has_template:
            return
        neutral, other = chat("What it is?"), chat("What ## is?")
        for token in tokens | hidden:
            ids = chat(f"What {token} is?")
            assert equal(ids, neutral) >= equal(other, neutral)
            assert equal(ids[::-1], neutral[::-1]) >= equal(other[::-1], neutral[::-1])
            assert [index for index in ids if index in control] == [index for index in neutral if index in control]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else []) for name in SIZES]
)
def test_a_published_checkpoint_equals_transformers(name, tmp_path):
    """Ids, arrays and logits are the same as with transformers."""
    write_small(name, tmp_path)
    contract, path_file = contract_of(tmp_path), tmp_path / "shm_name.txt"
    reference = PublishedReference(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype="float32")
    try:
        with Tokenizer.from_pretrained(tmp_path) as tokenizer:
            for items in (TEXT, ITEMS):
                ids = tokenizer.tokenize(items, path_file)
                expected = reference.inputs(items)
                media = model.read(ids.numpy())
                assert plain_ids(ids.numpy(), media).tolist() == expected["input_ids"][0].tolist()
                if media:
                    contract.assert_arrays(expected, media, model)
                assert (model.logits(ids) - reference.logits(items)).abs().max() <= 1e-4
    finally:
        release(path_file)


def test_every_published_folder_is_in_a_table():
    folders = {file.parent.name for file in FOLDER.glob("*/SOURCE")}
    assert folders == {*SIZES, *REFUSED, *ELSEWHERE, *ONLY_CONFIGS}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("start", [Tokenizer.from_pretrained, lambda path: load_model(path, device="cpu")])
def test_an_unsupported_checkpoint_is_refused_by_name(name, start):
    with pytest.raises(UnsupportedCheckpoint, match=REFUSED[name]) as error:
        start(FOLDER / name)
    assert str(FOLDER / name) in str(error.value)


def test_a_model_without_a_head_only_pools_hidden_states(tmp_path):
    """An embedding model may have the model_type and architecture of a generating model, but no head."""
    write_small("qwen3_vl_cosmos2", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"].pop("lm_head.weight")
    weights = load_file(shard)
    del weights["lm_head.weight"]
    save_file(weights, shard, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in (FOLDER / "qwen3_vl_embedding").glob("*preprocessor_config.json"):
        shutil.copyfile(file, tmp_path / file.name)
    published = json.loads((FOLDER / "qwen3_vl_embedding" / "config.json").read_text())
    small = json.loads((tmp_path / "config.json").read_text())
    assert published["tie_word_embeddings"] is small["tie_word_embeddings"] is False
    model = load_model(tmp_path, device="cpu")
    assert not model.spec.has_head
    with pytest.raises(UnsupportedCheckpoint, match="no output layer"):
        model.logits(torch.tensor([1, 2]))
    engine = Engine(model, EngineConfig(), 2**24)
    ids = np.array([1, 2, 3], np.int64).tobytes()
    assert "no output layer" in engine.add(Add("text", ids, SamplingParams())).error.message
    assert engine.add(Add("pooled", ids, SamplingParams(max_tokens=0, pooling="last"))) is None
    (progress,) = engine.step().progress
    assert len(progress.pooled) == 4 * model.spec.hidden_size


def test_weights_with_an_adapter_in_place_are_refused(random_checkpoint, tmp_path):
    """Weights that were saved with an adapter inside the model are refused. A published LLaVA-NeXT has such weights."""
    published = json.loads((FOLDER / "llava_next" / "weight_names.json").read_text())
    wrapped = next(name for name in published if name.endswith("q_proj.base_layer.weight"))
    shutil.copytree(random_checkpoint, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    weights = load_file(file)
    plain = next(name for name in weights if name.endswith("layers.0.self_attn.q_proj.weight"))
    weights[wrapped.replace("N", "0")] = weights.pop(plain)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match=r"active adapter.*q_proj\.base_layer\.weight.*merge"):
        load_model(tmp_path / "other", device="cpu")
