"""Printing of tables."""

from __future__ import annotations

import sys
from typing import Any

PIPED_WIDTH = 1000


def print_table(*renderables: Any) -> None:
    """Print rich renderables as wide as the terminal, or one row per line if standard output is not a terminal."""
    from rich.console import Console  # imported late, because it is slow to import

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(*renderables, sep="\n")
