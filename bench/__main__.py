"""All benchmarks in sequence: `make bench`, or `python -m bench NAME...` for some of them."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "preprocess",
    "decoders",
    "full_arena",
    "shm",
    "engine",
    "models",
    "batch",
    "serve",
    "startup",
    "scale.stages",
    "scale.model",
)


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
