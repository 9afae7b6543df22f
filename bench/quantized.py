"""Accuracy and speed of quantized formats on the CPU.

All projections of the text model's layers are quantized by rounding, without calibration. The figures of the embedded
checkpoint are, beside the plain checkpoint in float32: the share of answers with the same greedy tokens, the share of
right answers, and the largest difference of a logit over texts, in standard deviations of the logits.

A random checkpoint gives processor times of one thread, because the machine may run other programs: of a decode step,
and of a prefill. All formats run in turns, and the figures are minima.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.report import save, saved, write
from mindie_mm import LLM, SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.nn.paged_batch import Chunk, PagedBatch
from tests.models import integer_formats, modelslim
from tests.models.integer_formats import Scheme
from tests.models.modelslim import Weights
from tests.models.packing import pack as pack_bits
from tests.models.test_bitsandbytes import SETTINGS
from tests.models.test_dequantize import CASES, quantise
from tests.models.test_integer_formats import AWQ, GPTQ
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint
from training.eval_tiny import as_input
from training.samples import TASKS, Sample, sample
from training.scenes import HELD_OUT

SAMPLES, SEED = 200, 7_000_001
LAYERS = re.compile(r"(?!.*visual).*layers\.\d+\..*_proj\.weight")
TEXTS = 20
"""Number of random texts whose logits are compared."""
CONTEXT, STEPS, PREFILLS, BLOCK = 410, 60, 8, 16
"""Tokens before a timed step, which are also those of the prefill; numbers of turns; and tokens in a KV block."""


Matches = Callable[[str, torch.Tensor], bool]
"""Function that selects the weights to quantize, by name and value."""
Quantize = Callable[[Path, Matches], Weights]
"""Function that quantizes the checkpoint in a folder, and returns its dequantized weights."""


def matches(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and LAYERS.fullmatch(name) is not None


def slim(kind: str) -> Quantize:
    return lambda folder, chosen: modelslim.quantize(folder, lambda *one: kind if chosen(*one) else None)[0]


def integers(settings: Any, writer: integer_formats.Writer, scheme: Scheme) -> Quantize:
    return lambda folder, chosen: integer_formats.write(folder, settings, writer, scheme, chosen)[0]


def pack(scheme: Scheme) -> Quantize:
    return integers(integer_formats.compressed("pack-quantized", scheme), integer_formats.pack_quantized, scheme)


def rows(scheme: Scheme) -> Quantize:
    return integers(integer_formats.compressed("int-quantized", scheme), integer_formats.int_quantized, scheme)


def bits(settings: str) -> Quantize:
    return lambda folder, chosen: pack_bits(folder, SETTINGS[settings], chosen)


def float8(folder: Path, chosen: Matches) -> Weights:
    names = [
        re.escape(name) for name, weight in load_file(folder / "model.safetensors").items() if chosen(name, weight)
    ]
    return quantise(folder, CASES["blocks"], "|".join(names))


FORMATS: dict[str, Quantize] = {
    "ModelSlim W8A8": slim("W8A8"),
    "ModelSlim W8A8_DYNAMIC": slim("W8A8_DYNAMIC"),
    "ModelSlim W8A16": slim("W8A16"),
    "ModelSlim W4A8_DYNAMIC": slim("W4A8_DYNAMIC"),
    "compressed-tensors W8A8": rows(Scheme(8, inputs="dynamic")),
    "compressed-tensors W8A16": rows(Scheme(8)),
    "compressed-tensors W4A16, groups of 32": pack(Scheme(4, 32)),
    "GPTQ, 4 bits, groups of 32": integers(GPTQ, integer_formats.gptq, Scheme(4, 32)),
    "AWQ, groups of 32": integers(AWQ, integer_formats.awq, Scheme(4, 32, symmetric=False)),
    "AWQ, groups of 128": integers({**AWQ, "group_size": 128}, integer_formats.awq, Scheme(4, 128, symmetric=False)),
    "FP8, blocks of 128 x 128": float8,
    "bitsandbytes NF4": bits("nf4"),
    "bitsandbytes FP4, double quantization": bits("fp4"),
    "bitsandbytes, 8 bits": bits("int8"),
}


def questions() -> list[Sample]:
    """Return held-out questions about images and texts. Spoken digits would need another program."""
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


def quantized(source: Path, folder: Path, quantize: Quantize | None) -> Path:
    copied = Path(shutil.copytree(source, folder))
    if quantize is not None:
        quantize(copied, matches)
    return copied


class Timed:
    """The shortest processor times of one model."""

    def __init__(self, path: Path) -> None:
        self.model = load_model(path, device="cpu")
        self.cache = self.model.spec.allocate_cache(CONTEXT // BLOCK + 1, BLOCK)
        self.ids = torch.randint(10, 250, (CONTEXT,), generator=torch.Generator().manual_seed(0))
        self.step_ms = self.prefill_ms = float("inf")

    def run(self, start: int, stop: int) -> float:
        """Compute the tokens of a sequence from `start` to `stop`, and return the time in milliseconds."""
        positions = self.model.positions(CONTEXT, ()).prompt[:, start:stop]
        paged = PagedBatch([Chunk(start, stop, range(CONTEXT // BLOCK + 1))], self.cache, torch.device("cpu"), stop - 1)
        begin = time.process_time()
        states = self.model.states(self.ids[start:stop], positions, (), paged, None)
        self.model.head(states[-1:])
        return (time.process_time() - begin) * 1000

    def prefill(self) -> None:
        self.prefill_ms = min(self.prefill_ms, self.run(0, CONTEXT))

    def step(self) -> None:
        self.step_ms = min(self.step_ms, self.run(CONTEXT - 1, CONTEXT))


def speed(folder: Path, names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return the times of plain weights and of some formats for a checkpoint with 37 million random parameters."""
    torch.set_num_threads(1)
    source = write_checkpoint(folder / "source", "mid")
    timed = {
        name: Timed(quantized(source, folder / str(number), quantize))
        for number, (name, quantize) in enumerate({"plain": None, **{one: FORMATS[one] for one in names}}.items())
    }
    for _ in range(PREFILLS):
        for one in timed.values():
            one.prefill()
    for _ in range(STEPS):
        for one in timed.values():
            one.step()
    return {
        name: {"step_ms": round(one.step_ms, 2), "prefill_ms": round(one.prefill_ms, 1)} for name, one in timed.items()
    }


