"""Benchmarks, each beside the alternative: `make bench`, or `python -m bench NAME...`."""

import sys
from pathlib import Path

# transformers looks for torchvision once, as some module of ours first asks: the stand-in has to be there by then.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "stubs"))
