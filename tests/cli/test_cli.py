"""Tests for `models`, `doctor`, `ask` and the help of the commands."""

import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from mindie_mm.cli import main
from mindie_mm.cli.foreign_options import FOREIGN_OPTIONS
from mindie_mm.cli.serve import command as serve
from mindie_mm.lockdown import support
from tests import warm
from tests.cli.shell import BIN, TIMEOUT_S, run_warm
from tools.demo import draw_shape

SUBJECTS = (
    *(
        "libraries",
        "device",
        "decode steps",
        "checkpoint",
        "shared memory",
        "host memory",
        "open files",
        "decoders",
        "spool",
    ),
)
"""Subjects that `doctor` reports on every machine."""
JUDGED = ("family", "settings", "quantization", "context", "weights", "image")
"""Subjects that `doctor PATH` reports about a checkpoint."""


def test_models_lists_every_file_of_the_package():
    import mindie_mm.models

    files = {path.stem for path in Path(mindie_mm.models.__file__).parent.glob("[!_]*.py")}
    listed = json.loads(run_warm("models", "--json"))
    assert {family["name"] for family in listed if family["package"] == "mindie_mm"} == files
    output = run_warm("models")
    rows = [line.split("\t") for line in output.splitlines()]
    assert rows[0] == ["family", "model_type", "media", "tested against"]
    assert [row[0] for row in rows[1:]] == [family["name"] for family in listed]
    assert {len(row) for row in rows} == {4}
    assert output.isascii()
    assert "  " not in output
    for family in listed:
        assert family["model_types"]
        assert set(family["kinds"]) <= {"image", "video", "audio"}
        assert all(text in output for text in (family["name"], *family["kinds"], family["reference"]))


def test_doctor_reports_the_status_of_every_subject(random_checkpoint, tmp_path):
    findings = json.loads(run_warm("doctor", random_checkpoint, "--json"))
    general = [finding for finding in findings if finding["subject"] in SUBJECTS]
    expected = dict.fromkeys(SUBJECTS, "ok") | {"decoders": "warning" if support().missing else "ok"}
    assert [(finding["subject"], finding["status"]) for finding in general] == [*expected.items()]
    assert {finding["subject"]: finding["found"] for finding in general}["decoders"] == str(support())
    if importlib.util.find_spec("torch_npu") is None:  # without an NPU, there are no further findings
        assert findings[len(JUDGED) :] == general
    assert [(finding["subject"], finding["status"]) for finding in findings[: len(JUDGED)]] == [
        (one, "ok") for one in JUDGED
    ]
    found = run_warm("doctor", tmp_path, "--json", "--arena-bytes", 10**15, "--device", "cpu:1", status=1)
    problems = {finding["subject"]: finding["advice"] for finding in json.loads(found) if finding["status"] == "error"}
    assert problems.keys() == {"checkpoint", "shared memory", "device"}
    assert problems["device"] == "there is no device cpu:1; the visible devices are cpu:0"
    assert "--shm-size" in problems["shared memory"]


def test_ask_answers_about_an_image(random_checkpoint, tmp_path):
    image = tmp_path / "image.png"
    Image.fromarray(np.full((60, 60, 3), 200, np.uint8)).save(image)
    asked = ("ask", "What?", "--image", image, "--model", random_checkpoint, "--max-tokens", 3, "--device", "cpu:0")
    answer = json.loads(run_warm(*asked, "--json"))
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["timings"]["tower_s"] > 0
    assert list(tmp_path.iterdir()) == [image]
    tag = f'<img src="data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}">What?'
    same = json.loads(run_warm(*asked[:1], tag, *asked[4:], "--webui-images", "--json"))
    assert same["token_ids"] == answer["token_ids"]


