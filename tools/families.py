"""Writes the table of families into README.md: `python -m tools.families`; with --check it only looks (exit status)."""

from __future__ import annotations

import sys
from pathlib import Path

from mindie_mm.models import family_named, family_names

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- families: made by `make families` -->\n", "<!-- /families -->\n"


def names() -> list[str]:
    """The families of the package; those of other packages, where some are installed, are not its own."""
    return [name for name in family_names() if family_named(name).__module__.startswith("mindie_mm.models.")]


def table() -> str:
    """One row a family."""
    rows = ["| family | `model_type` | published, such as | media | proven equal to |", "|---|---|---|---|---|"]
    for name in names():
        family = family_named(name)
        types = ", ".join(f"`{one}`" for one in family.model_types)
        rows.append(f"| `{name}` | {types} | {family.published} | {', '.join(family.kinds)} | {family.reference} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str) -> str:
    """`readme` with the table as it should be."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def main() -> int:
    """The exit status."""
    found = README.read_text()
    wanted = with_table(found)
    if "--check" in sys.argv[1:]:
        return int(found != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
