"""Conversion of a checkpoint of `tools.random_checkpoint` to the formats of OpenVINO and llama.cpp."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from bench.peers.install import FOLDER, PYTHON, sources

_TO_GGUF = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""
"""Script that runs llama.cpp's converter without its check of the vocabulary, which refuses unknown vocabularies."""

_EXPORT = """
import sys
import torch
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
from optimum.commands.optimum_cli import main
sys.exit(main())
"""
"""Script that runs OpenVINO's converter.

PyPI's torchvision needs a torch for CUDA, or its compiled library does not load. Its transforms are Python code over
torch, which only need these operators to be declared.
"""


def openvino(checkpoint: Path, precision: str) -> Path:
    """Return the folder of the model for OpenVINO. Convert the model if necessary.

    `precision` is f32, bf16 or int8. In bf16, OpenVINO converts the weights of f32 when it loads them.
    """
    precision = "f32" if precision == "bf16" else precision
    out = FOLDER / "openvino" / f"{checkpoint.name}-{precision}"
    if not (out / "openvino_language_model.xml").exists():
        weights = {"f32": "fp32"}.get(precision, precision)
        _run(PYTHON, "-c", _EXPORT, "export", "openvino", "--task", "image-text-to-text",
             "--weight-format", weights, "-m", _for_transformers_4(checkpoint), out)  # fmt: skip
    return out


def gguf(checkpoint: Path, precision: str) -> tuple[Path, Path]:
    """Return the files of the language model and of the tower for llama.cpp. `precision` is f32 or q8_0."""
    out = FOLDER / "gguf" / f"{checkpoint.name}-{precision}"
    model, projector = out / "model.gguf", out / "mmproj.gguf"
    if not projector.exists():
        out.mkdir(parents=True, exist_ok=True)
        convert = (PYTHON, "-c", _TO_GGUF, sources(), _for_transformers_4(checkpoint), "--outtype", precision)
        _run(*convert, "--outfile", model)
        _run(*convert, "--mmproj", "--outfile", projector)
    return model, projector


def _for_transformers_4(checkpoint: Path) -> Path:
    """Return a copy of the checkpoint whose configuration has the format of transformers 4, as both converters need."""
    copy = FOLDER / "transformers4" / checkpoint.name
    if copy.exists():
        return copy
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text("utf-8"))
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config |= {key: value for key, value in text.items() if key != "model_type"}
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = json.loads((copy / "tokenizer_config.json").read_text("utf-8"))
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer), "utf-8")
    return copy


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True)
