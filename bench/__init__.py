"""Benchmarks that compare this project with alternatives: `make bench`, or `python -m bench NAME...`."""

import sys
from pathlib import Path

# transformers looks for torchvision only once, so the stub must be importable before any module imports transformers.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "stubs"))