def test_ask_shows_the_sampling_parameters_of_the_checkpoint_and_no_warning_about_them(random_checkpoint, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(random_checkpoint, folder)
    stated = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    command = [BIN, "ask", "What?", "--model", folder, "--max-tokens", 3, "--json"]
    ended = warm.run(command, timeout=TIMEOUT_S, env=dict(os.environ))
    assert "generation flags" not in ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["sampling"] == {
        "temperature": 0.0, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.3, "max_tokens": 3
    }  # fmt: skip


def test_mistakes_are_reported_in_one_line(random_checkpoint):
    output = run_warm("ask", "What?", "--image", "/no/such.png", "--model", random_checkpoint, status=2)
    assert "/no/such.png" in output
    assert "Traceback" not in output
    unheard = ("ask", "What?", "--model", random_checkpoint, "--family", "none", "--temperature", -1)
    assert "temperature=-1" in run_warm(*unheard, status=2), "arguments are checked before the model is loaded"
    assert "MINDIE_MM_DECODERS='two'" in run_warm("doctor", status=2, MINDIE_MM_DECODERS="two")


@pytest.mark.parametrize("option", ["--image", "--video", "--audio"])
def test_ask_checks_its_files_before_it_loads_the_model(option, tmp_path):
    """The checkpoint is missing, too. If the model were loaded first, the missing checkpoint would be reported."""
    asked = ["ask", "What?", "--model", str(tmp_path / "none"), option]
    for path, output in (
        (tmp_path / "none.png", "does not exist"),
        (tmp_path, "is a directory"),
        ("", "the value is empty"),
    ):
        refused = CliRunner().invoke(main, [*asked, str(path)])
        assert refused.exit_code == 2
        assert f"'{option}'" in refused.stderr
        assert output in refused.stderr


def test_ask_checks_its_arguments_before_it_loads_the_model(random_checkpoint, tmp_path):
    folder, audio = tmp_path / "no weights", tmp_path / "audio.wav"
    shutil.copytree(random_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    refused = CliRunner().invoke(main, ["ask", "What?", "--model", str(folder), "--temperature", "-1"])
    assert (refused.exit_code, "temperature=-1" in refused.stderr) == (2, True)
    audio.touch()
    output = run_warm("ask", "What?", "--model", folder, "--audio", audio, status=2)
    assert output == f"Error: --audio: {folder} does not accept audio inputs; it accepts image, video\n"
    output = run_warm("ask", "What?", "--model", folder, "--image", audio, status=2)
    assert output.startswith(f"Error: --image {audio}: ")
    assert output.endswith("the source is empty\n")
    images = [part for _ in range(3) for part in ("--image", audio)]
    output = run_warm("ask", "What?", "--model", folder, *images, "--limit-mm-per-prompt", "image=2", status=2)
    assert output == "Error: the prompt has 3 media items of kind image; the limit is 2 (limit_mm_per_prompt)\n"


@pytest.mark.slow
def test_ask_logs_only_warnings_by_default(random_checkpoint):
    asked = [BIN, "ask", "What?", "--model", random_checkpoint, "--max-tokens", 1]
    assert " INFO " not in warm.run(asked, timeout=TIMEOUT_S).stderr
    verbose = warm.run(asked, timeout=TIMEOUT_S, env=os.environ | {"MINDIE_MM_LOG_LEVEL": "info"})
    assert " INFO " in verbose.stderr


def test_ask_reads_standard_input(tmp_path):
    file = tmp_path / "red.png"
    draw_shape("red", (220, 40, 40), "square", x=0.35).save(file)
    with file.open("rb") as given, (tmp_path / "out").open("w+") as out, (tmp_path / "errors").open("w+") as errors:
        command = [str(BIN), "ask", "What color is it?", "--image", "-"]
        assert warm.Popen(command, stdin=given.fileno(), stdout=out, stderr=errors).wait(TIMEOUT_S) == 0
        out.seek(0)
        assert out.read() == "red\n"


def test_ask_fetches_only_from_public_addresses():
    refused = run_warm("ask", "What is it?", "--image", "http://127.0.0.1:9/a.png", status=2)
    assert "could not fetch from 127.0.0.1: its address is not public. Send the data instead" in refused


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["srve"], "No such command 'srve'. Did you mean 'serve'?"),
        (["serve", "--gpu-memory-utilization", "0.9"], "Use --memory-share, a share of the free memory"),
        (["serve", "--model", "folder"], "Give the model as the argument"),
        (["doctor", "--trust-remote-code"], "Code in a checkpoint is never run."),
        (["serve", "--tensor-parallel-size=2"], "Use --tensor-parallel."),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_misspelt_command_or_an_option_of_another_server_is_named(arguments, advice):
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert advice in refused.stderr


def test_the_advice_names_options_that_exist():
    options = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"Use (--[a-z-]+)", " ".join(FOREIGN_OPTIONS.values()))) <= options
    assert not FOREIGN_OPTIONS.keys() & options


