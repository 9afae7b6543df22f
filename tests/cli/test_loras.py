"""Tests for the option `--lora` of `ask` and `generate`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import mindie_mm
from mindie_mm.errors import InputError
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from tests import warm
from tests.cli.shell import BIN, TIMEOUT_S
from tests.lora_samples import linear_names, write_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Return the folders of two adapters of the embedded checkpoint, one of which has a high rank."""
    plain = load_model(None, "cpu", "float32", prepares=False).module
    names = [name for name in linear_names(plain) if "language_model" in name]
    path = tmp_path_factory.mktemp("loras")
    return [write_adapter(path / str(rank), plain, names, rank=rank, alpha=2 * rank, seed=rank) for rank in (3, 70)]


def asked(*options: object) -> list[int]:
    command = [BIN, "ask", "What?", "--max-tokens", 4, "--device", "cpu", "--json", *options]
    tokens: list[int] = json.loads(warm.run(command, timeout=TIMEOUT_S).stdout)["token_ids"]
    return tokens


def test_ask_answers_with_an_adapter(folders):
    answers = [asked(), *(asked("--lora", folder) for folder in folders)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_folder_that_is_no_adapter_is_reported_before_the_model_is_loaded(tmp_path):
    ended = warm.run([BIN, "ask", "What?", "--lora", tmp_path], timeout=TIMEOUT_S)
    assert ended.returncode == 2
    assert "has no adapter_config.json; give the folder that peft's save_pretrained has written" in ended.stderr


@pytest.mark.slow
def test_rows_are_answered_with_an_adapter_and_continued_only_with_the_same(folders, tmp_path):
    run = mindie_mm.tokenize_dataset([{"inputs": [{"text": "What?"}]}], tmp_path / "run", workers=1)
    config = WorkerConfig(engine=EngineConfig(device="cpu", dtype="float32"))

    def generated(output: str, lora: Path | None) -> list[int]:
        mindie_mm.generate_dataset(run.folder, tmp_path / output, config, max_tokens=4, lora=lora)
        tokens: list[int] = json.loads((tmp_path / output).read_text())["token_ids"]
        return tokens

    assert len({tuple(generated(f"{lora}".replace("/", "-"), lora)) for lora in (None, *folders)}) == 3
    generated("again", folders[0])
    with pytest.raises(InputError, match=r"lora was .* and is now "):
        generated("again", folders[1])


def test_doctor_checks_adapters(folders, tmp_path):
    given = [f"--lora=small={folders[0]}", f"--lora=large={folders[1]}", f"--lora=none={tmp_path}"]
    ended = warm.run([BIN, "doctor", "--json", "--device", "cpu", *given], timeout=TIMEOUT_S)
    found = {one["subject"]: one for one in json.loads(ended.stdout) if one["subject"].startswith("LoRA")}
    assert found["LoRA adapter small"]["status"] == "ok"
    assert "torch runs the steps of its requests" in found["LoRA adapter small"]["found"]
    assert "has rank 70; the limit is 64" in found["LoRA adapter large"]["advice"]
    assert "has no adapter_config.json" in found["LoRA adapter none"]["advice"]
    assert ended.returncode == 1


@pytest.mark.parametrize(("option", "variable"), [(["--lora", "a=b"], {}), ([], {"MINDIE_MM_LORA": "a=/b"})])
def test_render_refuses_adapters_by_name(option, variable):
    ended = warm.run([BIN, "render", *option], timeout=TIMEOUT_S, env=os.environ | variable)
    assert ended.returncode == 2
    assert "No such option '--lora'" in ended.stderr or "leave out lora and lora_dir" in ended.stderr
