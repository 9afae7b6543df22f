"""Command lines of the scripts in tools/, bench/, training/ and tests/."""

from __future__ import annotations

import argparse
import sys


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring. Without further arguments, it accepts only --help."""
    spec = sys.modules["__main__"].__spec__
    name = f"python -m {spec.name.removesuffix('.__main__')}" if spec else None
    return argparse.ArgumentParser(
        name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
