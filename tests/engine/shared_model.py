"""Code that each rank runs in tests with several ranks, in float32. Each rank's process calls `run_rank`.

`cases` is a folder with a subfolder per checkpoint. A subfolder contains a file `path` with the checkpoint's path, and
prompts <name>.npy, which are token ids with handle words. Each rank writes <name>.<rank>.logits.npy. For each value of
`TowerParallel`, it also writes the greedy tokens of all prompts, run in one batch, to <value>.<rank>.json. If the
subfolder has a folder `loras` with LoRA adapters, each rank instead runs each prompt with each adapter and without one,
all in one batch, and writes the tokens and log-probabilities to loras.<rank>.json. If the
checkpoint is refused, the rank writes the error to refused.<rank>.txt instead.
"""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from mindie_mm.engine.core import Engine
from mindie_mm.engine.ranks import ALONE, Ranks, join
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.model import Model
from mindie_mm.settings.config import EngineConfig, TowerParallel
from tests.lora_samples import scored
from tests.models.contract import encoded_by, run

NUM_TOKENS = 8


def main(case: Path, device: str, ranks: Ranks) -> None:
    """Run one checkpoint, and write its logits and tokens to `case`."""
    try:
        model = load_model((case / "path").read_text(), device, "float32")
    except UnsupportedCheckpoint as error:
        (case / f"refused.{ranks.number}.txt").write_text(str(error))
        return
    prompts = {file.stem: torch.from_numpy(np.load(file)) for file in sorted(case.glob("*.npy"))}
    if (case / "loras").is_dir():
        found = with_adapters(model, case / "loras", [*prompts.values()], ranks)
        (case / f"loras.{ranks.number}.json").write_text(json.dumps(found))
        return
    for name, ids in prompts.items():
        np.save(case / f"{name}.{ranks.number}.logits", model.logits(ids).cpu().numpy())
    for way in get_args(TowerParallel):
        engine = Engine(model, EngineConfig(tower_parallel=way), 2**24, ranks)
        for ids in prompts.values():
            features = model.encode(model.read(ids.numpy()))
            for one, expected in zip(encoded_by(engine, ids), features, strict=True):
                np.testing.assert_allclose(one.array, expected.float().cpu().numpy(), atol=1e-4)
        outputs, errors = run(engine, list(prompts.values()), max_tokens=NUM_TOKENS)
        assert not errors, errors
        (case / f"{way}.{ranks.number}.json").write_text(json.dumps(dict(zip(prompts, outputs.values(), strict=True))))


def with_adapters(
    model: Model, folder: Path, prompts: list[torch.Tensor], ranks: Ranks = ALONE
) -> list[tuple[list[int], list[float]]]:
    """Run prompts with each of the adapters in `folder` and without one, all in one batch."""
    folders = sorted(folder.iterdir())
    loras = model.enable_loras(len(folders), 8)
    adapters = [loras.read(one, "", ranks.run_on_all) for one in folders]
    loras.known = {adapter.key: adapter for adapter in adapters}
    engine = Engine(model, EngineConfig(max_loras=len(folders)), 2**24, ranks)
    return scored(engine, [(ids, key) for ids in prompts for key in (None, *loras.known)])


def run_rank(number: int, count: int, cases: Path, device: str) -> None:
    """Run all checkpoints as rank `number`. The caller starts a separate process for each rank."""
    torch.set_num_threads(1)
    ranks = join(number, count, str(cases / "store"), device)
    for case in sorted(path for path in cases.iterdir() if path.is_dir()):
        main(case, device, ranks)
    # Threads of the process group could abort the process if they outlived the interpreter.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
