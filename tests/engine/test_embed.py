"""Tests for `LLM.embed` against the formulas of sentence-transformers, over hidden states of transformers.

The files of sentence-transformers have the contents that its version 6.2 saves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindie_mm import LLM, PoolingParams, SamplingParams, WorkerConfig
from mindie_mm.errors import ContextLengthExceeded, InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.sentence_transformers import SentenceModules
from tests.models import test_qwen3_vl as qwen3_vl
from tests.models.contract import noise
from tests.transformers_reference import AutoTokenizer

pytestmark = pytest.mark.usefixtures("copied_workers")

TOLERANCE = 1e-4
SIZE = 64
TEXTS = ["What is in the image?", "a red square, a blue circle" * 9]
BASE = "sentence_transformers.base.modules"
MODULES = (
    ("", f"{BASE}.transformer.Transformer"),
    ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
    ("2_Normalize", f"{BASE}.normalize.Normalize"),
)
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
TRANSFORMER: Mapping[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": FORWARD, "image": FORWARD, "message": {**FORWARD, "format": "structured"}},
    "module_output_name": "token_embeddings",
}


def write_modules(
    folder: Path,
    mode: Any,
    *,
    kinds: tuple[tuple[str, str], ...] = MODULES,
    transformer: Mapping[str, Any] = TRANSFORMER,
    prompts: Mapping[str, str] | None = None,
    default: str | None = None,
) -> None:
    """Write the files of sentence-transformers into a checkpoint's folder."""
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    pooling = mode if isinstance(mode, dict) else {"pooling_mode": mode, "include_prompt": True}
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": transformer,
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"document": "", **(prompts or {})},
            "default_prompt_name": default,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {"embedding_dimension": SIZE, **pooling},
    }
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random Qwen3-VL with a chat template."""
    folder = tmp_path_factory.mktemp("embedding") / "model"
    folder.mkdir()
    qwen3_vl.TestQwen3VL.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def reference(plain: Path) -> qwen3_vl.Reference:
    return qwen3_vl.Reference(plain)


def states(
    reference: qwen3_vl.Reference, plain: Path, messages: Any, images: Any = (), **settings: Any
) -> torch.Tensor:
    """Return transformers' hidden states after the final norm, [T, hidden], of a chat or of a text."""
    text = messages
    if not isinstance(messages, str):
        tokenizer = AutoTokenizer.from_pretrained(plain)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    given = {"images": [*images]} if images else {}
    inputs = reference.processor(text=[text], return_tensors="pt", **given)
    with torch.inference_mode():
        return reference.model.model(**inputs).last_hidden_state[0]


