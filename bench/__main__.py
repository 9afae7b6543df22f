"""Every benchmark, one after another: `make bench`, or `python -m bench NAME...` for some."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench

NAMES = sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        print(f"== {name}", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
