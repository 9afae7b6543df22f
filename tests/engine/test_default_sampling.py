"""Tests for the default sampling parameters in a checkpoint's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mindie_mm.engine.requests.default_sampling import default_sampling, stated_end_tokens
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import ContextLengthExceeded, InputError, UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.worker.llm import LLM

pytestmark = pytest.mark.usefixtures("copied_workers")

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
"""Qwen3-VL's published generation_config.json."""


def checkpoint(folder: Path, content: Any) -> Checkpoint:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return Checkpoint(folder, {})


def test_end_tokens_come_from_the_configured_folder(random_checkpoint, tmp_path):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(random_checkpoint) as llm:
        (plain,) = llm.generate(["Hello"], greedy)
    end = plain.token_ids[3]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    with LLM(random_checkpoint, WorkerConfig(generation_config=str(tmp_path))) as llm:
        (found,) = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=8))
    assert found.finish_reason == "stop"
    assert len(found.token_ids) <= plain.token_ids.index(end) + 1


@pytest.mark.parametrize("stated", ["2", [1, "2"], [True]], ids=str)
def test_end_tokens_that_are_not_integers_are_refused(stated, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id=.* must be an integer or"):
        stated_end_tokens(str(tmp_path))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (QWEN, SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)),
        ({"temperature": 1e-6, "do_sample": True}, SamplingParams(temperature=1e-6)),
        (
            {"max_new_tokens": 512, "top_k": 0, "top_p": 0.5},
            SamplingParams(max_tokens=512, cut_max_tokens=True, top_p=0.5),
        ),
        ({"min_p": 0.1, "top_k": 50.0}, SamplingParams(min_p=0.1, top_k=50)),
        ({"top_k": -1, "temperature": None}, SamplingParams()),
        ({"do_sample": False, "num_beams": 3, "eos_token_id": 2}, SamplingParams()),
        ({}, SamplingParams()),
    ],
)
def test_the_parameters_that_vllm_reads_are_read(
    tmp_path: Path, stated: dict[str, Any], expected: SamplingParams
) -> None:
    assert default_sampling(checkpoint(tmp_path, stated)) == expected
    assert default_sampling(Checkpoint(tmp_path / "elsewhere", {}), str(tmp_path)) == expected
    assert default_sampling(checkpoint(tmp_path, stated), "vllm") == SamplingParams()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"temperature": -1}, r"temperature=-1 must be in \[0, 100\]"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"repetition_penalty": "high"}, "repetition_penalty='high'"),
        ({"max_new_tokens": -5}, "max_tokens=-5"),
    ],
)
def test_a_wrong_value_is_refused_with_the_file_name(tmp_path: Path, stated: dict[str, Any], message: str) -> None:
    broken = checkpoint(tmp_path, stated)
    with pytest.raises(UnsupportedCheckpoint, match=f"generation_config.json: {message}.*--generation-config vllm"):
        default_sampling(broken)
    with pytest.raises(InputError, match=f"generation_config.json: {message}"):
        default_sampling(broken, str(tmp_path))


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be auto, vllm or a folder with a generation_config.json"):
        default_sampling(Checkpoint(tmp_path, {}), "gready")


def test_a_script_gets_the_defaults(tmp_path: Path) -> None:
    """The given folder sets greedy decoding and a limit of three tokens."""
    checkpoint(tmp_path, {"temperature": 0, "max_new_tokens": 3})
    with LLM(config=WorkerConfig(generation_config=str(tmp_path))) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3, cut_max_tokens=True)
        first, second = llm.generate(["What is in the picture?"] * 2)
        assert first.token_ids == second.token_ids
        assert (len(first.token_ids), first.finish_reason) == (3, "length")
        (other,) = llm.generate(["What is in the picture?"], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(other.token_ids) == 5
        assert len(llm.chat([{"role": "user", "content": "What?"}]).token_ids) <= 3


@pytest.mark.slow
def test_a_default_length_is_cut_to_the_context(tmp_path: Path) -> None:
    """max_new_tokens equals the context length, which would leave no room for a prompt."""
    checkpoint(tmp_path, {"temperature": 0, "max_new_tokens": 64})
    config = WorkerConfig(generation_config=str(tmp_path), engine=EngineConfig(max_model_len=64))
    with LLM(config=config) as llm:
        default = llm.get_default_sampling_params()
        (output,) = llm.generate(["What is in the picture?"], msgspec.structs.replace(default, ignore_eos=True))
        assert output.finish_reason == "length"
        assert 0 < len(output.token_ids) < 64
        with pytest.raises(ContextLengthExceeded, match="needs 64 output tokens"):
            llm.generate(["What is in the picture?"], default.stating(max_tokens=64))
