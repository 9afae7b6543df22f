"""Accuracy of quantized formats for the small random checkpoint of each family.

All matrices of numbered layers that a format can store are quantized by rounding, in the towers, too. The figures are
errors of the logits of the quantized checkpoint, and of a plain checkpoint with its dequantized weights. They are
relative to the norm of the logits of transformers, or of the authors' code, in float32 with the original weights.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.quantized import Matches, Weights, bits, float8, integers, pack, rows, slim
from bench.report import write
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.shm import Arena, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.stores import ARENA_BYTES
from tests.models import integer_formats
from tests.models.contract import FamilyContract
from tests.models.integer_formats import Scheme, of_layers
from tests.models.references import relative_error
from tests.models.test_integer_formats import AWQ, GPTQ
from tools.arguments import parser

FORMATS: Mapping[str, Callable[[Path, Matches], Weights]] = {
    "ModelSlim W8A8_DYNAMIC": slim("W8A8_DYNAMIC"),
    "ModelSlim W8A16": slim("W8A16"),
    "ModelSlim W4A8_DYNAMIC": slim("W4A8_DYNAMIC"),
    "compressed-tensors W8A8": rows(Scheme(8, inputs="dynamic")),
    "compressed-tensors W8A16": rows(Scheme(8)),
    "compressed-tensors W4A16": pack(Scheme(4, 16)),
    "GPTQ, 4 bits": integers(GPTQ, integer_formats.gptq, Scheme(4, 16)),
    "AWQ": integers(AWQ, integer_formats.awq, Scheme(4, 16, symmetric=False)),
    "FP8": float8,
    "bitsandbytes NF4": bits("nf4"),
    "bitsandbytes FP4": bits("fp4"),
    "bitsandbytes, 8 bits": bits("int8"),
}
"""Groups of 4 bits have 16 inputs, because most of the checkpoints are too narrow for larger ones."""
PROMPTS = 2
"""Number of prompts of each family. The first two have no image, and one."""


def contracts() -> Iterator[type[FamilyContract]]:
    """Yield the tests of each family, which write its checkpoint."""
    folder = Path(__file__).parents[1] / "tests" / "models"
    for file in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"tests.models.{file.stem}")
        for value in vars(module).values():
            is_own = getattr(value, "__module__", None) == module.__name__ and hasattr(value, "name")
            if is_own and value.__name__.startswith("Test") and issubclass(value, FamilyContract):
                yield value


def errors(contract: type[FamilyContract], folder: Path) -> dict[str, Any]:
    """Return the errors of each format, or the reason why a checkpoint is refused."""
    (source := folder / "source").mkdir()
    contract.write_checkpoint(source)
    prompts = dict([*contract.prompts.items()][:PROMPTS])
    reference, own, path_file = contract.make_reference(source), contract(), folder / "shm_name.txt"
    expected = {name: reference.logits(items) for name, items in prompts.items()}
    found: dict[str, Any] = {}
    with Arena.create(ARENA_BYTES) as arena, Tokenizer.from_pretrained(source, arena=arena) as tokenizer:
        ids = {name: own.tokenize(tokenizer, name, items, path_file) for name, items in prompts.items()}

        def error(path: Path) -> float:
            model = load_model(path, device="cpu", dtype="float32")
            return max(relative_error(own.logits(model, ids[name]), expected[name]) for name in prompts)

        for name, quantize in FORMATS.items():
            packed, plain = (Path(shutil.copytree(source, folder / kind)) for kind in ("packed", "plain"))
            weights = quantize(packed, of_layers)
            save_file({key: one.contiguous() for key, one in weights.items()}, plain / "model.safetensors")
            try:
                found[name] = {"quantized": float(f"{error(packed):.3g}"), "dequantized": float(f"{error(plain):.3g}")}
            except UnsupportedCheckpoint as refused:
                found[name] = {"refused": str(refused).replace(str(packed), "The checkpoint")}
            shutil.rmtree(packed)
            shutil.rmtree(plain)
        release(path_file)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="CONTRACT", help="classes such as TestQwen2VL; by default, all")
    names = options.parse_args().names
    torch.set_num_threads(1)
    figures = {}
    for contract in contracts():
        if not names or contract.__name__ in names:
            name = contract.__name__.removeprefix("Test")
            with tempfile.TemporaryDirectory() as temporary, suppress(UnsupportedCheckpoint):  # a package is missing
                figures[name] = errors(contract, Path(temporary))
            print(name, figures.get(name), flush=True)
    write("quantized_families", {"formats": [*FORMATS], "families": figures})


if __name__ == "__main__":
    main()
