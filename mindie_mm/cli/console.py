"""Where tables go."""

from __future__ import annotations

import sys
from typing import Any

PIPED_WIDTH = 1000


def print_table(*renderables: Any) -> None:
    """Prints rich renderables: as wide as the terminal, or with every row on one line for another program."""
    from rich.console import Console  # late: it takes as long to import as all else that a listing needs

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(*renderables, sep="\n")