def accuracy() -> dict[str, dict[str, float]]:
    """Return the figures of the embedded checkpoint in each format."""
    asked = questions()
    plain, expected = answers(None, asked), logits(None)
    figures: dict[str, dict[str, float]] = {}
    for name, quantize in {"plain": None, **FORMATS}.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = None if quantize is None else quantized(EMBEDDED, Path(temporary) / "packed", quantize)
            found = answers(folder, asked)
            same = [one.token_ids == other.token_ids for one, other in zip(found, plain, strict=True)]
            right = [one.text == given.turns[0][1] for one, given in zip(found, asked, strict=True)]
            figures[name] = {
                "same_answers": round(sum(same) / len(same), 3),
                "right_answers": round(sum(right) / len(right), 3),
                "largest_logit_error": round(float((logits(folder) - expected).abs().max() / expected.std()), 4),
            }
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--times", nargs="+", metavar="FORMAT", choices=FORMATS, help="measure only the times of these formats"
    )
    names = options.parse_args().times
    with tempfile.TemporaryDirectory() as temporary:
        times = speed(Path(temporary), names or FORMATS)
    if names is None:
        write("quantized", {"samples": SAMPLES, "formats": accuracy(), "times": times})
        return
    plain, before = times.pop("plain"), saved("quantized")
    later = {name: {**found, "plain": plain} for name, found in times.items()}
    save("quantized", before | {"times": before["times"] | later})


if __name__ == "__main__":
    main()
