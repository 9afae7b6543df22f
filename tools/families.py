"""Script that writes the table in docs/families.md: `python -m tools.families`.

With --check it writes nothing, and exits with 1 if the table is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mindie_mm.models import family_named, family_names
from tools.arguments import parser

PAGE = Path(__file__).parent.parent / "docs/families.md"
BEGIN, END = "<!-- families: made by `make families` -->\n", "<!-- /families -->\n"


def names() -> list[str]:
    """Return the families of this package, without the families of other installed packages."""
    return [name for name in family_names() if family_named(name).__module__.startswith("mindie_mm.models.")]


def table() -> str:
    """Return the table, with one row per family."""
    rows = ["| family | `model_type` | example on Hugging Face | media | tested against |", "|---|---|---|---|---|"]
    for name in names():
        family = family_named(name)
        types = ", ".join(f"`{one}`" for one in family.model_types)
        rows.append(f"| `{name}` | {types} | {family.published} | {', '.join(family.kinds)} | {family.reference} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Return `page` with its table up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def main() -> int:
    """Write or check the table, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="write nothing")
    checks = options.parse_args().check
    current = PAGE.read_text(encoding="utf-8")
    wanted = with_table(current)
    if checks:
        return int(current != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