def test_ask_says_what_the_embedded_model_can_do():
    asked = warm.run([BIN, "ask", "Hello!", "--max-tokens", 1], timeout=TIMEOUT_S)
    note = "demo model: drawn shapes and simple audio only. For a real model: mindie-mm ask --model Qwen/"
    assert asked.stderr.startswith(note)


def test_serve_help_names_every_setting():
    import dataclasses

    from mindie_mm.settings.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig

    output = run_warm("serve", "--help")
    for cls in (ServiceConfig, MediaCaps, WorkerConfig, EngineConfig):
        for field in dataclasses.fields(cls):
            if field.name not in ("model", "engine", "media", "workers"):
                assert f"--{field.name.replace('_', '-')}" in output


def test_serve_help_shows_each_setting_with_its_default():
    output = " ".join(run_warm("serve", "--help").split())
    for default in ("268435456, 256 MiB", "4294967296, 4 GiB", "on", "off", "0.5 on the CPU, else 0.9", "127.0.0.1"):
        assert f"[default: {default}]" in output
    headings = (
        "Options",
        "Settings of the HTTP service",
        "Decoding of media items, and limits on them",
        "Settings of the worker",
    )
    places = [output.index(f" {heading}: ") for heading in (*headings, "Settings of the engine process")]
    assert places == sorted(places)
    assert "None" not in output


def test_help_shows_the_defaults_of_sampling():
    for command in ("ask", "generate"):
        output = " ".join(run_warm(command, "--help").split())
        assert "[default: 256" in output
        assert "[default: 0.0]" in output


@pytest.mark.slow
def test_a_family_can_be_chosen_by_name(random_checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(random_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    asked = ("ask", "What?", "--model", folder, "--max-tokens", 2)
    assert "no model_type" in run_warm(*asked, status=2)
    assert "the nearest name is" in run_warm(*asked, "--family", "nothing", status=2)
    run_warm(*asked, "--family", "qwen2_vl")
    assert "the nearest name is" in run_warm("serve", folder, "--port", 0, "--family", "nothing", status=2)
    found = json.loads(run_warm("doctor", folder, "--json", MINDIE_MM_FAMILY="qwen2_vl"))
    assert {finding["status"] for finding in found if finding["subject"] in SUBJECTS} == {"ok"}


@pytest.mark.slow
def test_tower_and_projector_have_their_own_precision_and_device(random_checkpoint, tmp_path):
    image = tmp_path / "image.png"
    Image.fromarray(np.full((60, 60, 3), 200, np.uint8)).save(image)
    asked = ("ask", "What?", "--image", image, "--model", random_checkpoint, "--max-tokens", 2)
    run_warm(*asked, MINDIE_MM_VISION_BITS="16", MINDIE_MM_PROJECTOR_BITS="32", MINDIE_MM_PROJECTOR_DEVICE="cpu:0")
    assert "vision_bits=8 must be 16 or 32" in run_warm(*asked, status=2, MINDIE_MM_VISION_BITS="8")
    assert "device='tpu'" in run_warm("serve", random_checkpoint, "--port", 0, "--vision-device", "tpu", status=2)


def test_help_describes_each_command_without_importing_it():
    from mindie_mm.cli import COMMANDS

    code = """
import sys
from mindie_mm.cli import COMMANDS, main
main(["--help"], standalone_mode=False)
assert not {f"mindie_mm.cli.{name}" for name in COMMANDS} & {*sys.modules}
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    for name, description in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(description)}$", output, re.MULTILINE)
        run_warm(name, "--help")
