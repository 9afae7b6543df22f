"""Worker code of tests with several ranks, in float32. Each rank's process calls `run_rank`.

`cases` is a folder with one folder per checkpoint. Each contains the checkpoint's `path` and prompts <name>.npy, which
are token ids with reference words. Each rank writes <name>.<rank>.logits.npy, and <way>.<rank>.json with the greedy
tokens of all prompts in one batch, for each value of `TowerParallel`. If the checkpoint is refused, the rank writes the
error to refused.<rank>.txt.
"""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from mindie_mm.engine.core import Engine
from mindie_mm.engine.ranks import Ranks, join
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig, TowerParallel
from tests.models.contract import run

NUM_TOKENS = 8


def main(case: Path, device: str, ranks: Ranks) -> None:
    """Run one checkpoint, and write its logits and tokens."""
    try:
        model = load_model((case / "path").read_text(), device, "float32")
    except UnsupportedCheckpoint as error:
        (case / f"refused.{ranks.number}.txt").write_text(str(error))
        return
    prompts = {file.stem: torch.from_numpy(np.load(file)) for file in sorted(case.glob("*.npy"))}
    for name, ids in prompts.items():
        np.save(case / f"{name}.{ranks.number}.logits", model.logits(ids).cpu().numpy())
    for way in get_args(TowerParallel):
        engine = Engine(model, EngineConfig(tower_parallel=way), 2**24, ranks)
        outputs, errors = run(engine, list(prompts.values()), max_tokens=NUM_TOKENS)
        assert not errors, errors
        (case / f"{way}.{ranks.number}.json").write_text(json.dumps(dict(zip(prompts, outputs.values(), strict=True))))


def run_rank(number: int, count: int, cases: Path, device: str) -> None:
    """Run all checkpoints. The caller runs each rank in a separate process."""
    torch.set_num_threads(1)
    ranks = join(number, count, str(cases / "store"), device)
    for case in sorted(path for path in cases.iterdir() if path.is_dir()):
        main(case, device, ranks)
    # Threads of the process group that outlive the interpreter may abort the process.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
