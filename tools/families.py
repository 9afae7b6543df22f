"""Script that writes the tables of families in docs/families.md and docs/arrays.md: `python -m tools.families`.

With --check it writes nothing, and exits with 1 if a table is out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path

from mindie_mm.models import family_named, family_names
from tools.arguments import parser

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- families: made by `make families` -->\n", "<!-- /families -->\n"
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")


def names() -> list[str]:
    """Return the families of this package, without the families of other installed packages."""
    return [name for name in family_names() if family_named(name).__module__.startswith("mindie_mm.models.")]


def table() -> str:
    """Return the table of families, with one row per family."""
    rows = ["| family | `model_type` | example on Hugging Face | media | tested against |", "|---|---|---|---|---|"]
    for name in names():
        family = family_named(name)
        types = ", ".join(f"`{one}`" for one in family.model_types)
        rows.append(f"| `{name}` | {types} | {family.published} | {', '.join(family.kinds)} | {family.reference} |")
    return "\n".join(rows) + "\n"


def arrays() -> str:
    """Return the table of arrays. Families with the same arrays share a row."""
    families: dict[str, list[str]] = {}
    for name in names():
        families.setdefault(described(name), []).append(f"`{name}`")
    rows = [f"| {', '.join(own)} | {text} |" for text, own in families.items()]
    return "\n".join(["| family | arrays and grid of an item |", "|---|---|", *rows]) + "\n"


def described(name: str) -> str:
    """Return the sentences about blocks and grids in the docstring of a family's processor, or of its base class."""
    for cls in family_named(name).processor.__mro__:
        text = " ".join(inspect.cleandoc(cls.__doc__ or "").split()) if cls.__module__.startswith("mindie_mm") else ""
        sentences = _SENTENCE.split(text)
        about = [
            index for index, sentence in enumerate(sentences) if re.search(r"\bblocks?\b", sentence, re.IGNORECASE)
        ]
        if about:
            # The sentences after one that names MindIE describe its wire format.
            return " ".join(takewhile(lambda sentence: "MindIE" not in sentence, sentences[about[0] :]))
    raise ValueError(f"no docstring of the processor of {name} describes its blocks")


PAGES: Mapping[Path, Callable[[], str]] = {DOCS / "families.md": table, DOCS / "arrays.md": arrays}


def with_table(page: str, make: Callable[[], str]) -> str:
    """Return `page` with its table up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + make() + END + after


def main() -> int:
    """Write or check the tables, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="write nothing")
    checks = options.parse_args().check
    stale = 0
    for path, make in PAGES.items():
        current = path.read_text(encoding="utf-8")
        wanted = with_table(current, make)
        stale |= current != wanted
        if not checks:
            path.write_text(wanted, encoding="utf-8")
    return int(checks and stale)


if __name__ == "__main__":
    sys.exit(main())
