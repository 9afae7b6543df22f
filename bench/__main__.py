"""All benchmarks in sequence: `make bench`, or `python -m bench NAME...` for some of them."""

from __future__ import annotations

import importlib
import sys

from tools.arguments import parser

NAMES = (
    "preprocess",
    "decoders",
    "full_arena",
    "shm",
    "engine",
    "prompt_lookup",
    "loras",
    "models",
    "experts",
    "batch",
    "serve",
    "startup",
    "start_memory",
    "scale.stages",
    "scale.model",
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    given = options.parse_args()
    if unknown := [name for name in given.names if name not in NAMES]:
        options.error(f"there is no benchmark {unknown[0]}; the benchmarks are {', '.join(NAMES)}")
    for name in given.names or NAMES:
        sys.argv[1:] = []  # of this command, not of the benchmark
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
