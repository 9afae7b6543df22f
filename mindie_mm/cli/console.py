"""Printing of tables, with aligned columns on a terminal, and with tabs between the cells otherwise."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Sequence

_BREAKS = re.compile(r"\s*[\t\r\n]\s*")


def table_lines(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table.

    If standard output is a terminal, columns are aligned. Otherwise, tabs separate the cells, for `cut` and `awk`.

    Args:
        rows: Cells of each row. Line breaks and tabs within a cell become spaces.
        right: Indices of the columns that are aligned to the right.

    """
    cells = [[_BREAKS.sub(" ", cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        return ["\t".join(row) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def print_table(rows: Sequence[Sequence[str]], headers: Sequence[str] = ()) -> None:
    """Print a table. rich draws the table on a terminal. Otherwise, print the result of `table_lines`."""
    if not sys.stdout.isatty():
        print(*table_lines([headers, *rows] if headers else rows), sep="\n")
        return
    from rich import box  # imported late, because it is slow to import
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, show_header=bool(headers), box=box.HEAVY_HEAD if headers else None)
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell, ""), overflow="fold") for cell in row))
    Console().print(table)


_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
"""Styles of cells that contain a status."""
