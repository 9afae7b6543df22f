"""Tests for MiniGPT-4 as an installed package outside the repository, including the contract tests of all families."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    BlipImageProcessor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from mindie_mm.errors import InputError
from mindie_mm.models import family_named, family_names, family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from tests.models.contract import FamilyContract, noise
from tests.models.references import Items, Reference
from tests.warm import running_service
from tools.demo import data_url

HERE = Path(__file__).parent
SIDE, QUERIES = 28, 32


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package with pip, without network access. Return the folder, which contains only the package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "mindie_mm_minigpt4.py"):  # a copy, because a build writes into its source folder
        shutil.copy(HERE / name, source)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    return target


@pytest.fixture
def importable(installed: Path) -> Iterator[None]:
    with imported(installed):
        yield


@contextmanager
def imported(installed: Path) -> Iterator[None]:
    """Make the package importable in this process and in processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        patch.setenv("PYTHONPATH", str(installed), os.pathsep)
        yield
    sys.modules.pop("mindie_mm_minigpt4", None)


def write_checkpoint(out: Path) -> None:
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<ImageHere>"]
    )
    tokenizer.train_from_iterator(["###Human: <Img></Img> What is in the image? ###Assistant:"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(out)
    BlipImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(out)
    # With the default range of weights, 1e-10 in the tower, images would not affect the answer.
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"initializer_range": 0.2}
    text = LlamaConfig(
        vocab_size=304, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, **small
    )
    config = Blip2Config(
        vision_config={"image_size": SIDE, "patch_size": 14, **small},
        qformer_config={"vocab_size": 30, **small},
        text_config=text.to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=tokenizer.token_to_id("<ImageHere>"),
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    with torch.no_grad():
        model.query_tokens.normal_()
    model.save_pretrained(out)
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(written | {"model_type": "minigpt4"}), encoding="utf-8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("minigpt4")
    write_checkpoint(out)
    return out


class MiniGPT4Reference(Reference):
    """Transformers' modules. The features replace the embeddings of the placeholders."""

    markers: ClassVar = {"image": "<Img><ImageHere></Img>"}

    def __init__(self, path: Path) -> None:
        images, self.tokenizer = (cls.from_pretrained(path) for cls in (BlipImageProcessor, PreTrainedTokenizerFast))
        super().__init__(Blip2ForConditionalGeneration.from_pretrained(path, dtype=torch.float32), images)

    def inputs(self, items: Items) -> dict[str, torch.Tensor]:
        text = self.text(items).replace("<ImageHere>", "<ImageHere>" * QUERIES)
        inputs = {**self.tokenizer(text, return_tensors="pt")}
        if images := [Image.fromarray(item["image"]) for item in items if "image" in item]:
            inputs["pixel_values"] = self.processor(images, return_tensors="pt")["pixel_values"]
        return inputs

    @torch.inference_mode()
    def logits(self, items: Items) -> torch.Tensor:
        return self.logits_of(self.inputs(items))[0]

    @torch.inference_mode()
    def logits_of(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits, float32 [rows, T, vocabulary]."""
        return self.model.language_model(**self._with_features(inputs)).logits.float()

    @torch.inference_mode()
    def generate(self, items: Items, count: int) -> list[int]:
        inputs = self._with_features(self.inputs(items))
        return self.model.language_model.generate(**inputs, max_new_tokens=count, do_sample=False)[0].tolist()

    def _with_features(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace ids and pixels by embeddings."""
        others = {**inputs}
        ids, pixels = others.pop("input_ids"), others.pop("pixel_values", None)
        hidden = self.model.get_input_embeddings()(ids)
        if pixels is not None:
            features = self.model.get_image_features(pixels).pooler_output
            hidden[ids == self.model.config.image_token_id] = features.flatten(0, 1)
        return others | {"inputs_embeds": hidden}


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


class TestMiniGPT4(FamilyContract):
    name = "minigpt4"
    prompts: ClassVar = {
        "text": [{"text": "###Human: Hello ###Assistant:"}],
        "one": [{"text": "###Human: "}, {"image": noise(40, 60)}, {"text": " What? ###Assistant:"}],
        "two": [{"image": noise(28, 28)}, {"text": "and"}, {"image": noise(90, 31)}, {"text": "?"}],
        "extreme": [{"image": noise(3, 300)}, {"text": "?"}],
    }

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def importable(cls, installed: Path) -> Iterator[None]:
        with imported(installed):
            yield

    @classmethod
    def write_checkpoint(cls, out: Path) -> None:
        write_checkpoint(out)

    @classmethod
    def make_reference(cls, path: Path) -> Reference:
        return MiniGPT4Reference(path)

    def logits_of_inputs(self, reference: MiniGPT4Reference, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.logits_of(inputs)


@pytest.mark.usefixtures("importable")
def test_a_family_of_another_package_is_one_of_the_families(checkpoint: Path, tmp_path: Path) -> None:
    assert "minigpt4" in family_names()
    assert "mindie_mm_minigpt4" not in sys.modules, "listing imports none"
    assert family_of(Checkpoint.open(checkpoint)) is family_named("minigpt4")
    shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    del config["model_type"]
    (tmp_path / "other/config.json").write_text(json.dumps(config), encoding="utf-8")
    chosen = load_model(tmp_path / "other", device="cpu", family="minigpt4")
    assert isinstance(chosen, sys.modules["mindie_mm_minigpt4"].MiniGPT4Model)


def test_without_the_package_there_is_no_such_family(checkpoint: Path) -> None:
    assert "minigpt4" not in family_names()
    with pytest.raises(InputError, match="model_type 'minigpt4'"):
        load_model(checkpoint, device="cpu")


def test_the_command_line_lists_it(installed: Path) -> None:
    command = [str(Path(sys.executable).with_name("mindie-mm")), "models", "--json"]
    env = os.environ | {"PYTHONPATH": str(installed)}
    listed = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300, env=env).stdout)
    (found,) = [family for family in listed if family["name"] == "minigpt4"]
    assert found["kinds"] == ["image"]


def test_its_chat_is_served(installed: Path, checkpoint: Path, tmp_path: Path) -> None:
    reference = MiniGPT4Reference(checkpoint)
    settings = {"spool": tmp_path / "spool", "arena_bytes": 2**24, "kv_cache_bytes": 2**24}
    images = [np.full((50, 70, 3), 250, np.uint8), noise(20, 90)]
    urls = [data_url(Image.fromarray(image)) for image in images]
    with (
        running_service(settings, tmp_path / "log", checkpoint, environment={"PYTHONPATH": str(installed)}) as running,
        httpx2.Client(base_url=running.url, timeout=300) as http,
    ):
        answers = []
        for image, url in zip(images, urls, strict=True):
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it? "}]
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
            answer = http.post("/v1/chat/completions", json=body).json()
            prompt = [{"text": "###Human: "}, {"image": image}, {"text": " What is it? ###Assistant:"}]
            assert answer["usage"]["prompt_tokens"] == reference.inputs(prompt)["input_ids"].shape[1]
            expected = reference.generate(prompt, 8)
            assert answer["choices"][0]["message"]["content"] == reference.tokenizer.decode(
                expected, skip_special_tokens=True
            )
            answers.append(expected)
        assert answers[0] != answers[1], "the image decides"
        refused = http.post("/infer", json={"inputs": [{"video": urls[0]}, {"text": "?"}]})
        assert refused.status_code == 400
        assert "does not accept video inputs; it accepts image" in refused.json()["error"]["message"]
        assert running.wait_until_free()["blocks"] == 0
