"""Tests that the Python interface raises only `MindieMMError` for wrong values, of whatever type they are.

A wrong call signature, such as an unknown keyword argument, is a mistake in the program and raises TypeError, as in any
Python library.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindie_mm import (
    LLM,
    BeamSearchParams,
    Dataset,
    Embeddings,
    EngineConfig,
    MindieMMError,
    MindIETokenizer,
    SamplingParams,
    StructuredOutputs,
    Tokenizer,
    WorkerConfig,
)
from mindie_mm.models import load_model
from mindie_mm.settings.config import MediaCaps
from mindie_mm.shm import Arena, attach, free, release

pytestmark = pytest.mark.usefixtures("copied_workers")

ONE = SamplingParams(temperature=0, max_tokens=1)
BEAMS = BeamSearchParams(beam_width=1, max_tokens=1)
CHAT = [{"role": "user", "content": "a"}]


def values(folder: Path) -> dict[str, Any]:
    """Return values of which each is wrong for most arguments."""
    file = folder / "file"
    file.write_text("no media")
    named: list[Any] = [None, True, -1, 10**30, 1.5, math.nan, math.inf, "", "x", "a\0b", "\ud800", "x" * 5000]
    named += [b"", b"x", bytearray(b"x"), [], (), {}, set(), frozenset({"a"}), [None], [[]], [{}], {"a": 1}, {1: 2}]
    named += [[1, "a"], ["a", 1], [10**30], [1.5], range(3), iter([1]), memoryview(b"x"), 1 + 2j, object, len]
    named += [np.int64(3), np.float32(1), np.array(3), np.array([1, 2]), np.array(["a"]), np.zeros((2, 2))]
    named += [np.array([None]), torch.tensor(3), torch.zeros(2, 2), torch.tensor([1, 2])]
    named += [folder, str(folder), file, f"{folder}/none/file", folder / "none"]
    shown = {f"{number}: {type(one).__name__} {one!s:.40}": one for number, one in enumerate(named)}
    return shown | {"a generator": (one for one in "ab"), "an object": object()}


ITEMS: list[Any] = [
    *({"text": one} for one in (5, None, b"a", "\ud800", ["a"])),
    *({"image": one} for one in (None, 5, ["a"], "/nonexistent", "/", "a\0b", "\ud800", b"", np.zeros((2, 2, 3)), {})),
    *({"image": one} for one in (np.zeros((2, 2)), np.array([None]), torch.zeros(2), {"url": 1}, object(), Path("/"))),
    *({"video": one} for one in ([None], [], [5], np.zeros((2, 2)), {"url": [1]}, "/nonexistent")),
    *({"audio": one} for one in (np.array([1.0]), [1.0], b"x", {"data": 1})),
    *({"image_embeds": one} for one in (1, "x", np.zeros(2), [None], {"image_embeds": 1})),
    *({"prompt_embeds": one} for one in (1, np.zeros((2, 2)), [])),
    *({"document": one} for one in (1, b"x", [])),
    *({"image": np.zeros((9, 9, 3), "u1"), name: "x"} for name in ("max_pixels", "fps", "detail", "grid", "nope")),
    *({"video": np.zeros((2, 9, 9, 3), "u1"), name: [1]} for name in ("fps", "num_frames", "sample_fps")),
    *({"audio": np.zeros(9, "f4"), "sampling_rate": one} for one in (None, 0, -1, "x", 10**30, math.nan)),
    {"nope": 1},
    {5: 1},
    {"text": "a", "image": "b"},
    {"type": 5},
    {"type": "text"},
    {"type": "image_url", "image_url": 5},
    {"type": "input_audio", "input_audio": {"data": b"x", "format": 5}},
    {"type": "file", "file": {"file_data": 5}},
]
"""Wrong items of a prompt."""
MESSAGES: list[Any] = [
    *({"role": "user", "content": one} for one in (5, None, [5], [{"type": 5}], {}, b"a", [[]], "\ud800")),
    *({"role": one, "content": "a"} for one in (5, None, "a b", "", ["user"])),
    *({"role": "assistant", "content": "a", "tool_calls": one} for one in (5, [5], [{"function": 5}], {}, "x")),
    {"role": "user", "content": "a", 5: 6},
    {"role": "user", "content": "a", "name": object()},
    {"content": "a"},
]
"""Wrong messages of a chat."""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("wrong")
    return lambda: values(folder)


@pytest.fixture(scope="module")
def llm(random_checkpoint: Path) -> Iterator[LLM]:
    with LLM(random_checkpoint) as one:
        yield one


@pytest.fixture(scope="module")
def tokenizer(random_checkpoint: Path) -> Iterator[Tokenizer]:
    with Tokenizer.from_pretrained(random_checkpoint) as one, tempfile.TemporaryDirectory() as folder:
        one.tokenize([{"image": np.zeros((9, 9, 3), "u1")}], f"{folder}/p")  # so that the arena exists before the tests
        release(f"{folder}/p")
        yield one


def escaped(call: Callable[[Any], object], given: dict[str, Any]) -> list[str]:
    """Call `call` with each value, and describe the exceptions that are no `MindieMMError`."""
    found = []
    for name, value in given.items():
        try:
            result = call(value)
            if isinstance(result, Iterator):
                list(result)
        except MindieMMError:
            pass
        except Exception as error:  # noqa: BLE001 - these are what the test looks for
            found.append(f"{name}: {type(error).__name__}: {error}"[:200])
    return found


LLM_CALLS: dict[str, Callable[[LLM, Any], object]] = {
    "inputs": lambda llm, value: llm.generate(value, ONE),
    "an input": lambda llm, value: llm.generate([value], ONE),
    "an item": lambda llm, value: llm.generate([[value]], ONE),
    "params": lambda llm, value: llm.generate(["a"], value),
    "a list of params": lambda llm, value: llm.generate(["a"], [value]),
    "chat_template": lambda llm, value: llm.generate(["a"], ONE, chat_template=value),
    "webui": lambda llm, value: llm.generate(["a"], ONE, webui=value),
    "on_error": lambda llm, value: llm.generate(["a"], ONE, on_error=value),
    "prompts of a beam search": lambda llm, value: llm.beam_search(value, BEAMS),
    "params of a beam search": lambda llm, value: llm.beam_search(["a"], value),
    "a prompt to stream": lambda llm, value: llm.stream(value, ONE),
    "params of a stream": lambda llm, value: llm.stream("a", value),
    "messages": lambda llm, value: llm.chat(value, ONE),
    "a message": lambda llm, value: llm.chat([value], ONE),
    "conversations": lambda llm, value: llm.chat([CHAT, value], ONE),
    "params of a chat": lambda llm, value: llm.chat(CHAT, value),
    "add_generation_prompt": lambda llm, value: llm.chat(CHAT, ONE, add_generation_prompt=value),
    "continue_final_message": lambda llm, value: llm.chat(CHAT, ONE, continue_final_message=value),
    "chat_template_kwargs": lambda llm, value: llm.chat(CHAT, ONE, chat_template_kwargs=value),
    "a variable of the template": lambda llm, value: llm.chat(CHAT, ONE, chat_template_kwargs={"x": value}),
    "tools": lambda llm, value: llm.chat(CHAT, ONE, chat_template_kwargs={"tools": value}),
    "items to encode": lambda llm, value: llm.encode(value),
    "an item to encode": lambda llm, value: llm.encode([value]),
}


@pytest.mark.parametrize("call", LLM_CALLS.values(), ids=LLM_CALLS)
def test_calls_of_an_llm_raise_only_errors_of_the_package(llm: LLM, wrong: Any, call: Any) -> None:
    assert escaped(lambda value: call(llm, value), wrong()) == []


@pytest.mark.parametrize("call", ["an item", "an item to encode"])
def test_wrong_items_raise_only_errors_of_the_package(llm: LLM, call: str) -> None:
    given = {f"{number}: {item}": item for number, item in enumerate(ITEMS)}
    assert escaped(lambda item: LLM_CALLS[call](llm, item), given) == []


def test_wrong_messages_raise_only_errors_of_the_package(llm: LLM) -> None:
    given = {f"{number}: {item}": item for number, item in enumerate(MESSAGES)}
    assert escaped(lambda message: llm.chat([message], ONE), given) == []
    given = {name: {"role": "user", "content": [item]} for name, item in enumerate(ITEMS)}  # type: ignore[misc]
    assert escaped(lambda message: llm.chat([message], ONE), given) == []


TOKENIZER_CALLS: dict[str, Callable[[Tokenizer, Path, Any], object]] = {
    "inputs": lambda one, path, value: one.tokenize(value, path),
    "an input": lambda one, path, value: one.tokenize([value], path),
    "path file": lambda one, path, value: one.tokenize([{"image": np.zeros((9, 9, 3), "u1")}], value),
    "webui": lambda one, path, value: one.tokenize([{"text": "a"}], path, webui=value),
    "messages": lambda one, path, value: one.tokenize_chat(value, path),
    "a message": lambda one, path, value: one.tokenize_chat([value], path),
    "add_generation_prompt": lambda one, path, value: one.tokenize_chat(CHAT, path, value),
    "tools": lambda one, path, value: one.tokenize_chat(CHAT, path, tools=value),
    "a tool": lambda one, path, value: one.tokenize_chat(CHAT, path, tools=[value]),
    "a variable of the template": lambda one, path, value: one.tokenize_chat(CHAT, path, x=value),
    "ids": lambda one, path, value: one.tokenize_ids(value, (), path),
    "media of ids": lambda one, path, value: one.tokenize_ids([1], value, path),
}


@pytest.mark.parametrize("call", TOKENIZER_CALLS.values(), ids=TOKENIZER_CALLS)
def test_calls_of_a_tokenizer_raise_only_errors_of_the_package(
    tokenizer: Tokenizer, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    given = wrong()
    monkeypatch.chdir(tmp_path)
    assert escaped(lambda value: call(tokenizer, tmp_path / "shm_name.txt", value), given) == []
    for file in tmp_path.iterdir():
        release(file)


def test_wrong_items_and_messages_of_a_tokenizer_raise_only_errors_of_the_package(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    items = {f"{number}: {item}": item for number, item in enumerate(ITEMS)}
    messages = {f"{number}: {item}": item for number, item in enumerate(MESSAGES)}
    assert escaped(lambda item: tokenizer.tokenize([item], tmp_path / "p"), items) == []
    assert escaped(lambda message: tokenizer.tokenize_chat([message], tmp_path / "p"), messages) == []


SETTINGS = [(kind, name) for kind in (WorkerConfig, EngineConfig, MediaCaps) for name in kind.__dataclass_fields__]


def test_settings_raise_only_errors_of_the_package(wrong: Any) -> None:
    for kind, name in SETTINGS:
        assert escaped(lambda value, kind=kind, name=name: kind(**{name: value}), wrong()) == [], (kind, name)  # type: ignore[misc]


def test_parameters_raise_only_errors_of_the_package(wrong: Any) -> None:
    for name in SamplingParams.__struct_fields__:
        given = wrong()
        assert escaped(lambda value, name=name: SamplingParams(**{name: value}).check(100), given) == [], name  # type: ignore[misc]
    for name in StructuredOutputs.__struct_fields__:

        def checked(value: Any, name: str = name) -> object:
            return SamplingParams(structured_outputs=StructuredOutputs(**{name: value})).check(100)

        assert escaped(checked, wrong()) == [], name
    for name in BeamSearchParams.__dataclass_fields__:

        def searched(value: Any, name: str = name) -> object:
            return BeamSearchParams(**{"beam_width": 2, "max_tokens": 1, name: value}).sampling_params(100)

        assert escaped(searched, wrong()) == [], name
    assert escaped(Embeddings, wrong()) == []
    assert escaped(lambda value: Embeddings(np.zeros((2, 2), "f4"), value), wrong()) == []


CONSTRUCTORS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "LLM": (LLM, ("path", "config", "family", "limit_mm_per_prompt")),
    "Tokenizer": (
        Tokenizer.from_pretrained,
        ("path", "wire", "arena", "family", "caps", "content_format", "limit_mm_per_prompt"),
    ),
    "MindIETokenizer": (MindIETokenizer.from_pretrained, ("path", "family", "caps")),
    "load_model": (
        load_model,
        ("path", "family", "device", "dtype", "weights", "vision", "projector", "end_token_ids"),
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_raise_only_errors_of_the_package(wrong: Any, name: str) -> None:
    make, arguments = CONSTRUCTORS[name]
    for argument in arguments:

        def made(value: Any, argument: str = argument) -> None:
            if value is None or (
                isinstance(value, dict | list | tuple) and not value
            ):  # may be right, and the call would start a worker
                return
            getattr(make(**{argument: value}), "close", lambda: None)()

        assert escaped(made, wrong()) == [], argument


@pytest.mark.parametrize("function", [attach, free, release, Arena.create, Dataset])
def test_functions_of_shared_memory_raise_only_errors_of_the_package(
    wrong: Any, function: Callable[[Any], object]
) -> None:
    def called(value: Any) -> None:
        getattr(function(value), "close", lambda: None)()

    assert escaped(called, wrong()) == []
