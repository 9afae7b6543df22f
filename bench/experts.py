"""Benchmark of a mixture-of-experts layer beside transformers' implementations, on one core.

The layer has the sizes of Qwen3-VL-30B-A3B: 128 experts with 8 per row, width 2048, and inner width 768. Each turn runs
all implementations on the same new rows. Before each run, other data are read, so that the weights come from memory, as
in a model with many layers. The figures are medians of processor times, on which other programs have little effect.
"""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench.report import median, write
from mindie_mm.device import open_device
from mindie_mm.nn.experts import arrange
from tools.arguments import parser

EXPERTS, COUNT, WIDTH, INNER = 128, 8, 2048, 768
THEIRS = ("eager", "grouped_mm", "batched_mm")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = {"decode, 1 row": 1, "decode, 8 rows": 8, "prefill, 512 rows": 512}
TURNS = 9
OTHER_BYTES = 2**29
"""Size of the data that are read before each run. It exceeds the caches of the processor."""
MOST_GATHERED = 64
"""Maximum number of rows of a batch for batched_mm, which copies the weights for each expert of each row: 4 GiB."""


def layers(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return transformers' layer and mindie_mm's layer with the same random weights."""
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

    config = SimpleNamespace(
        num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=INNER, hidden_act="silu"
    )  # those of Qwen3-VL-30B-A3B
    with torch.device("meta"):
        theirs = Qwen3VLMoeTextExperts(config).requires_grad_(False).eval()
    for name, weight in [*theirs.named_parameters()]:
        values = torch.empty(weight.shape, dtype=dtype).normal_(std=0.02)
        setattr(theirs, name, nn.Parameter(values, requires_grad=False))
    own = copy.deepcopy(theirs, {id(weight): weight for weight in theirs.parameters()})  # the weights are not copied
    parent = nn.ModuleDict({"experts": own})
    arrange(parent)
    open_device("cpu").prepare(parent)
    return theirs, own


def seconds(layer: Any, given: tuple[Tensor, Tensor, Tensor]) -> float:
    began = time.process_time()
    layer(*given)
    return time.process_time() - began


def measured(theirs: Any, own: Any, rows: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the processor times of each implementation, in seconds."""
    others = torch.zeros(OTHER_BYTES // 8, dtype=torch.int64)
    names = ["mindie_mm", *(name for name in THEIRS if name != "batched_mm" or rows <= MOST_GATHERED)]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(TURNS + 1):
        hidden = torch.randn(rows, WIDTH).to(dtype)
        weights, chosen = torch.randn(rows, EXPERTS).softmax(-1).topk(COUNT)
        given = hidden, chosen, weights.to(dtype)
        for name in names:
            theirs.config._experts_implementation = name  # noqa: SLF001 - there is no public name
            others.add_(1)
            took = seconds(own if name == "mindie_mm" else theirs, given)
            if turn:  # the first turn is a warm-up
                times[name].append(took)
    return times


def main() -> None:
    """Measure all numbers of rows in both dtypes."""
    parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        for name, dtype in DTYPES.items():
            theirs, own = layers(dtype)
            for step, rows in ROWS.items():
                times = {way: median(took) for way, took in measured(theirs, own, rows, dtype).items()}
                ratios = {f"{way} / mindie_mm": round(times[way] / times["mindie_mm"], 2) for way in times}
                del ratios["mindie_mm / mindie_mm"]
                figures[f"{name}, {step}"] = {f"{way}_ms": round(1e3 * took, 2) for way, took in times.items()} | ratios
            del theirs, own
    write("experts", figures)


if __name__ == "__main__":
    main()
