"""Accuracy of quantized formats on the embedded checkpoint.

All projections of the text model's layers are quantized by rounding, without calibration. The figures are, beside the
plain checkpoint in float32: the share of answers with the same greedy tokens, the share of right answers, and the
largest difference of a logit over texts, in standard deviations of the logits.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.report import write
from mindie_mm import LLM, SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from tests.models import integer_formats, modelslim
from tests.models.integer_formats import Scheme
from tests.models.test_integer_formats import AWQ, GPTQ, compressed
from tools.arguments import parser
from training.eval_tiny import as_input
from training.samples import TASKS, Sample, sample
from training.scenes import HELD_OUT

SAMPLES, SEED = 200, 7_000_001
LAYERS = re.compile(r".*layers\.\d+\..*_proj\.weight")
TEXTS = 20
"""Number of random texts whose logits are compared."""


def matches(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and "visual" not in name and LAYERS.fullmatch(name) is not None


def slim(kind: str) -> Callable[[Path], object]:
    return lambda folder: modelslim.quantize(folder, lambda name, weight: kind if matches(name, weight) else None)


def integers(settings: Any, writer: integer_formats.Writer, scheme: Scheme) -> Callable[[Path], object]:
    return lambda folder: integer_formats.write(folder, settings, writer, scheme, matches)


def pack(scheme: Scheme) -> Callable[[Path], object]:
    return integers(compressed("pack-quantized", scheme), integer_formats.pack_quantized, scheme)


def rows(scheme: Scheme) -> Callable[[Path], object]:
    return integers(compressed("int-quantized", scheme), integer_formats.int_quantized, scheme)


FORMATS: dict[str, Callable[[Path], object]] = {
    "ModelSlim W8A8_DYNAMIC": slim("W8A8_DYNAMIC"),
    "ModelSlim W8A16": slim("W8A16"),
    "ModelSlim W4A8_DYNAMIC": slim("W4A8_DYNAMIC"),
    "compressed-tensors W8A8": rows(Scheme(8, inputs="dynamic")),
    "compressed-tensors W4A16, groups of 32": pack(Scheme(4, 32)),
    "GPTQ, 4 bits, groups of 32": integers(GPTQ, integer_formats.gptq, Scheme(4, 32)),
    "AWQ, groups of 32": integers(AWQ, integer_formats.awq, Scheme(4, 32, symmetric=False)),
}


def questions() -> list[Sample]:
    """Return held-out questions about pictures and texts. Spoken digits would need another program."""
    rng = random.Random(SEED)
    drawn = (sample(rng, HELD_OUT, TASKS[number % len(TASKS)]) for number in range(3 * SAMPLES))
    return [one for one in drawn if not one.sounds][:SAMPLES]


def answers(path: Path | None, asked: list[Sample]) -> list[Any]:
    with LLM(path) as llm:
        return llm.generate([as_input(one) for one in asked], SamplingParams(temperature=0, max_tokens=64))


def logits(path: Path | None) -> torch.Tensor:
    model = load_model(path, device="cpu")
    texts = torch.randint(10, 250, (TEXTS, 40), generator=torch.Generator().manual_seed(0))
    return torch.stack([model.logits(ids) for ids in texts])


def main() -> None:
    parser(__doc__).parse_args()
    asked = questions()
    plain, expected = answers(None, asked), logits(None)
    figures: dict[str, dict[str, float]] = {}
    for name, quantize in {"plain": None, **FORMATS}.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = None
            if quantize is not None:
                folder = Path(shutil.copytree(EMBEDDED, Path(temporary) / "packed"))
                quantize(folder)
            found = answers(folder, asked)
            same = [one.token_ids == other.token_ids for one, other in zip(found, plain, strict=True)]
            right = [one.text == given.turns[0][1] for one, given in zip(found, asked, strict=True)]
            figures[name] = {
                "same_answers": round(sum(same) / len(same), 3),
                "right_answers": round(sum(right) / len(right), 3),
                "largest_logit_error": round(float((logits(folder) - expected).abs().max() / expected.std()), 4),
            }
    write("quantized", {"samples": len(asked), "formats": figures})


if __name__ == "__main__":
    main()
