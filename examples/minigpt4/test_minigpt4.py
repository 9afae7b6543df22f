"""MiniGPT-4 from outside the repository: installed as anybody's package is, equal to the reference, served by HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tools.demo import data_url
from tools.serving import running_service

HERE = Path(__file__).parent
SIDE, QUERIES = 28, 32


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH, with nothing in it but the package, as pip installs it with no network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "mindie_mm_minigpt4.py"):  # a build writes beside its source
        shutil.copy(HERE / name, source)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    return target


@pytest.fixture
def importable(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(installed)
    yield
    sys.modules.pop("mindie_mm_minigpt4", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("minigpt4")
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
    # With the default range of weights, 1e-10 in the tower, no picture would make a difference.
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
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(written | {"model_type": "minigpt4"}))
    return out


def picture(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


PROMPTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "###Human: Hello ###Assistant:"}],
    "one": [{"text": "###Human: "}, {"image": picture(40, 60, 0)}, {"text": " What? ###Assistant:"}],
    "two": [{"image": picture(28, 28, 1)}, {"text": "and"}, {"image": picture(90, 31, 2)}, {"text": "?"}],
    "extreme": [{"image": picture(3, 300, 3)}, {"text": "?"}],
}


class Reference:
    """transformers' modules, the features put where the placeholders stand."""

    def __init__(self, path: Path) -> None:
        self.model = Blip2ForConditionalGeneration.from_pretrained(path).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        self.processor = BlipImageProcessor.from_pretrained(path)

    def ids(self, items: list[dict[str, Any]]) -> list[int]:
        expanded = f"<Img>{'<ImageHere>' * QUERIES}</Img>"
        ids: list[int] = self.tokenizer("".join(item.get("text", expanded) for item in items))["input_ids"]
        return ids

    @torch.inference_mode()
    def embeddings(self, items: list[dict[str, Any]]) -> torch.Tensor:
        ids = torch.tensor([self.ids(items)])
        hidden = self.model.get_input_embeddings()(ids)
        images = [Image.fromarray(item["image"]) for item in items if "image" in item]
        if images:
            pixels = self.processor(images, return_tensors="pt")["pixel_values"]
            hidden[ids == self.model.config.image_token_id] = self.model.get_image_features(
                pixels
            ).pooler_output.flatten(0, 1)
        return hidden

    @torch.inference_mode()
    def logits(self, items: list[dict[str, Any]]) -> torch.Tensor:
        return self.model.language_model(inputs_embeds=self.embeddings(items)).logits[0]

    @torch.inference_mode()
    def generate(self, items: list[dict[str, Any]], count: int) -> list[int]:
        hidden = self.embeddings(items)
        out = self.model.language_model.generate(inputs_embeds=hidden, max_new_tokens=count, do_sample=False)
        return out[0].tolist()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.mark.usefixtures("importable")
def test_ids_pixels_and_logits_equal_the_references(checkpoint: Path, reference: Reference, tmp_path: Path) -> None:
    model = load_model(checkpoint, device="cpu", dtype="float32")
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(checkpoint) as tokenizer:
        tokenized = {name: tokenizer.tokenize(items, path_file) for name, items in PROMPTS.items()}
        for name, items in PROMPTS.items():
            ids = tokenized[name].numpy()
            media = model.read(ids)
            assert plain_ids(ids, media).tolist() == reference.ids(items), name
            for item, image in zip(media, (item["image"] for item in items if "image" in item), strict=True):
                resized = reference.processor(Image.fromarray(image), do_rescale=False, do_normalize=False)
                expected = np.asarray(resized["pixel_values"][0]).transpose(1, 2, 0)
                assert np.array_equal(item.view["pixel_values"], expected)
        for order in ([*PROMPTS], [*PROMPTS][::-1]):
            for name, logits in zip(order, model.packed_logits([tokenized[name] for name in order]), strict=True):
                assert (logits - reference.logits(PROMPTS[name])).abs().max() <= 1e-4, (name, order)
        release(path_file)


@pytest.mark.usefixtures("importable")
def test_a_family_of_another_package_is_one_of_the_families(checkpoint: Path, tmp_path: Path) -> None:
    assert "minigpt4" in family_names()
    assert "mindie_mm_minigpt4" not in sys.modules, "listing imports none"
    assert family_of(Checkpoint.open(checkpoint)) is family_named("minigpt4")
    shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"model_type": "blip-2"}))
    chosen = load_model(tmp_path / "other", device="cpu", family="minigpt4")
    assert isinstance(chosen, sys.modules["mindie_mm_minigpt4"].MiniGPT4Model)


def test_without_the_package_there_is_no_such_family(checkpoint: Path) -> None:
    assert "minigpt4" not in family_names()
    with pytest.raises(InputError, match="model_type 'minigpt4'"):
        load_model(checkpoint, device="cpu")


def test_the_command_line_lists_it(installed: Path) -> None:
    command = [str(Path(sys.executable).with_name("mindie-mm")), "models", "--json"]
    env = os.environ | {"PYTHONPATH": str(installed)}
    listed = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60, env=env).stdout)
    (found,) = [family for family in listed if family["name"] == "minigpt4"]
    assert found["kinds"] == ["image"]


def test_it_is_served(installed: Path, checkpoint: Path, reference: Reference, tmp_path: Path) -> None:
    settings = {"spool": tmp_path / "spool", "arena_bytes": 2**24, "kv_cache_bytes": 2**24}
    images = [np.full((50, 70, 3), 250, np.uint8), picture(20, 90, 5)]
    urls = [data_url(Image.fromarray(image)) for image in images]
    with (
        running_service(settings, tmp_path / "log", checkpoint, environment={"PYTHONPATH": str(installed)}) as running,
        httpx2.Client(base_url=running.url, timeout=60) as http,
    ):
        answers = []
        for image, url in zip(images, urls, strict=True):
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it? "}]
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
            answer = http.post("/v1/chat/completions", json=body).json()
            prompt = [{"text": "###Human: "}, {"image": image}, {"text": " What is it? ###Assistant:"}]
            assert answer["usage"]["prompt_tokens"] == len(reference.ids(prompt))
            expected = reference.generate(prompt, 8)
            assert answer["choices"][0]["message"]["content"] == reference.tokenizer.decode(
                expected, skip_special_tokens=True
            )
            answers.append(expected)
        assert answers[0] != answers[1], "the picture decides"
        refused = http.post("/infer", json={"inputs": [{"video": urls[0]}, {"text": "?"}]})
        assert refused.status_code == 400
        assert "takes no video; it takes image" in refused.json()["error"]["message"]
        assert running.wait_until_free()["blocks"] == 0


def test_the_guide_is_taken_from_here() -> None:
    guide = (HERE.parents[1] / "docs/adding-a-model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    module = (HERE / "mindie_mm_minigpt4.py").read_text()
    assert len(blocks) >= 5
    for block in blocks:
        assert block in module, block
    entry = "\n".join(
        line.strip() for line in re.findall(r"^    .*mindie_mm.*$", guide.split("Outside this")[1], re.MULTILINE)
    )
    assert entry in (HERE / "pyproject.toml").read_text()
