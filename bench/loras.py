"""Benchmark of LoRA adapters: requests per second of one batch with 0 to 16 adapters, in float32 on the CPU.

The checkpoint has 37 million parameters, and each adapter has rank 16 in all linear layers of the text model. 16
requests with prompts of 64 tokens and answers of 32 tokens run at once. All cases run in turns on one thread. The
results are the best of several rounds in processor time, so that other programs on the machine affect them little.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from bench.report import write
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

REQUESTS, PROMPT, OUTPUT, RANK, ROUNDS = 16, 64, 32, 16, 5
ADAPTERS = (0, 1, 4, 16)


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], seed: int) -> Path:
    """Write an adapter of the layers `shapes`, which have [outputs, inputs] each."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / 100
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def requests_per_s(engine: Engine, keys: list[str]) -> float:
    """Run the requests, which use the adapters `keys` in turn, and return their number per second."""
    for number in range(REQUESTS):
        ids = np.random.default_rng(number).integers(10, 300, PROMPT)
        key = keys[number % len(keys)] if keys else None
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, lora=key)
        assert engine.add(Add(str(number), ids.tobytes(), params)) is None
    start = time.process_time()
    while engine.has_work():
        engine.step()
    return REQUESTS / (time.process_time() - start)


def measure(path: Path, folder: Path) -> dict[str, Any]:
    config = EngineConfig(num_speculative_tokens=0, prefix_caching=False, max_loras=REQUESTS, max_lora_rank=RANK)
    plain = load_model(path, "cpu", "float32", prepares=False)
    text = {part for one in plain.text_modules() for part in one.modules()}
    shapes = {
        name: (part.out_features, part.in_features)
        for name, part in plain.module.named_modules()
        if type(part) is nn.Linear and part in text and part is not plain.module.get_output_embeddings()
    }
    model = load_model(path, "cpu", "float32")
    loras = model.enable_loras(REQUESTS, RANK)
    for seed in range(REQUESTS):
        adapter = loras.read(write_adapter(folder / str(seed), shapes, seed))
        loras.known[adapter.key] = adapter
    alone = Engine(load_model(path, "cpu", "float32"), config, 2**28)
    engine, keys = Engine(model, config, 2**28), [*loras.known]
    rounds = [
        [requests_per_s(alone, []), *(requests_per_s(engine, keys[:number]) for number in ADAPTERS)]
        for _ in range(ROUNDS)
    ]
    best = np.max(np.array(rounds), axis=0).tolist()
    names = ["without --lora", *(f"{number} adapters" for number in ADAPTERS)]
    return {name: round(figure, 2) for name, figure in zip(names, best, strict=True)}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "mid", "mid")
        figures = measure(path, Path(folder))
    write("loras", {"requests": REQUESTS, "prompt": PROMPT, "output": OUTPUT, "rank": RANK, "requests_per_s": figures})


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
