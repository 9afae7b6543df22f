"""Ray Data's map_batches with the transformers processor: `python -m bench.batch.on_ray CHECKPOINT OUT ACTORS ROWS..`.

Each of ROWS is a JSONL file. The files are processed one after another on one local cluster, and the seconds
for each file are printed as JSON. Actors write the arrays of their rows themselves, like the loop over transformers,
because writing through Ray takes longer.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.batch.contestants import Reference
from tools.arguments import parser


class Processing:
    """The function of a Ray Data actor."""

    def __init__(self, checkpoint: str, out: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._reference, self._out = Reference(Path(checkpoint)), Path(out)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        sizes = []
        for line in batch["text"]:
            name, ids, patches = self._reference(line)
            np.save(self._out / f"{name}-ids.npy", ids)
            np.save(self._out / f"{name}-pixels.npy", patches)
            sizes.append(patches.nbytes)
        return {"size": np.array(sizes)}


def main() -> None:
    options = parser(__doc__)
    for name in ("checkpoint", "out"):
        options.add_argument(name, metavar=name.upper())
    options.add_argument("actors", type=int, metavar="ACTORS")
    options.add_argument("files", nargs="+", metavar="ROWS")
    given = options.parse_args()
    checkpoint, out, actors = given.checkpoint, given.out, given.actors
    import ray

    ray.init(num_cpus=actors, include_dashboard=False, log_to_driver=False)
    seconds = []
    for rows in given.files:
        began = time.perf_counter()
        lines = [{"text": line} for line in Path(rows).read_text(encoding="utf-8").splitlines()]
        done = ray.data.from_items(lines, override_num_blocks=max(actors, len(lines) // 16)).map_batches(
            Processing,
            fn_constructor_args=(checkpoint, out),
            batch_size=8,
            num_cpus=1,
            concurrency=(1, actors),
        )
        assert sum(1 for _ in done.iter_rows()) == len(lines)
        seconds.append(time.perf_counter() - began)
        for file in Path(out).glob("*.npy"):
            file.unlink()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