def normalized(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(values, dim=-1)


def turn(text: str, system: str = "", *, image: bool = False) -> list[dict[str, Any]]:
    parts = [*([{"type": "image"}] if image else []), {"type": "text", "text": text}]
    before = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    return [*before, {"role": "user", "content": parts}]


def assert_close(found: Any, expected: torch.Tensor) -> None:
    assert found.dtype == np.float32
    assert (torch.from_numpy(np.array(found)) - expected).abs().max() <= TOLERANCE


@pytest.fixture(scope="module")
def last(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Yield an embedding model with a default instruction that pools the last token."""
    folder = tmp_path_factory.mktemp("last") / "model"
    shutil.copytree(plain, folder)
    opening = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    prompts = {"query": "Find it.", "other": "Find another."}
    write_modules(folder, "lasttoken", transformer={**TRANSFORMER, **opening}, prompts=prompts, default="query")
    with LLM(folder) as llm:
        yield llm


def test_texts_become_turns_with_the_default_instruction(last: LLM, reference: qwen3_vl.Reference, plain: Path) -> None:
    for found, text in zip(last.embed(TEXTS), TEXTS, strict=True):
        expected = states(reference, plain, turn(text, "Find it."), add_generation_prompt=True)
        assert_close(found.embedding, normalized(expected[-1]))
        assert found.num_prompt_tokens == len(expected)
        assert found.timings is not None


def test_an_image_is_embedded_with_its_text(last: LLM, reference: qwen3_vl.Reference, plain: Path) -> None:
    image = Image.fromarray(noise(90, 140))
    (found,) = last.embed([[{"image": image}, {"text": "What is it?"}]], PoolingParams(prompt_name="other"))
    chat = turn("What is it?", "Find another.", image=True)
    text = AutoTokenizer.from_pretrained(plain).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert_close(found.embedding, normalized(states(reference, plain, text, [image])[-1]))


def test_settings_of_an_embedding(last: LLM, reference: qwen3_vl.Reference, plain: Path) -> None:
    """A shorter embedding is normalized again, token ids have no template, and the template can be turned off."""
    text = "a red square"
    raw = states(reference, plain, "Find it." + text)[-1]
    (short,) = last.embed(text, PoolingParams(dimensions=16), chat_template=False)
    assert_close(short.embedding, normalized(raw[:16]))
    (whole,) = last.embed(text, PoolingParams(normalize=False), chat_template=False)
    assert_close(whole.embedding, raw)
    ids = AutoTokenizer.from_pretrained(plain)(text).input_ids
    (of_ids,) = last.embed([ids], PoolingParams(normalize=False))
    assert_close(of_ids.embedding, states(reference, plain, text)[-1])


def test_wrong_settings_are_refused(last: LLM) -> None:
    for params, message in (
        (PoolingParams(dimensions=0), r"dimensions=0 must be in \[1, 64\]"),
        (PoolingParams(dimensions=65), r"dimensions=65 must be in \[1, 64\]"),
        (PoolingParams(dimensions="8"), r"dimensions='8'"),  # type: ignore[arg-type]
        (PoolingParams(normalize=1), "normalize"),  # type: ignore[arg-type]
        (PoolingParams(prompt_name="none"), "prompt_name is 'none'; the checkpoint's instructions are query, other"),
        ({"dimensions": 8}, "params is of type dict; it must be PoolingParams"),
    ):
        with pytest.raises(InputError, match=message):
            last.embed("text", params)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="on_error='skip'"):
        last.embed("text", on_error="skip")  # type: ignore[arg-type]
    long, short = last.embed(["a" * 100_000, "a"], on_error="return")
    assert isinstance(long.error, ContextLengthExceeded)
    assert "maximum context length is 8192 tokens; the prompt has" in str(long.error)
    assert short.error is None
    assert len(short.embedding) == SIZE


def test_a_mean_without_template_and_normalization(plain: Path, reference: qwen3_vl.Reference, tmp_path: Path) -> None:
    """An earlier version of sentence-transformers saved one switch per mode."""
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    transformer = {"max_seq_length": 40, "do_lower_case": False, "modality_config": {"text": FORWARD}}
    switches = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    write_modules(folder, switches, kinds=MODULES[:2], transformer=transformer, prompts={"query": "Q: "})
    with LLM(folder) as llm:
        for _ in range(2):  # the prefix cache may have the first blocks the second time
            (found,) = llm.embed(TEXTS[0], PoolingParams(prompt_name="query"))
            assert_close(found.embedding, states(reference, plain, "Q: " + TEXTS[0]).mean(0))
            assert found.cached_tokens == 0
        with pytest.raises(ContextLengthExceeded, match=r"context length is 40 tokens; .* \(max_seq_length\)"):
            llm.embed(TEXTS[1])


def test_a_generating_checkpoint_needs_the_setting(plain: Path, reference: qwen3_vl.Reference) -> None:
    with (
        LLM(plain) as llm,
        pytest.raises(InputError, match=r"modules\.json of .* Set .* --pooling"),
    ):
        llm.embed("text")
    with LLM(plain, WorkerConfig(pooling="mean")) as llm:
        (found,) = llm.embed(TEXTS[0])
        assert_close(found.embedding, normalized(states(reference, plain, TEXTS[0]).mean(0)))
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(output.token_ids) == 2
        with pytest.raises(InputError, match=r"pooling is 'last'; call LLM\.embed"):
            llm.generate("Hello", SamplingParams(max_tokens=0, pooling="last"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "max"}, "the pooling max"),
        ({"mode": ["mean", "cls"]}, "the pooling mean, cls"),
        ({"kinds": (*MODULES[:2], ("2_Dense", f"{BASE}.dense.Dense"))}, "a module Dense in place 2"),
        ({"kinds": MODULES[:1]}, None),
        ({"transformer": {"do_lower_case": True}}, "lower-case text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_modules(tmp_path, **{"mode": "lasttoken", **change})
    modules = SentenceModules.of(Checkpoint.open(tmp_path))
    assert modules is not None
    if message is None:
        assert modules.pooling is None
    else:
        assert modules.refusal == f"modules.json of the checkpoint describes {message}, which is not supported"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", "{"),
        ("modules.json", '{"a": 1}'),
        ("modules.json", '[{"type": "a.Transformer"}]'),
        ("1_Pooling/config.json", "[]"),
        ("1_Pooling/config.json", '{"pooling_mode": 5}'),
        ("config_sentence_transformers.json", '{"prompts": [1]}'),
        ("sentence_bert_config.json", '{"processing_kwargs": 1}'),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_modules(tmp_path, "mean")
    (tmp_path / file).write_text(content)
    with pytest.raises(UnsupportedCheckpoint, match=r"cannot be read|is not|does not contain"):
        SentenceModules.of(Checkpoint.open(tmp_path))
