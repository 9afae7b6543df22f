"""Contract of every model family. To test a family, write a subclass of FamilyContract.

The subclass writes a small random checkpoint, creates the reference and lists prompts: text without media, one item,
two items of different size, an extreme aspect ratio and, if the family accepts several kinds of media, a mixture of
them.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file
from transformers.video_utils import VideoMetadata

from mindie_mm.batch.output.collate import collate
from mindie_mm.batch.output.sample import Sample
from mindie_mm.device import kind_of
from mindie_mm.device.cpu import CPU
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear
from mindie_mm.device.cpu.step_memory import allocated_peak_bytes
from mindie_mm.engine.base import BaseEngine
from mindie_mm.engine.core import Engine
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.engine.requests.engine_messages import Add, Encode, Progress
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    ContextLengthExceeded,
    InputError,
    LimitExceeded,
    TokenOutOfRange,
    UnsupportedCheckpoint,
)
from mindie_mm.inputs import (
    EMBEDDINGS_KEYS,
    GRID_KEYS,
    KINDS,
    PROMPT,
    Embeddings,
    Kind,
    Media,
    MediaOptions,
    Text,
    media_of,
    parse_inputs,
)
from mindie_mm.media.guard.caps import under
from mindie_mm.media.source import read_source
from mindie_mm.media.video.encoded_video import EncodedVideo
from mindie_mm.models import family_named, family_of, load_model, processor_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.missing_files import VOCABULARIES
from mindie_mm.nn.experts import Experts
from mindie_mm.nn.family import Plan, Processor
from mindie_mm.nn.model import Model, packed_logits
from mindie_mm.nn.placement import Placement, parts
from mindie_mm.nn.splice import MediaItem, plain_ids
from mindie_mm.nn.weights.pretrained import PretrainedModel
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig, MediaCaps
from mindie_mm.shm import Arena, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import Prompt, PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_items
from mindie_mm.tokenize.stores import ARENA_BYTES
from mindie_mm.tokenize.truncate import truncate
from tests.audio_samples import encode_audio
from tests.lora_samples import assert_close, linear_names, merge, scored, write_adapter
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.models.integer_formats import Scheme, compressed, of_layers, pack_quantized, write
from tests.models.references import Items, Reference, Remembered, relative_error
from tests.models.small_checkpoints import changed
from tests.models.steps import step_logits
from tests.warm import running_service

CASES = Path(__file__).parents[1] / "cases" / "media"
NUM_TOKENS = 8


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return random pixels, uint8 [height, width, 3].

    With random pixels, any two resize methods give different results.
    """
    return np.random.default_rng([height, width, seed]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return random frames, uint8 [frames, height, width, 3]."""
    shape = (frames, height, width, 3)
    return np.random.default_rng([*shape, seed]).integers(0, 256, shape, dtype=np.uint8)


IMAGE_PROMPTS: Mapping[str, Items] = {
    "text": [{"text": "What is in the image? A square, perhaps."}],
    "one image": [{"text": "Look: "}, {"image": noise(90, 140)}, {"text": "What is it?"}],
    "two images": [{"image": noise(20, 29)}, {"text": " and "}, {"image": noise(170, 60)}, {"text": "?"}],
    "a long image": [{"image": noise(20, 900)}, {"text": "Where?"}],
}
"""Prompts for a family that accepts several images of any size."""


def run(engine: BaseEngine, prompts: Sequence[torch.Tensor], **settings: Any) -> tuple[dict[int, list[int]], dict]:
    """Run all prompts concurrently. Return the output tokens and the errors, both by the index of the prompt.

    Like a client, add a request again if it was preempted and the engine does not keep its media.
    """
    outputs: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    errors: dict[int, Failure] = {}
    consumed: set[int] = set()
    params = SamplingParams(temperature=0, **settings)

    def add(number: int) -> Progress | None:
        ids = prompts[number].numpy().tobytes()
        return engine.add(Add(str(number), ids, params, float(number), drawn_ids=[*outputs[number]]))

    news = [add(number) for number in outputs]
    while news or engine.has_work():
        again: list[Progress | None] = []
        for progress in filter(None, news):
            number = int(progress.request_id)
            outputs[number] += progress.token_ids
            if progress.media_consumed:
                consumed.add(number)
            if progress.error and progress.error.name == "StaleReference" and number in consumed:
                consumed.remove(number)
                again.append(add(number))
            elif progress.error:
                errors[number] = progress.error
        news = again + (engine.step().progress if engine.has_work() else [])
    return outputs, errors


def likeliest(engine: BaseEngine, prompts: Sequence[torch.Tensor], **settings: Any) -> list[list[list[int]]]:
    """Return, for each prompt and each output token, the chosen token and the five likeliest tokens.

    A family's rules may force a token that is not among these five.
    """
    found: list[list[list[int]]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0, logprobs=5, **settings)
    for i, ids in enumerate(prompts):
        assert engine.add(Add(str(i), ids.numpy().tobytes(), params)) is None
    while engine.has_work():
        for progress in engine.step().progress:
            found[int(progress.request_id)] += [
                [one.token_id, *(token for token, _ in one.top)] for one in progress.logprobs or ()
            ]
    return found


FILES: Mapping[str, Callable[[np.ndarray], bytes]] = {
    "image": lambda pixels: encoded(Image.fromarray(pixels), "PNG"),
    "video": lambda frames: encode_video(frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]),
    "audio": lambda samples: encode_audio(samples, 16_000),
}
"""Functions that encode an item's array as a file, by kind of media."""


def as_file(kind: str, data: np.ndarray | str) -> bytes:
    """Encode an item's array as a file and return the bytes. If `data` is a path, return the bytes of that file."""
    return Path(data).read_bytes() if isinstance(data, str) else FILES[kind](data)


def answer(url: str, items: Items, count: int) -> list[int]:
    """Send `items` to a service, and return the tokens that it generates greedily.

    Media are given as the bytes of files, and are sent as data: URLs.
    """
    inputs = [
        {kind: value if kind == "text" else "data:;base64," + base64.b64encode(value).decode()}
        for item in items
        for kind, value in item.items()
    ]
    body = {"inputs": inputs, "chat_template": False, "parameters": {"max_new_tokens": count, "details": True}}
    reply = httpx2.post(f"{url}/infer", json=body, timeout=300).json()
    assert "details" in reply, reply
    found: list[int] = reply["details"]["generated_token_ids"]
    return found


OF_TOKENS = frozenset(
    ["input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "images_seq_mask"]
)
"""Names of transformers' arrays with one entry per token."""


SPECTROGRAMS = {"input_features": ("feature_attention_mask", "input_features_mask"), "audio_input_features": ()}
"""Names of the spectrograms of clips, and of their masks."""


def assert_same_arrays(found: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
    """Assert that arrays equal those of transformers' processor.

    Spectrograms are equal up to rounding, and without their padding: clips are not padded to further lengths.
    """
    for name, array in found.items():
        own, theirs = array.cpu(), expected[name]
        if name in SPECTROGRAMS:
            theirs = theirs[tuple(slice(size) for size in own.shape)]
            for mask in (found[mask].cpu() for mask in SPECTROGRAMS[name] if mask in found):
                heard = mask.unsqueeze(1 if own.shape[2] == mask.shape[1] else 2)
                own, theirs = own * heard, theirs * heard
            torch.testing.assert_close(own, theirs.to(own.dtype), rtol=0, atol=1e-5, msg=name)
        else:
            theirs = theirs[:, : own.shape[1]] if name == "input_features_mask" else theirs
            # Without normalization and rescaling, transformers leaves pixels in uint8, which its model then converts.
            theirs = theirs.to(own.dtype) if theirs.dtype == torch.uint8 else theirs
            assert own.dtype == theirs.dtype, name
            assert torch.equal(own, theirs), name


def media_texts(processor: Processor, encode: Any) -> set[str]:
    """Return the texts of the tokens of media items, and the markers of items."""
    placeholders = processor.placeholders.values()
    ids = {index for one in placeholders for index in (*one.before, one.token, *one.after, *one.control_ids)}
    return {*encode.convert_ids_to_tokens([*ids])} | {one.marker for one in placeholders if one.marker}


def items_of(prompt: Prompt) -> list[list[int]]:
    """Return the token ids of each item, including the tokens that frame the item."""
    return [prompt.plain_ids[span.start - span.lead : span.stop + span.tail].tolist() for span in prompt.spans]


@dataclass(frozen=True, slots=True)
class Unpacked(Sample):
    """A sample from a tokenized prompt, without a run."""

    items: Sequence[MediaItem] = ()

    @classmethod
    def of(cls, model: Model, ids: torch.Tensor) -> Unpacked:
        media = model.read(ids.numpy())
        return cls(0, "0", plain_ids(ids.numpy(), media), (), (), items=media)

    def usable(self) -> tuple[np.ndarray, Sequence[MediaItem]]:
        return self.ids, self.items


EXTREMES = ((1, 1), (1, 2), (2, 1), (1, 60), (60, 1), (1, 1100), (1100, 1), (2, 1500), (1999, 7), (5, 900), (640, 11))
"""(Height, width) of extremely narrow images."""


def encoded_by(engine: BaseEngine, ids: torch.Tensor) -> Iterator[Embeddings]:
    """Yield the features of a prompt's media, from an engine."""
    start, finished = 0, not bool((ids < 0).any())
    while not finished:
        progress = engine.encode(Encode("encode", ids.numpy().tobytes(), start))
        assert progress.error is None, progress.error
        assert progress.features
        start += len(progress.features)
        finished = progress.finish_reason is not None
        for one in progress.features:
            yield Embeddings(np.frombuffer(one.data, one.dtype).reshape(one.num_features, -1).copy(), one.grid)


def without_known_grid(tokenizer: Tokenizer, path_file: Path, kind: Kind, media: Embeddings) -> dict[str, Any]:
    """Return an item with embeddings. It has a grid only if the tokenizer asks for it by its name."""
    key = EMBEDDINGS_KEYS[kind]
    item = {key: torch.from_numpy(media.array).unsqueeze(0)}
    try:
        tokenizer.tokenize([item], path_file)
    except InputError as error:
        (name,) = re.findall(r"this model needs (\w+), .* in addition to the embeddings", str(error))
        item[name] = media.grid
    return item


class ExtremeShapes:
    """Further tests for families that cut images into tiles. A subclass also inherits from FamilyContract."""

    def test_narrow_images_equal_the_references_or_are_refused_if_the_reference_fails(
        self: Any, reference: Reference, model: Model, tokenizer: Tokenizer, path_file: Path
    ) -> None:
        num_same = 0
        for height, width in EXTREMES:
            items = [{"image": noise(height, width)}, {"text": "?"}]
            try:
                expected = reference.inputs(items)
            except (ValueError, RuntimeError, ZeroDivisionError):
                with pytest.raises(InputError, match=f"{width}x{height}"):
                    self.tokenize(tokenizer, "one image", items, path_file)
                continue
            ids = self.tokenize(tokenizer, "one image", items, path_file).numpy()
            media = model.read(ids)
            assert plain_ids(ids, media).tolist() == expected["input_ids"][0].tolist(), (height, width)
            self.assert_arrays(expected, media, model)
            num_same += 1
        assert num_same >= 4


def without_settings(path: Path, out: Path) -> Path:
    """Copy the files of the checkpoint `path`, except its weights and its preprocessing settings."""
    out.mkdir()
    for file in path.iterdir():
        if file.suffix in {".json", ".jinja", ".model", ".tiktoken"} and not file.name.endswith(
            ("preprocessor_config.json", "processor_config.json", ".index.json")
        ):
            shutil.copyfile(file, out / file.name)
    return out


def without_weights(path: Path, out: Path) -> Path:
    """Copy the files of the checkpoint `path`, except its weights."""
    return shutil.copytree(path, out, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))


def with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a copy of the contents of config.json in which the vocabulary has `size` tokens."""
    sizes = {"vocab_size": size, "embedding_size": size, "additional_vocab_size": 0}
    return {
        name: with_vocabulary(value, size) if isinstance(value, dict) else sizes.get(name, value)
        for name, value in config.items()
    }


def refusals(cases: Sequence[tuple[str, Mapping[str, Any], str]]) -> Callable[..., None]:
    """Return a test for a FamilyContract: a checkpoint with a changed setting is refused with a message that names it.

    A case is the name of a JSON file without its suffix, the changed settings and a pattern of the message.
    """

    @pytest.mark.parametrize(("file", "change", "named"), cases, ids=str)
    def test(self: FamilyContract, file: str, change: Mapping[str, Any], named: str, path: Path, tmp_path: Path):
        self.assert_refused(changed(path, tmp_path / "other", file, change), named)

    return test


class FamilyContract:
    """Tests that every family must pass. Subclasses are called Test<Family>."""

    name: ClassVar[str]
    """Name of the family, which is the name of its file in mindie_mm/models."""
    prompts: ClassVar[Mapping[str, Items]]
    """Prompts by name. The prompt `text` has no media."""
    reference_class: ClassVar[type[Any]]
    """Class of the reference, whose only argument is the path of the checkpoint."""
    tolerance: ClassVar[float] = 1e-4
    """Largest allowed difference of any float32 logit."""
    int8_tolerance: ClassVar[float] = 0.1
    """Largest allowed difference of the logits with int8 weights, as a norm relative to the norm of the logits."""
    bf16_tolerance: ClassVar[float] = 0.15
    """Largest allowed difference of any bfloat16 logit, in standard deviations of the reference's logits.

    If twice the reference's own bfloat16 error is larger, that difference is allowed. Only golden data, which have no
    bfloat16 reference, need a value other than the default.
    """
    chooses_experts: ClassVar[bool] = False
    """True if rounding may choose other experts with nearly the same score.

    In bfloat16, the mean difference of the logits is then compared, with a limit of 0.06.
    """
    num_tokens: ClassVar[int] = NUM_TOKENS
    """Number of greedily generated tokens to compare. Golden data may contain fewer."""
    unspelled: ClassVar[bool] = False
    """True if the family places the items itself, so that the text of a prompt has no markers for them."""
    settings_file: ClassVar[str | None] = "preprocessor_config.json"
    """File that an error must mention if there are no preprocessing settings. None if config.json contains them."""

    embeds_media_tokens: ClassVar[bool] = True
    """Whether the tokens of media items need embeddings."""

    not_batched: ClassVar[Collection[str]] = ()
    """Names of the prompts that transformers' model does not accept in a batch with the others."""

    ignored_options: ClassVar[Sequence[str]] = ()
    """Options of a video that the reference's processor ignores when it samples frames."""

    @classmethod
    def write_checkpoint(cls, out: Path) -> None:
        """Write a small checkpoint with random weights from a fixed seed into the empty directory `out`."""
        raise NotImplementedError

    @classmethod
    def make_reference(cls, path: Path) -> Reference:
        """Return a float32 reference for the checkpoint."""
        return cls.reference_class(path)

    def assert_arrays(self, expected: Mapping[str, Any], items: Sequence[MediaItem], model: Model) -> None:
        """Assert that the media's keyword arguments of transformers' model equal the processor's output `expected`."""
        found = model.processor.media_inputs([items], model.spec.device)
        assert found.keys() == {*expected} - OF_TOKENS
        assert_same_arrays(found, expected)

    def assert_refused(self, path: Path, named: str) -> None:
        """Assert that the processor refuses the checkpoint `path` with a message that matches the pattern `named`."""
        with pytest.raises(UnsupportedCheckpoint, match=named):
            family_named(self.name).processor(Checkpoint.open(path))

    def assert_weights_refused(self, path: Path, out: Path, change: Callable[[Any], object], named: str) -> None:
        """Assert that a copy of the checkpoint is refused after `change` has edited its dict of weights."""
        shutil.copytree(path, out, dirs_exist_ok=True)
        weights = load_file(path / "model.safetensors")
        change(weights)
        save_file(weights, out / "model.safetensors")
        with pytest.raises(UnsupportedCheckpoint, match=named):
            load_model(out, device="cpu")

    def test_keys_of_its_configuration_are_known(self, path: Path) -> None:
        assert family_named(self.name).unknown_keys(Checkpoint.open(path)) == []

    @pytest.mark.representative
    def test_unknown_keys_in_any_section_are_named(self, path: Path) -> None:
        family, own = family_named(self.name), Checkpoint.open(path)
        config = deepcopy(dict(own.config))
        found = [name for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)]
        for section in found:
            config[section]["widht"] = 1
        named = family.unknown_keys(replace(own, config=config))
        assert sorted(named) == sorted(f"{section}.widht" for section in found)

    def assert_same(self, path: Path, reference: Reference, path_file: Path) -> None:
        """Assert that our ids, arrays and logits for the checkpoint `path` are the same as with `reference`."""
        model = load_model(path, device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(path) as tokenizer:
            tokenized = {name: self.tokenize(tokenizer, name, items, path_file) for name, items in self.prompts.items()}
            self.test_ids_and_arrays_equal_the_references(reference, model, tokenized)
            self.test_logits_equal_the_references(reference, model, tokenized)

    def assert_a_slot_for_each_feature(self, processor: Processor, kind: Kind, plan: Plan) -> None:
        """Assert that `spelling` returns as many placeholder tokens as `plan` has features."""
        token = processor.placeholders[kind].token
        spelling = processor.spelling(kind, plan.num_features, plan.grid)
        assert spelling is not None, (kind, plan.num_features, plan.grid)
        runs = spelling.runs
        slots = plan.num_features if runs is None else sum([*run].count(token) for run in runs)
        assert slots == plan.num_features, f"{kind} of grid {plan.grid}: {slots} slots, {plan.num_features} features"

    def tokenize(self, tokenizer: Tokenizer, name: str, items: Items, path_file: Path) -> torch.Tensor:
        """Tokenize `items`, which are the prompt `name` or a variant of it.

        Families with chat prompts override this method.
        """
        return tokenizer.tokenize(items, path_file)

    def engine(self, model: Any, **settings: Any) -> BaseEngine:
        return Engine(model, EngineConfig(**settings))

    def logits(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits to compare with the reference, on the host."""
        return model.logits(ids).cpu()

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp(cls.name)
        cls.write_checkpoint(out)
        return out

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, path: Path) -> Remembered:
        return Remembered(cls.make_reference(path))

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, path: Path, device: str) -> Model:
        return load_model(path, device=device, dtype="float32")

    @pytest.fixture(scope="class")
    @classmethod
    def processor(cls, path: Path) -> Processor:
        return family_named(cls.name).processor(Checkpoint.open(path))

    @pytest.fixture
    def path_file(self, tmp_path: Path):
        yield tmp_path / "shm_name.txt"
        release(tmp_path / "shm_name.txt")

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, path: Path) -> Iterator[Tokenizer]:
        # The arena is created here, because a test must leave no arena that it did not find.
        with Arena.create(ARENA_BYTES) as arena, Tokenizer.from_pretrained(path, arena=arena) as tokenizer:
            yield tokenizer

    @pytest.fixture(scope="class")
    @classmethod
    def tokenized(
        cls, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tokenized prompts.

        Their blocks in shared memory are shared by all tests, which must not release them.
        """
        path_file = tmp_path_factory.mktemp(f"{cls.name}-prompts") / "shm_name.txt"
        yield {name: cls().tokenize(tokenizer, name, items, path_file) for name, items in cls.prompts.items()}
        release(path_file)

    def test_config_json_selects_the_family(self, path):
        family = family_of(Checkpoint.open(path))
        assert family is family_named(self.name)
        assert family.reference
        assert {kind for items in self.prompts.values() for item in items for kind in item} >= set(family.kinds)

    def test_missing_preprocessing_settings_are_named(self, path, tmp_path):
        """Defaults are not used instead."""
        if (file := self.settings_file) is not None:
            self.assert_refused(without_settings(path, tmp_path / "other"), file)

    def test_media_tokens_outside_the_vocabulary_are_refused(self, path, processor):
        size = min(placeholder.token for placeholder in processor.placeholders.values())
        own = Checkpoint.open(path)
        checkpoint = replace(own, config=with_vocabulary(own.config, size))
        if not self.embeds_media_tokens:
            processor_of(checkpoint, family_named(self.name))
            return
        expected = rf"has the id \d+; ids must be below {size}, the size of the vocabulary"
        with pytest.raises(UnsupportedCheckpoint, match=expected):
            processor_of(checkpoint, family_named(self.name))

    @pytest.mark.representative
    def test_broken_preprocessing_settings_are_named(self, path, tmp_path):
        if (file := self.settings_file) is None:
            return
        out = without_settings(path, tmp_path / "other")
        for content in ("{", "[]", '"text"', ""):
            (out / file).write_text(content)
            self.assert_refused(out, file)
        (out / file).unlink()
        joint = out / "processor_config.json"
        for content in ("[]", '{"processor_class": "SomeProcessor", "image_processor": null}'):
            joint.write_text(content)
            self.assert_refused(out, "processor_config.json")

    @pytest.mark.representative
    def test_missing_files_of_the_tokenizer_are_named_with_what_to_do(self, path, tmp_path):
        out = without_weights(path, tmp_path / "other")
        for file in VOCABULARIES:
            (out / file).unlink(missing_ok=True)
        with pytest.raises(
            UnsupportedCheckpoint, match=r"has (no|neither) .*(json|tiktoken).*[.;] [Cc]opy .* from the original repos"
        ):
            Tokenizer.from_pretrained(out)

    @pytest.mark.representative
    def test_a_missing_tokenizer_config_is_named_with_what_to_do_unless_it_is_not_needed(self, path, tmp_path):
        out = without_weights(path, tmp_path / "other")
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            (out / file).unlink(missing_ok=True)
        try:
            Tokenizer.from_pretrained(out)
        except UnsupportedCheckpoint as error:
            assert re.search(r"tokenizer_config\.json.*[.;] [Cc]opy .* from the original repository", str(error))  # noqa: PT017

    @pytest.mark.representative
    def test_settings_of_an_unknown_class_are_refused(self, path, tmp_path):
        if self.settings_file != "preprocessor_config.json":
            return
        out = without_settings(path, tmp_path / "other")
        others = {"image_processor_type": "ZzImageProcessor", "feature_extractor_type": "ZzFeatureExtractor"}
        (out / self.settings_file).write_text(json.dumps(others))
        self.assert_refused(out, "Zz(ImageProcessor|FeatureExtractor)")
        (out / self.settings_file).unlink()
        parts = dict.fromkeys(("image_processor", "video_processor", "feature_extractor"), others)
        (out / "processor_config.json").write_text(json.dumps(parts))
        self.assert_refused(out, "Zz(ImageProcessor|FeatureExtractor)")

    def test_ids_and_arrays_equal_the_references(self, reference, model, tokenized):
        for name, items in self.prompts.items():
            expected = reference.inputs(items)
            ids = tokenized[name]
            media = model.read(ids.numpy())
            assert plain_ids(ids.numpy(), media).tolist() == expected["input_ids"][0].tolist(), name
            assert len(media) == sum("text" not in item for item in items)
            own = model.processor.token_inputs(plain_ids(ids.numpy(), media), media)
            assert own.keys() == expected.keys() & OF_TOKENS
            assert_same_arrays({key: array.unsqueeze(0) for key, array in own.items()}, expected)
            # A trainer may write to its inputs, but not to the memory of the items, which may be a mapped file.
            inputs = model.processor.model_inputs(plain_ids(ids.numpy(), media), media)
            mapped = {item.view[key].ctypes.data for item in media for key in item.view}
            assert not mapped & {array.untyped_storage().data_ptr() for array in inputs.values()}, name
            if media:
                self.assert_arrays(expected, media, model)

    def test_logits_equal_the_references(self, reference, model, tokenized):
        for name, items in self.prompts.items():
            expected = reference.logits(items)
            assert (self.logits(model, tokenized[name]) - expected).abs().max() <= self.tolerance, name

    @pytest.mark.slow
    def test_packed_prompts_have_the_logits_of_unpacked_prompts_or_are_refused(self, reference, model, tokenized):
        if why := model.processor.traits.not_packed:
            samples = [Unpacked.of(model, ids) for ids in tokenized.values()]
            with pytest.raises(InputError, match=f"packing is not supported for this model, because {why}"):
                collate(samples, model.processor, 0, "right", None, 4096)
        else:
            self.assert_packs(reference, model, tokenized)

    def assert_packs(self, reference: Reference, model: Model, tokenized: Mapping[str, torch.Tensor]) -> None:
        """Assert that prompts in one row do not affect each other in transformers' model. Two rows have both orders."""
        prompts = [Unpacked.of(model, ids) for name, ids in tokenized.items() if name not in self.not_batched]
        rows, processor, gap = (prompts, prompts[::-1]), model.processor, int(model.processor.traits.packs_apart)
        size = sum(len(prompt.ids) + gap for prompt in prompts) - gap + 1
        for padding in ("right", "left"):
            batch = collate([*rows[0], *rows[1]], processor, 0, padding, None, size)
            for row, found in zip(rows, self.logits_of_inputs(reference, batch), strict=True):
                start = int(padding == "left")
                for prompt in row:
                    inputs = processor.model_inputs(prompt.ids, prompt.items)
                    packed = found[start : start + len(prompt.ids)]
                    difference = (packed - self.logits_of_inputs(reference, inputs)[0]).abs().max()
                    assert difference <= self.tolerance, (padding, len(prompt.ids))
                    start += len(prompt.ids) + gap

    def logits_of_inputs(self, reference: Reference, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits of transformers' model, float32 [rows, T, vocabulary]."""
        with torch.inference_mode():
            return reference.model(**inputs).logits

    @pytest.mark.representative
    def test_images_change_the_logits(self, model, tokenizer, path_file):
        """If images did not affect the logits, no other comparison of logits could detect a wrong image."""
        if "image" not in family_named(self.name).kinds:
            return
        prompts = [[{"image": noise(50, 50, seed)}, {"text": "?"}] for seed in range(2)]
        first, second = (self.logits(model, tokenizer.tokenize(items, path_file))[-1] for items in prompts)
        assert (first - second).abs().max() > 100 * self.tolerance

    def test_logits_of_a_flat_batch_equal_the_references_in_any_order(self, reference, model, tokenized):
        names = [*self.prompts]
        expected = {name: reference.logits(self.prompts[name]) for name in names}
        for order in (names, names[::-1]):
            for name, logits in zip(order, packed_logits(model, [tokenized[name] for name in order]), strict=True):
                assert (logits.cpu() - expected[name]).abs().max() <= self.tolerance, (name, order)

    @pytest.mark.parametrize(
        "settings",
        [
            # the shorter suite tests whole prompts by their logits
            pytest.param({}, marks=pytest.mark.slow, id="one step each"),
            pytest.param({"max_num_batched_tokens": 24, "max_tower_tokens": 8}, id="small chunks"),
        ],
    )
    def test_generated_tokens_equal_the_references(self, settings, reference, model, tokenized):
        names = [*self.prompts, *reversed(self.prompts)]
        engine = self.engine(model, **settings)
        outputs, errors = run(engine, [tokenized[name] for name in names], max_tokens=self.num_tokens)
        assert not errors
        expected = {name: reference.generate(self.prompts[name], self.num_tokens) for name in self.prompts}
        for i, name in enumerate(names):
            assert outputs[i] == expected[name], name

    @pytest.mark.slow  # the shorter suite tests preemption in tests/service
    def test_preempted_sequences_generate_the_same_tokens(self, reference, model, tokenized):
        spec, longest = model.spec, max(len(ids) for ids in tokenized.values())
        blocks = -(-(longest + self.num_tokens) // 4) + 4
        states = len(tokenized) * spec.state_bytes
        config = EngineConfig(
            kv_block_size=4,
            kv_cache_bytes=max(blocks * 4 * spec.kv_token_bytes, states) + states,  # states take at most half
            encoder_cache_bytes=1000,
            max_num_seqs=len(tokenized),
            prefix_caching=not states,
        )
        outputs, errors = run(Engine(model, config), [*tokenized.values()], max_tokens=self.num_tokens)
        assert not errors
        for i, items in enumerate(self.prompts.values()):
            assert outputs[i] == reference.generate(items, self.num_tokens)

    @pytest.mark.representative
    def test_guesses_do_not_change_the_tokens(self, model, tokenized):
        """A random model that may choose only few tokens soon repeats itself."""
        few = tuple(sorted({*map(int, next(iter(tokenized.values()))[:4]), 20, 21, 22, 23}))
        settings = {"max_tokens": 40, "ignore_eos": True, "allowed_token_ids": few}
        plain, guessing = (self.engine(model, max_num_seqs=2, num_speculative_tokens=number) for number in (0, 7))
        prompts = [*tokenized.values()]
        assert run(guessing, prompts, **settings) == run(plain, prompts, **settings)
        guesses = isinstance(guessing, Engine) and not model.spec.state_bytes
        assert (guessing.stats.accepted_tokens > 0) == guesses

    @pytest.mark.slow  # the shorter suite tests recorded steps in tests/engine/test_decode_graphs.py
    def test_recorded_decode_steps_generate_the_same_tokens(self, path, device, model, tokenized, recorded, caplog):
        """Replayed steps use no stale value from Python, and each step that cannot be recorded is logged."""
        if not kind_of(model.spec.device).records:  # on the CPU the `recorded` fixture enables recording
            pytest.skip(f"nothing is recorded on {device}")
        if any(isinstance(part, Experts) for part in model.module.modules()):
            model = load_model(path, device=device, dtype="float32")  # `recorded` lets the CPU join experts
        eager, graphs = (self.engine(model, enforce_eager=eager) for eager in (True, False))
        expected = run(eager, [*tokenized.values()], max_tokens=self.num_tokens)
        assert not recorded
        assert run(graphs, [*tokenized.values()], max_tokens=self.num_tokens) == expected
        assert graphs._runner._graphs._graphs
        assert "cannot be recorded" not in caplog.text
        if device == "cpu":
            assert sum(recorded) > len(recorded) >= 1

    def test_a_decode_step_waits_for_the_device_once(self, path, device, tokenized, waits):
        engine = self.engine(load_model(path, device=device, dtype="bfloat16"))
        # On first use, an operator is tried and a graph is captured, which waits for the device.
        run(engine, [*tokenized.values()], max_tokens=6, ignore_eos=True)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for i, ids in enumerate(tokenized.values()):
            assert engine.add(Add(str(i), ids.numpy().tobytes(), params)) is None
        begun: set[str] = set()
        found = []
        while engine.has_work():
            decodes = len(begun) == len(tokenized)
            waits()
            progress = engine.step().progress
            found += [waits()] if decodes else []
            assert not [one.error for one in progress if one.error]
            begun |= {one.request_id for one in progress if one.token_ids}
        assert len(found) >= 5
        assert found == [1] * len(found)

    @pytest.mark.representative
    def test_bfloat16_logits_are_as_near_as_the_references(self, path, device, reference, tokenized):
        model, half = load_model(path, device=device, dtype="bfloat16"), reference.in_bfloat16()
        for name, items in self.prompts.items():
            expected = reference.logits(items)
            # A family may mask tokens. The logits of masked tokens are the smallest number of the dtype, so skip them.
            open_ = expected > -1e30
            scale = expected[open_].std()
            reduce, tolerance = (torch.mean, 0.06) if self.chooses_experts else (torch.max, self.bf16_tolerance)
            found = reduce((self.logits(model, tokenized[name]) - expected)[open_].abs() / scale).item()
            own = reduce((half.logits(items) - expected)[open_].abs() / scale).item() if half else 0.0
            assert own <= 0.5, f"{name}: in bfloat16 the reference is off by {own:.3f}, and says nothing"
            assert found <= max(tolerance, 2 * own), f"{name}: {found:.3f}; the reference itself {own:.3f}"

    @pytest.mark.representative
    def test_lora_adapters_give_the_tokens_of_merged_weights(self, path, device, tokenized, tmp_path):
        """Compare two adapters and none, each alone and all in one batch. One of the adapters changes the towers."""
        model, plain = (load_model(path, device, "float32", prepares=prepares) for prepares in (True, False))
        if not isinstance(model, PretrainedModel):
            with pytest.raises(UnsupportedCheckpoint, match="only for decoder-only families with transformers' layers"):
                model.enable_loras(2, 8)
            return
        names = linear_names(plain.module)
        text = {part for one in plain.text_modules() for part in one.modules()}
        in_text = [name for name in names if plain.module.get_submodule(name) in text]
        loras = model.enable_loras(2, 8)
        folders = {
            "a": write_adapter(tmp_path / "a", plain.module, names),
            "b": write_adapter(tmp_path / "b", plain.module, in_text, seed=1, rank=8, alpha=4),
        }
        adapters = {name: loras.read(folder) for name, folder in folders.items()}
        loras.known = {adapter.key: adapter for adapter in adapters.values()}
        keys = {None: None, **{name: adapter.key for name, adapter in adapters.items()}}
        prompts = list(tokenized.values())[:3]
        engine = self.engine(model)
        expected = {}
        for name, key in keys.items():
            merged = load_model(path, device, "float32", prepares=False)
            if name is not None:
                merge(merged.module, folders[name])
            expected[name] = scored(self.engine(merged), [(ids, None) for ids in prompts])
            assert_close(scored(engine, [(ids, key) for ids in prompts]), expected[name])
        assert expected["a"] != expected["b"] != expected[None]
        mixed = [(name, number) for number in range(len(prompts)) for name in keys]
        found = scored(engine, [(prompts[number], keys[name]) for name, number in mixed])
        assert_close(found, [expected[name][number] for name, number in mixed])

    @pytest.mark.representative
    def test_int8_weights_change_the_logits_little(self, path, device, model, tokenized):
        if device != "cpu":
            pytest.skip("only the CPU multiplies int8")
        quantized = load_model(path, device=device, dtype="float32", weights="int8")
        assert any(isinstance(module, CPUQuantizedLinear) for module in quantized.module.modules())
        for name in self.prompts:
            expected, found = self.logits(model, tokenized[name]), self.logits(quantized, tokenized[name])
            off = relative_error(found, expected)
            assert 0 < off <= self.int8_tolerance, f"{name}: {off:.3f}"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("weights", ["auto", "int8"])
    def test_compiled_steps_are_as_accurate_as_torch(self, dtype, weights, path, device, reference, tokenized):
        if device != "cpu":
            pytest.skip("only the CPU compiles steps")
        model: Any = load_model(path, device=device, dtype=dtype, weights=weights)
        if getattr(model, "_step", None) is None:
            pytest.skip("torch runs the decode steps of this checkpoint")
        ids, expected = tokenized["text"], reference.logits(self.prompts["text"])[-1]
        compiled = step_logits(model, ids)
        model._step = model._step_head = None
        for layer in model.module.modules():
            if isinstance(layer, CPUQuantizedLinear):
                layer.few = None
        # Most of the error is that of the earlier keys and values, which torch computes, so rounding may be unlucky.
        theirs = relative_error(step_logits(model, ids), expected)
        assert relative_error(compiled, expected) <= max(1.2 * theirs, 1e-5)
        if (dtype, weights) == ("float32", "auto"):
            assert (compiled - expected).abs().max() <= self.tolerance

    @pytest.mark.slow
    @pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 16, symmetric=False)], ids=["8 bits", "4 bits"])
    def test_quantized_weights_give_the_logits_of_their_numbers(self, scheme, path, device, tokenized, tmp_path):
        if device != "cpu":
            pytest.skip("tests/ascend compares quantized layers")
        packed, plain = (Path(shutil.copytree(path, tmp_path / name)) for name in ("packed", "plain"))
        settings = compressed("pack-quantized", scheme)
        weights, layers = write(packed, settings, pack_quantized, scheme, of_layers)
        save_file({name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors")
        try:
            found, expected = (load_model(one, device="cpu", dtype="float32") for one in (packed, plain))
        except UnsupportedCheckpoint as refused:
            assert "quantized weights are supported only in transformers' layout" in str(refused)  # noqa: PT017
            return
        kept = [layer for layer in found.module.modules() if isinstance(layer, CPUQuantizedLinear)]
        assert len(kept) >= len(layers) / 4, "some are joined, and some layers are no linear layers"
        for name in self.prompts:
            one, other = (self.logits(model, tokenized[name]) for model in (found, expected))
            assert relative_error(one, other) <= 1e-3, name

    def test_tokens_generated_in_bfloat16_are_among_the_likeliest(self, path, device, model, tokenized):
        """Where the tokens first differ from float32, the token is among the likeliest in float32."""
        if device == "cpu":
            pytest.skip("the CPU computes in float32; the fused operators of others do not")
        half = load_model(path, device=device, dtype="bfloat16")
        outputs, errors = run(self.engine(half), [*tokenized.values()], max_tokens=self.num_tokens)
        assert not errors
        expected = likeliest(self.engine(model), [*tokenized.values()], max_tokens=self.num_tokens)
        for i, name in enumerate(tokenized):
            pairs = zip(outputs[i], expected[i], strict=False)
            token, likely = next(((token, likely) for token, likely in pairs if token != likely[0]), (None, [None]))
            assert token in likely, name

    @pytest.mark.representative
    def test_embeddings_in_place_of_media_give_the_same_logits(self, model, tokenizer, tokenized, path_file):
        """The engine encodes the media. The features then replace them in the prompt, with a grid only if necessary."""
        engine = self.engine(model, max_tower_tokens=1)  # one item in each message
        for name, items in self.prompts.items():
            media = [*encoded_by(engine, tokenized[name])]
            if not media:
                continue
            replaced, given = [], iter(media)
            for item in items:
                kind = next((kind for kind in KINDS if kind in item), None)
                replaced.append(
                    dict(item) if kind is None else without_known_grid(tokenizer, path_file, kind, next(given))
                )
            ids = self.tokenize(tokenizer, name, replaced, path_file)
            logits = self.logits(model, ids)
            assert (logits - self.logits(model, tokenized[name])).abs().max() <= self.tolerance, name

    @pytest.mark.representative
    def test_files_of_embeddings_give_the_same_logits_or_are_refused(
        self, model, processor, tokenizer, tokenized, path_file
    ):
        """A file is refused unless its rows determine the geometry, together with a grid of `GRID_KEYS` if needed."""
        for name, items in self.prompts.items():
            (kind, *others) = [kind for item in items for kind in item if kind in KINDS] or [None]
            if kind is None or others:
                continue
            ids = tokenized[name]
            (item,) = model.read(ids.numpy())
            key, (features,) = EMBEDDINGS_KEYS[kind], model.encode([item])
            files = {key: save({"": features.cpu().contiguous()})}
            if kind in GRID_KEYS and processor.traits.has_grid_thw:
                files[GRID_KEYS[kind]] = save({"": torch.tensor(item.shape.grid)})
            given = {key: files}
            replaced = [item if "text" in item else given for item in items]
            if len(files) == 1 and processor.grid_of(kind, len(features)) is None:
                with pytest.raises(InputError, match="more than their rows"):
                    self.tokenize(tokenizer, name, replaced, path_file)
            else:
                logits = self.logits(model, self.tokenize(tokenizer, name, replaced, path_file))
                assert (logits - self.logits(model, ids)).abs().max() <= self.tolerance

    @pytest.mark.representative
    def test_embeddings_of_tokens_give_the_logits_of_the_tokens(
        self, model, processor, tokenizer, tokenized, path_file
    ):
        """A prompt may be embeddings alone, or embeddings between media."""
        if not processor.traits.takes_prompt_embeds:
            with pytest.raises(InputError, match="prompt_embeds are not supported"):
                tokenizer.tokenize([{"prompt_embeds": np.zeros((4, processor.feature_width), np.float32)}], path_file)
            return
        text = torch.arange(20, 29)
        with torch.inference_mode():
            given = {"prompt_embeds": model.embed(text.to(model.spec.device)).float().cpu().clone()}
        with pytest.raises(InputError, match="only media have a grid"):
            tokenizer.tokenize([{"prompt_embeds": Embeddings(given["prompt_embeds"], (1, 3, 3))}], path_file)
        media = next(item for items in self.prompts.values() for item in items if "text" not in item)
        for prompt in ([given], [given, media, given]):
            ids = tokenizer.tokenize(prompt, path_file)
            spelled = ids.clone()
            own = [item for item in model.read(ids.numpy()) if item.shape.kind == PROMPT]
            for item in own:
                spelled[item.slots] = text
            assert len(own) == prompt.count(given)
            assert len(prompt) > 1 or spelled.tolist() == text.tolist()
            assert (self.logits(model, ids) - self.logits(model, spelled)).abs().max() <= self.tolerance

    @pytest.mark.representative
    def test_embeddings_of_a_wrong_shape_are_refused(self, model, processor, tokenizer, tokenized, path_file):
        """Features are refused if their width, number of rows or number of dimensions is wrong."""
        assert processor.extra_width == model.spec.extra_width
        assert processor.feature_width == model.spec.hidden_size + model.spec.extra_width
        for name, items in self.prompts.items():
            kinds = [kind for item in items for kind in item if kind in KINDS]
            shapes = [item.shape for item in model.read(tokenized[name].numpy())]
            for kind, shape in zip(kinds, shapes, strict=True):
                rows, width = shape.num_features, processor.feature_width
                assert processor.spelling(kind, rows, shape.grid) is not None
                assert processor.spelling(kind, rows, (*shape.grid, 7)) is None
                for height, columns in ((rows, width + 1), (rows, width - 1), (rows - 1, width), (rows + 1, width)):
                    if height:
                        features = Embeddings(np.zeros((height, columns), np.float32), shape.grid)
                        with pytest.raises(InputError, match=r"have width|this model has no .* with this combination"):
                            tokenizer.tokenize([{kind: features}], path_file)
                with pytest.raises(InputError, match=r"they must be float16, bfloat16 or float32 \[rows, width\]"):
                    Embeddings(np.zeros(width, np.float32), shape.grid)

    @pytest.mark.representative
    def test_a_prompt_given_as_ids_equals_its_text(self, path, model, reference, tokenizer, tokenized, path_file):
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        for name, items in self.prompts.items():
            texts = [item for item in items if "text" in item] if self.unspelled else items
            media = [item for item in items if "text" not in item]
            ids = tokenizer.tokenize_ids(encode(reference.text(texts))["input_ids"], media, path_file)
            expected, found = tokenized[name].numpy(), ids.numpy()
            assert plain_ids(found, model.read(found)).tolist() == plain_ids(expected, model.read(expected)).tolist()

    def test_kinds_without_a_mindie_layout_are_named_in_order(self, path, processor):
        whole = processor.traits.mindie_prompt_layout
        known = processor.traits.mindie_layouts if whole is None else whole.kinds
        missing = [kind for kind in family_named(self.name).kinds if kind not in known]
        if missing:
            with pytest.raises(UnsupportedCheckpoint, match=f"has no MindIE layout for {', '.join(missing)}$"):
                Tokenizer.from_pretrained(path, wire="mindie")

    @pytest.mark.representative
    def test_a_text_may_omit_special_tokens(self, path, tokenizer):
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        for text in ("hello  world", " a", ""):
            options = PromptOptions(add_special_tokens=False)
            prompt = tokenizer.answer(TokenizeRequest(items=[Text(text)], chat=False, options=options))
            assert prompt.ids.tolist() == encode(text, add_special_tokens=False)["input_ids"]

    def test_a_raw_prompt_is_encoded_as_in_transformers(self, path, processor, tokenizer):
        """Control tokens are parsed, except those of media items. Special tokens are not added a second time."""
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        hidden = media_texts(processor, encode)
        tokens = [one.content for one in encode.added_tokens_decoder.values() if one.special]
        raw = "".join(f"{token}user\n a {token} {token}" for token in tokens if token not in hidden)
        bare, framed = encode("a", add_special_tokens=False)["input_ids"], encode("a")["input_ids"]
        start = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        prefix, suffix = framed[:start], framed[start + len(bare) :]
        for text in (raw, f"{encode.bos_token or ''}{raw}", f"{raw}{encode.eos_token or ''}", "a red square"):
            ids = encode(text, add_special_tokens=False)["input_ids"]
            without, with_them = [
                TokenizeRequest(items=[Text(text)], chat=False, options=PromptOptions(add_special_tokens=add))
                for add in (False, True)
            ]
            assert tokenizer.answer(without).ids.tolist() == ids
            ids = ids if ids[: len(prefix)] == prefix else prefix + ids
            ids = ids if ids[len(ids) - len(suffix) :] == suffix else ids + suffix
            assert tokenizer.answer(with_them).ids.tolist() == processor.frame(ids, 0)

    @pytest.mark.parametrize("parse_special", [True, False])
    def test_the_text_of_a_raw_prompt_never_becomes_media(self, parse_special, path, processor, tokenizer):
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        media = {index for one in processor.placeholders.values() for index in (one.token, *one.control_ids)}
        for spelled in media_texts(processor, encode):
            cuts = [[spelled], [f"a {spelled} b{spelled}", spelled], [spelled[:1], spelled[1:]], [spelled[:-1], ">"]]
            for texts in cuts:
                ids = tokenizer.tokenize([{"text": text} for text in texts], parse_special=parse_special).tolist()
                assert not media.intersection(ids), texts
                assert min(ids, default=0) >= 0, texts
                letters = re.sub(r"\W", "", encode.decode(ids, skip_special_tokens=True))
                assert re.sub(r"\W", "", "".join(texts)).lower() in letters.lower(), texts

    @pytest.mark.representative
    def test_ids_whose_placeholders_do_not_match_the_media_are_refused(self, path, reference, tokenizer, path_file):
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        for items in self.prompts.values():
            media = [item for item in items if "text" not in item]
            ids = encode(reference.text(items))["input_ids"]
            if media and not self.unspelled:
                for others in (media[:-1], [*media, media[0]]):
                    with pytest.raises(InputError):
                        tokenizer.tokenize_ids(ids, others, path_file)
            with pytest.raises(TokenOutOfRange, match="-5 is not a token id"):
                tokenizer.tokenize_ids([*ids, -5], media, path_file)

    @pytest.mark.representative
    def test_truncation_removes_whole_items(self, model, tokenizer, path_file):
        for items in self.prompts.values():
            whole = tokenizer.answer(request_of_items(items, chat=False, path_file=str(path_file)))
            for limit in {1, len(whole) // 2, len(whole) - 1} - {0}:
                try:
                    options = PromptOptions(limit, truncate=True)
                    request = request_of_items(items, chat=False, path_file=str(path_file), options=options)
                    prompt = tokenizer.answer(request)
                except ContextLengthExceeded:  # the last item alone is longer than the limit
                    continue
                assert len(prompt) <= limit
                assert len(model.read(prompt.ids)) == len(prompt.spans)

    @pytest.mark.representative
    def test_truncation_keeps_the_opening_and_no_part_of_a_removed_item(self, path, processor, tokenizer, path_file):
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        kinds = family_named(self.name).kinds
        placeholders = [processor.placeholders[kind] for kind in kinds]
        control = {index for index, token in encode.added_tokens_decoder.items() if token.special}
        control |= {index for one in placeholders for index in (*one.before, one.token, *one.after)}
        control |= {index for placeholder in placeholders for index in placeholder.control_ids}
        for name, items in self.prompts.items():
            whole = tokenizer.answer(request_of_items(items, chat=False, path_file=str(path_file)))
            # Tokens that surround every prompt, whatever items the prompt contains.
            around = {*encode("")["input_ids"], *processor.frame([], len(whole.spans))}
            first, last = whole.opening
            if (bos := encode.bos_token_id) in whole.plain_ids:
                assert bos in whole.ids[first:last], name
            for limit in range(1, len(whole)):
                try:
                    prompt = truncate(whole, limit)
                except ContextLengthExceeded:
                    continue
                assert len(prompt) <= limit
                assert items_of(prompt) == items_of(whole)[len(whole.spans) - len(prompt.spans) :]
                start, stop = prompt.opening
                assert prompt.ids[start:stop].tolist() == whole.ids[first:last].tolist()
                spans = prompt.spans
                front = prompt.plain_ids[: spans[0].start - spans[0].lead] if spans else prompt.plain_ids
                assert not (control - around) & {*front.tolist()}, (name, limit)

    def test_the_text_around_an_item_belongs_to_its_span(self, path, model, processor, tokenizer, path_file):
        """The framing text belongs to the span, even if a prompt's text is encoded in pieces.

        A text that spells control tokens is encoded in pieces.
        """
        encode = family_named(self.name).tokenizer(Checkpoint.open(path))
        spelled = encode.convert_ids_to_tokens(processor.placeholders[family_named(self.name).kinds[0]].token)
        for name, items in self.prompts.items():
            others = [{"text": f"{item['text']} {spelled} {spelled}"} if "text" in item else item for item in items]
            for given in () if self.unspelled else (items, others):
                prompt = tokenizer.answer(request_of_items(given, chat=False, path_file=str(path_file)))
                for item, span in zip(model.read(prompt.ids), prompt.spans, strict=True):
                    shape = item.shape
                    spelling = processor.spelling(shape.kind, shape.num_features, shape.grid)
                    if spelling is None or (text := spelling.text) is None:
                        continue
                    parts = text.split(encode.convert_ids_to_tokens(span.token))
                    lead = encode.decode(prompt.ids[span.start - span.lead : span.start])
                    tail = encode.decode(prompt.ids[span.stop : span.stop + span.tail])
                    # An item may share spaces with the text beside the item.
                    assert lead.strip().endswith(parts[0].strip()), (name, lead)
                    assert tail.strip().startswith(parts[-1].strip()), (name, tail)

    @pytest.mark.slow  # the shorter suite tests placement in tests/nn
    @pytest.mark.parametrize("what", ["vision", "projector"])
    def test_parts_can_have_their_own_precision(self, what, path, device, model, tokenized):
        """The parts that the family lists are converted. If the family lists no such parts, the setting is refused."""
        half = {what: Placement(device, bits=16)}
        if not (names := getattr(model.traits, f"{what}_parts")):
            with pytest.raises(
                InputError, match=f"{what}_device or {what}_bits is set, but this model has no such part"
            ):
                load_model(path, device=device, dtype="float32", **half)
            return
        moved = load_model(path, device=device, dtype="float32", **half)
        assert {weight.dtype for part in parts(moved, names) for weight in part.parameters()} == {torch.bfloat16}
        items = [item for ids in tokenized.values() for item in moved.read(ids.numpy())]
        for features, item in zip(moved.encode(items), items, strict=True):
            assert (features.dtype, len(features)) == (torch.float32, item.shape.num_features)

    @pytest.mark.representative
    def test_the_computed_memory_of_a_step_is_above_the_allocated(self, model, processor, tokenized):
        """Two images or clips and a short prefill allocate at most the computed memory, and at least a fifth of it.

        Both bounds have a margin, because operators may allocate small buffers that no tensor shows.
        """
        if model.spec.device.type != "cpu":
            pytest.skip("other devices run the step")
        worst = WorstCase(model, processor, CPU(), EngineConfig(max_model_len=min(model.spec.max_model_len, 2048)))
        works = [worst._prefill(min(model.spec.max_model_len, size)) for size in (24, 256)]
        works += [worst._encode(kind, *worst._largest_plan(kind), 2) for kind in family_named(self.name).kinds]
        prompt = next(iter(tokenized.values()))
        before = self.logits(model, prompt)
        for work in works:
            computed, allocated = CPU().peak_bytes(work)(), allocated_peak_bytes(work)
            assert allocated - 2**18 <= computed <= 5 * allocated + 2**19
        torch.testing.assert_close(self.logits(model, prompt), before, rtol=0, atol=0)

    def test_the_arrays_of_an_item_follow_from_its_grid(self, processor):
        for kind in processor.placeholders:
            plan, _ = processor.plan(Media(kind, None), processor.worst_case(kind), {kind: 1})
            assert processor.specs_of(kind, plan.grid) in (None, plan.specs)

    def test_impossible_grids_of_forged_plans_are_recognized(self, processor):
        """A compromised decoder can send any grid that has the right type."""
        random = Random(0)
        for kind in processor.placeholders:
            plan, _ = processor.plan(Media(kind, None), processor.worst_case(kind), {kind: 1})
            for _ in range(200):
                largest = random.choice([1, 4, 100, 2**62 - 1])
                grid = tuple(random.randint(0, largest) for _ in range(random.choice([*range(6), len(plan.grid)])))
                num_features = random.choice([plan.num_features, max(1, math.prod(grid[:3]) // 4) % 2**20 + 1])
                if processor.spelling(kind, num_features, grid) is not None:
                    processor.specs_of(kind, grid)

    def test_the_worst_case_takes_the_most_tokens(self, processor):
        for kind in family_named(self.name).kinds:
            data = processor.worst_case(kind)
            plan, _ = processor.plan(Media(kind, data), data, {kind: 1})
            most = processor.max_tokens(kind)
            assert 0.9 * most <= plan.num_features <= most, kind
            self.assert_a_slot_for_each_feature(processor, kind, plan)

    @pytest.mark.parametrize("encoded", [True, False], ids=["encoded", "frames"])
    def test_video_options_are_obeyed_or_refused(self, encoded, processor, tokenizer, path_file):
        if "video" not in family_named(self.name).kinds:
            return
        frames = moving_frames(20)
        data = encode_video(frames, fps=10) if encoded else frames

        def planned(**options: Any) -> Plan:
            return processor.plan(Media("video", data, MediaOptions(**options)), data, {"video": 1})[0]

        def taken(**options: Any) -> int:
            return len(literal_eval(re.search(r"\[.*?\]", planned(**options).settings)[0]))

        assert [taken(num_frames=count) for count in (2, 4, 6)] == [2, 4, 6]
        most = taken() if encoded else len(frames)  # a model may refuse more frames than it samples itself
        assert [taken(max_frames=count) for count in (2, 4)] == [min(count, most) for count in (2, 4)]
        assert taken(min_frames=4, max_frames=6) >= 4
        with pytest.raises(InputError, match="num_frames is 21; the video has only 20 frames"):
            planned(num_frames=21)
        rate = {} if encoded else {"sample_fps": 10.0}
        assert taken(fps=1.0, min_frames=2, **rate) == 2
        assert taken(fps=1.0, min_frames=4, **rate) == 4
        assert taken(fps=9.0, max_frames=2, **rate) == 2
        assert taken(fps=1.0, min_frames=1, **rate) == 2, "not all of them"
        with pytest.raises(InputError, match="sample_fps is 10, but an encoded" if encoded else "set sample_fps"):
            planned(**({"sample_fps": 10.0} if encoded else {"fps": 1.0}))
        bounds = {"min_pixels": 4096, "max_pixels": 8192}
        if processor.traits.bounds_pixels:
            assert planned(**bounds).num_features < planned().num_features
            return
        for name, bound in bounds.items():
            with pytest.raises(InputError, match=rf"\(video\): {name} is set, but {family_named(self.name).__name__} "):
                tokenizer.tokenize([{"video": data, name: bound}], path_file)

    def test_frames_sampled_from_videos_of_any_length_equal_the_references(self, reference, processor, monkeypatch):
        """The sampled frames equal the reference's, except that indices past the last frame are dropped."""
        if "video" not in family_named(self.name).kinds:
            return
        video = EncodedVideo.open(encode_video(moving_frames(3, 48, 32)))
        monkeypatch.setattr(EncodedVideo, "open", classmethod(lambda cls, _: video))
        theirs, chosen, num_compared = reference.processor.video_processor, np.random.default_rng(0), 0
        cases = [(230, 30.0, {}), (17, 10.0, {"num_frames": 14}), (87, 25.0, {"num_frames": 22})]
        for total in range(1, 401, 2):
            count, rate = int(chosen.integers(1, total + 1)), float(chosen.choice([0.5, 10, 23.976, 30, 60]))
            cases.append(
                (total, rate, ({}, {"num_frames": count}, {"fps": float(chosen.choice([1, 2, 4]))})[total % 3])
            )
        for total, rate, options in cases:
            video, case = replace(video, num_frames=total, fps=rate), (total, rate, options)
            with under(MediaCaps()), suppress(InputError):
                plan, _ = processor.plan(Media("video", b"", MediaOptions(**options)), b"", {"video": 1})
                taken = literal_eval(re.search(r"\[.*?\]", plan.settings)[0])
                assert taken == sorted(taken), case
                assert 0 <= taken[0] <= taken[-1] < total, case
                if "num_frames" in options:  # families may round the number to pairs
                    assert abs(len(taken) - options["num_frames"]) <= 1, case
                if set(options) & set(self.ignored_options) or not (options or theirs.do_sample_frames):
                    continue
                # The reference fails if it gets too many frames, or none.
                with suppress(ValueError, TypeError, ZeroDivisionError):
                    expected = theirs.sample_frames(VideoMetadata(total, rate, duration=total / rate), **options)
                    within = [int(index) for index in expected if index < total]
                    if not within or ("num_frames" in options and len(within) < len(taken)):
                        continue  # the reference selects no more frames than its frame rate gives, or none
                    assert taken == within, case
                    num_compared += 1
        assert num_compared > 50

    @pytest.mark.representative
    def test_frame_lists_of_any_length_are_accepted(self, processor):
        if "video" not in family_named(self.name).kinds:
            return
        for total, count in ((17, 14), (43, 22), (61, 18), (17, 2)):
            frames = moving_frames(total, 48, 32)
            for data in (frames, tuple(frames)):
                with suppress(LimitExceeded):  # small checkpoints accept only few frames
                    plan, _ = processor.plan(Media("video", data, MediaOptions(num_frames=count)), data, {"video": 1})
                    taken = literal_eval(re.search(r"\[.*?\]", plan.settings)[0])
                    assert len(taken) == count
                    assert taken[-1] < total

    @pytest.mark.representative
    def test_a_damaged_tail_does_not_affect_sampling(self, processor, tokenizer, path_file):
        """A file is sampled as if its damaged last frames did not exist, even if none of them would be sampled."""
        if "video" not in family_named(self.name).kinds:
            return
        data, whole = (CASES / "last_byte_missing.mp4").read_bytes(), encode_video(moving_frames(47, 48, 32), fps=25)
        for options in ({}, {"num_frames": 2}, {"num_frames": 4}):
            plan, _ = processor.plan(Media("video", data, MediaOptions(**options)), data, {"video": 1})
            taken = literal_eval(re.search(r"\[.*?\]", plan.settings)[0])
            expected, _ = processor.plan(Media("video", whole, MediaOptions(**options)), whole, {"video": 1})
            assert taken == literal_eval(re.search(r"\[.*?\]", expected.settings)[0])
            assert len(tokenizer.tokenize([{"video": data, **options}, {"text": "Hm?"}], path_file))

    @pytest.mark.representative
    def test_planning_counts_the_pixels_that_a_request_decodes(self, processor):
        image, clip = encoded(photograph(size=(300, 200))), encode_video(moving_frames(20), fps=10)
        for kind, data, most in (
            ("image", image, MediaCaps(max_request_pixels=59_999)),
            ("video", clip, MediaCaps(max_request_video_pixels=9407)),
        ):
            if kind in family_named(self.name).kinds:
                with under(most), pytest.raises(LimitExceeded, match=r"the request's .* the limit is "):
                    processor.plan(Media(kind, data), data, {kind: 1})

    @pytest.mark.parametrize("rate", [0.5, 3.0, 24.0])
    def test_given_frames_are_all_used_at_their_rate(self, rate, reference, model, tokenizer, path_file):
        """All frames are used, whether they are given as an array or as a list of images."""
        if "video" not in family_named(self.name).kinds:
            return
        frames = moving_frames(5, 48, 32)
        metadata = {"total_num_frames": 5, "fps": rate, "duration": 5 / rate, "frames_indices": [*range(5)]}
        expected = reference.processor(
            text=[reference.text([{"video": frames}, {"text": "Which way?"}])],
            videos=[frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
        if "video_second_per_grid" in expected:  # the references assume a rate here
            expected["video_second_per_grid"] = torch.tensor([2 / rate])
        for video in (frames, [encoded(Image.fromarray(frame), "PNG") for frame in frames]):
            ids = tokenizer.tokenize([{"video": video, "sample_fps": rate}, {"text": "Which way?"}], path_file)
            items = model.read(ids.numpy())
            assert plain_ids(ids.numpy(), items).tolist() == expected["input_ids"][0].tolist()
            self.assert_arrays(expected, items, model)

    def test_preprocessing_overwrites_every_byte_of_its_arrays(self, processor):
        """Newly allocated shared memory may contain bytes of an earlier item, so every byte must be overwritten."""

        def written(media: Media, fill: int) -> dict[str, bytes]:
            plan, write = processor.plan(media, read_source(media), Counter([media.kind]))
            arrays = {name: np.full(spec.nbytes, fill, np.uint8) for name, spec in plan.specs.items()}
            write({name: arrays[name].view(spec.dtype).reshape(spec.shape) for name, spec in plan.specs.items()})
            return {name: array.tobytes() for name, array in arrays.items()}

        for name, items in self.prompts.items():
            for media in media_of(parse_inputs(items)):
                assert written(media, 0) == written(media, 255), name

    def test_an_item_has_a_slot_for_each_feature(self, processor):
        for items in self.prompts.values():
            found = media_of(parse_inputs(items))
            counts = Counter(media.kind for media in found)
            for media in found:
                plan, _ = processor.plan(media, read_source(media), counts)
                self.assert_a_slot_for_each_feature(processor, media.kind, plan)

    @pytest.mark.slow  # the shorter suite tests the service with the families that call this test
    def test_served_tokens_equal_the_models(self, path, device, model, tokenizer, path_file, tmp_path):
        """Send all prompts over HTTP at once, with media as files. The tokens equal those generated in this process."""
        prompts = [
            [
                {kind: value if kind == "text" else as_file(kind, value) for kind, value in item.items()}
                for item in items
            ]
            for items in self.prompts.values()
        ]
        memory = {"arena_bytes": 2**25, "kv_cache_bytes": 2**25}
        settings = {"spool": tmp_path / "spool", "device": device, "dtype": "float32", **memory}
        with running_service(settings, tmp_path / "log", path) as running, ThreadPoolExecutor() as pool:
            tokenized = [tokenizer.tokenize(items, path_file) for items in prompts]
            expected, errors = run(self.engine(model), tokenized, max_tokens=self.num_tokens)
            assert not errors
            answers = pool.map(lambda items: answer(running.url, items, self.num_tokens), prompts)
            assert dict(enumerate(answers)) == expected
            assert running.wait_until_free()["blocks"] == 0
