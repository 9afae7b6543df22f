"""Tests for refusals of a checkpoint or device before models are imported or processes start."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from mindie_mm.cli import main
from mindie_mm.device import CUDA
from mindie_mm.errors import DeviceError, InputError, UnsupportedCheckpoint
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.worker.llm import LLM
from mindie_mm.worker.preflight import check_before_loading

HUB_NAME = "Qwen/Qwen2-VL-2B-Instruct"
DOWNLOAD = f"there is no folder {HUB_NAME} here. To download https://huggingface.co/{HUB_NAME}, set download: "
without_cuda = pytest.mark.skipif(CUDA.missing() is None, reason="this machine has a CUDA device")
COMMANDS = [
    ["serve", HUB_NAME],
    ["serve", HUB_NAME, "--ray"],
    ["ask", "Hi", "--model", HUB_NAME],
    ["chat", "--model", HUB_NAME],
]
MAIN = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in {"torch", "transformers"}, f"{name} is imported"

sys.meta_path.insert(0, Refused())
from mindie_mm.cli.__main__ import main
main()
"""


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_hub_name_is_refused_before_a_model_is_imported(arguments, tmp_path):
    command = [sys.executable, "-c", MAIN, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert DOWNLOAD in done.stderr
    assert "loading" not in done.stderr


@without_cuda
@pytest.mark.parametrize("setting", ["device", "vision_device", "projector_device"])
def test_an_absent_device_is_refused_before_a_process_starts(setting, stopped_workers):
    config = WorkerConfig(engine=EngineConfig(**{setting: "cuda"}))
    with pytest.raises(DeviceError, match="the device cuda cannot be used: "):
        LLM(None, config)
    assert stopped_workers.empty()


@without_cuda
@pytest.mark.slow
def test_generate_refuses_an_absent_device_before_a_process_starts(request, tmp_path):
    (tmp_path / "inputs.jsonl").write_text('{"inputs": [{"text": "Hi"}]}\n')
    tokenized, output = str(tmp_path / "tokenized"), str(tmp_path / "answers.jsonl")
    arguments = ["tokenize", str(tmp_path / "inputs.jsonl"), "--output", tokenized]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    stopped_workers = request.getfixturevalue("stopped_workers")
    refused = CliRunner().invoke(main, ["generate", "--tokenized", tokenized, "--output", output, "--device", "cuda"])
    assert refused.exit_code == 3
    assert "the device cuda cannot be used: " in refused.stderr
    assert stopped_workers.empty()


def test_usable_settings_are_accepted_and_unknown_devices_are_refused():
    for device in ("auto", "cpu"):
        check_before_loading(WorkerConfig(engine=EngineConfig(device=device)))
    with pytest.raises(InputError, match="device='tpu' must be one of auto, npu, cuda, cpu"):
        check_before_loading(WorkerConfig(engine=EngineConfig(device="tpu")))
    with pytest.raises(UnsupportedCheckpoint, match=DOWNLOAD):
        LLM(HUB_NAME)
