"""Tests for Qwen2-VL's logits and tokens against transformers, on random weights."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration

from mindie_mm.device.cpu import CPU
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import CorruptReference, FeatureCountMismatch, StaleReference, UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import Arena, ArraySpec, free, release, request_directory
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import FamilyContract, clip, noise, run
from tests.models.mindie_contract import MindIEContract
from tests.models.references import PretrainedReference
from tests.transformers_reference import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor
from tools.random_checkpoint import write_checkpoint

TOLERANCE = 1e-4  # largest allowed difference of any float32 logit


class Qwen2VLReference(PretrainedReference):
    markers: ClassVar = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }
    model_class = Qwen2VLForConditionalGeneration
    processor_class = Qwen2VLProcessor
    parts = (Qwen2VLImageProcessor, AutoTokenizer, Qwen2VLVideoProcessor)

    @torch.inference_mode()
    def logits(self, items, position_ids=None):
        extra = {} if position_ids is None else {"position_ids": position_ids[:, None]}
        return self.model(**self.inputs(items), **extra).logits[0]


TEXT = [{"text": "What is in the image? A square, perhaps."}]
ONE_IMAGE = [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}]
TWO_IMAGES = [{"image": noise(56, 200)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "differ how?"}]
VIDEO = [{"video": clip(4, 112, 84)}, {"text": "Which way?"}]
MIXED = [{"image": noise(61, 83)}, {"text": "then"}, {"video": clip(6, 84, 112)}, {"text": "then"}, {"image": noise(28, 28)}]  # fmt: skip # noqa: E501
PROMPTS = {"text": TEXT, "one image": ONE_IMAGE, "two images": TWO_IMAGES, "a video": VIDEO, "mixed": MIXED}


class TestQwen2VL(MindIEContract, FamilyContract):
    name = "qwen2_vl"
    mindie_seconds = 1.0
    mindie_layout = "qwen2_vl"
    mindie_prompts = (TWO_IMAGES, MIXED)
    reference_class = Qwen2VLReference
    prompts: ClassVar = {**PROMPTS, "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}]}

    @classmethod
    def write_checkpoint(cls, out):
        write_checkpoint(out, "tiny", max_pixels=200_000)

    def mindie_arrays(self, prompt, items, model, ids):
        arrays = []
        for item in items:
            (patches,) = (array for name, array in item.view.items() if name.startswith("pixel_values"))
            planes = patches.reshape(len(patches), -1, 14, 14, 3).transpose(0, 4, 1, 2, 3)
            planes = np.repeat(planes, 2 // planes.shape[2], axis=2)
            arrays += [planes.reshape(len(planes), -1), np.array(item.shape.grid[:3])]
            if item.shape.kind == "video":
                arrays.append(np.full((1, 1), self.mindie_seconds, np.float32))
        return arrays

    def test_served_tokens_equal_the_models(self, path, device, model, tokenizer, path_file, tmp_path):
        super().test_served_tokens_equal_the_models(path, device, model, tokenizer, path_file, tmp_path)


@pytest.fixture(scope="module")
def reference(random_checkpoint):
    return Qwen2VLReference(random_checkpoint)


@pytest.fixture(scope="module")
def model(random_checkpoint):
    return load_model(random_checkpoint, device="cpu", dtype="float32")


@pytest.fixture
def tokenizer(random_checkpoint):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield tokenizer


def test_a_long_video_has_the_papers_positions(reference, model, tokenizer, path_file):
    """Give our positions to the reference, because transformers 5.23 places the text too early.

    Its maximum of a video's positions ignores time.
    """
    items = [{"video": clip(12, 56, 56)}, {"text": "Which way?"}]
    ids = tokenizer.tokenize(items, path_file)
    positions = model.positions(len(ids), model.read(ids.numpy())).prompt
    assert (model.logits(ids) - reference.logits(items, positions)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(max_num_batched_tokens=32, max_tower_tokens=8),
        EngineConfig(kv_block_size=4, kv_cache_bytes=100 * 4 * 2 * 2 * 2 * 16 * 4, encoder_cache_bytes=1000),
    ],
    ids=["one step each", "small chunks", "few blocks, so that some are preempted"],
)
def test_twenty_mixed_requests_at_once_equal_generate(config, reference, model, tokenizer, path_file):
    names = [*PROMPTS] * 4
    engine = Engine(model, config)
    outputs, errors = run(engine, [tokenizer.tokenize(PROMPTS[name], path_file) for name in names], max_tokens=12)
    assert not errors
    expected = {name: reference.generate(PROMPTS[name], 12) for name in PROMPTS}
    for i, name in enumerate(names):
        assert outputs[i] == expected[name], name
    assert engine.stats.kv_cache_usage == 0
    assert engine.stats.num_running == engine.stats.num_waiting == 0
    if config.kv_block_size == 4:
        assert engine.stats.preemptions > 0


def test_the_tower_runs_once_for_a_repeated_image(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig())
    for _ in range(3):
        run(engine, [tokenizer.tokenize(ONE_IMAGE, path_file)], max_tokens=2)
    assert (engine.stats.encoder_cache_queries, engine.stats.encoder_cache_hits) == (3, 2)


def test_a_freed_block_fails_its_own_request_alone(reference, model, tokenizer, path_file):
    good, bad = (tokenizer.tokenize(items, path_file) for items in (TWO_IMAGES, ONE_IMAGE))
    engine = Engine(model, EngineConfig(encoder_cache_bytes=0))
    params = SamplingParams(temperature=0, max_tokens=12)
    for name, ids in (("bad", bad), ("good", good)):
        assert engine.add(Add(name, ids.numpy().tobytes(), params)) is None
    (item,) = model.read(bad.numpy())
    free(item.ref)
    # The owner reclaims the freed block at its next allocation.
    tokenizer.tokenize([{"image": noise(30, 40)}], path_file)
    news = [progress for _ in range(20) for progress in engine.step().progress]
    assert [progress.error.name for progress in news if progress.request_id == "bad"] == ["StaleReference"]
    tokens = [token for progress in news if progress.request_id == "good" for token in progress.token_ids]
    assert tokens == reference.generate(TWO_IMAGES, 12)


def test_an_error_of_the_tower_fails_its_own_request_alone(reference, model, tokenizer, path_file):
    """PyTorch raises in the middle of a step, because the image has fewer patches than its grid requires."""
    good = tokenizer.tokenize(TWO_IMAGES, path_file)
    with Arena.create(1 << 20) as arena:
        pad = model.module.config.image_token_id
        item = MediaShape("image", pad, 16, (1, 8, 8))
        specs = {"pixel_values": ArraySpec((16, 588), "uint8"), "item": item.spec}
        with arena.allocate(specs, path_file=path_file) as block:
            block["pixel_values"][...] = 0
            block["item"][...] = item.values
            words = block.publish().to_words()
        bad = torch.tensor([10, *words, *[pad] * 14, 11])
        outputs, errors = run(Engine(model, EngineConfig()), [bad, good], max_tokens=12)
    assert errors == {0: Failure("DeviceError", "the tower failed: RuntimeError")}
    assert outputs[1] == reference.generate(TWO_IMAGES, 12)


def test_a_mismatch_of_slots_and_features_is_refused_with_both_numbers(model, tokenizer, path_file):
    ids = tokenizer.tokenize(ONE_IMAGE, path_file)
    (item,) = model.read(ids.numpy())
    slots, features = item.stop - item.start - 1, item.shape.num_features
    shorter = torch.cat([ids[: item.stop - 1], ids[item.stop :]])
    with pytest.raises(FeatureCountMismatch, match=rf"{slots} placeholder tokens.*{features}"):
        model.read(shorter.numpy())
    progress = Engine(model, EngineConfig()).add(Add("r", shorter.numpy().tobytes(), SamplingParams()))
    assert progress.error.name == "FeatureCountMismatch"


def test_a_damaged_word_is_refused(model, tokenizer, path_file):
    ids = tokenizer.tokenize(ONE_IMAGE, path_file).numpy().copy()
    (item,) = model.read(ids)
    for slot in (item.start, item.start + 1):
        damaged = ids.copy()
        damaged[slot] ^= 1 << 40
        with pytest.raises(CorruptReference):
            model.read(damaged)
    with pytest.raises(CorruptReference, match="-1"):
        model.read(np.array([-1], np.int64))


def test_a_released_request_is_stale(model, tokenizer, tmp_path):
    with request_directory(tmp_path) as directory:
        ids = tokenizer.tokenize(ONE_IMAGE, directory.path_file)
    with pytest.raises(StaleReference):
        model.logits(ids)


def test_a_block_that_is_overwritten_before_the_tower_runs_is_stale(model, tokenizer, path_file):
    ids = tokenizer.tokenize(ONE_IMAGE, path_file)
    items = model.read(ids.numpy())
    release(path_file)
    with Path(f"/dev/shm/mindie_mm-{items[0].ref.arena:04x}").open("r+b") as file:
        (offset,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 4096 + 64 * items[0].ref.block + 8))
        file.seek(offset + 128)
        file.write(b"\x40\x75" * 200_000)  # these bytes as int64 mean grids with sides of 30,016 patches
    with pytest.raises(StaleReference):
        model.encode(items)


def test_layers_obey_their_sliding_window(random_checkpoint, tmp_path, tokenizer, path_file):
    path = shutil.copytree(random_checkpoint, tmp_path / "sliding")
    config = json.loads((path / "config.json").read_text())
    layers = ["full_attention", "sliding_attention"]
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 6, "layer_types": layers}
    (path / "config.json").write_text(json.dumps(config))
    reference, model = Qwen2VLReference(path), load_model(path, device="cpu")
    ids = tokenizer.tokenize(MIXED, path_file)
    assert (model.logits(ids) - reference.logits(MIXED)).abs().max() <= TOLERANCE
    outputs, _ = run(Engine(model, EngineConfig(max_num_batched_tokens=7)), [ids], max_tokens=8)
    assert outputs[0] == reference.generate(MIXED, 8)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_rotary_frequencies_that_depend_on_the_batch_are_refused(random_checkpoint, tmp_path, rope_type):
    path = shutil.copytree(random_checkpoint, tmp_path / rope_type)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {"rope_type": rope_type, "factor": 2.0, **factors}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match=rope_type):
        load_model(path, device="cpu")


@pytest.mark.parametrize(
    ("stated", "stored", "expected"),
    [
        (None, torch.bfloat16, torch.bfloat16),
        (None, torch.float32, torch.float32),
        ("float16", torch.float32, torch.float16),
    ],
)
def test_dtype_auto_is_the_configs_or_else_the_weights(
    random_checkpoint, tmp_path, stated, stored, expected, monkeypatch
):
    """A dtype that only the text model's section contains is ignored.

    Qwen3-VL's published config.json has such a dtype.
    """
    monkeypatch.setattr(CPU, "default_dtype", lambda _, checkpoint_dtype: checkpoint_dtype)  # as on accelerators
    path = shutil.copytree(random_checkpoint, tmp_path / "stored")
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = stated
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    save_file(
        {name: tensor.to(stored) for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    assert load_model(path, device="cpu").spec.dtype == expected


def test_a_checkpoint_that_lacks_weights_is_refused(random_checkpoint, tmp_path):
    path = shutil.copytree(random_checkpoint, tmp_path / "torn")
    weights = load_file(path / "model.safetensors")
    lost = next(name for name in weights if name.endswith("o_proj.weight"))
    del weights[lost]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks 1 weights.*o_proj"):
        load_model(path, device="cpu")


def test_prompt_logprobs_equal_the_references(reference, model, tokenizer, path_file):
    ids = tokenizer.tokenize(MIXED, path_file)
    engine = Engine(model, EngineConfig(max_num_batched_tokens=16))
    engine._head_rows = 5  # a step has 16 rows, so the head is applied in several parts
    engine.add(
        Add("r", ids.numpy().tobytes(), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=2))
    )
    news = []
    while engine.has_work():
        news += engine.step().progress
    (progress,) = (one for one in news if one.token_ids)
    expected = reference.logits(MIXED).log_softmax(-1)
    plain = reference.inputs(MIXED)["input_ids"][0]
    assert [entry.token_id for entry in progress.prompt_logprobs] == plain[1:].tolist()
    found = torch.tensor([entry.logprob for entry in progress.prompt_logprobs])
    torch.testing.assert_close(found, expected[:-1].gather(1, plain[1:, None])[:, 0], rtol=0, atol=TOLERANCE)
    assert progress.logprobs[0].top[0][1] == pytest.approx(expected[-1].max().item(), abs=TOLERANCE)
