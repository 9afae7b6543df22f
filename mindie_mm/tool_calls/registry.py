"""The formats by name, and the choice of a format for a checkpoint.

Other packages add formats by entry points of the group `mindie_mm.tool_call_parsers`, which name subclasses of
`ToolCallParser`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points

from mindie_mm.errors import InputError
from mindie_mm.tool_calls.hermes import HermesParser
from mindie_mm.tool_calls.parser import ToolCallParser

GROUP = "mindie_mm.tool_call_parsers"

FORMATS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
}
"""The formats of this package, in the order in which they are tried on a template."""


def format_names() -> list[str]:
    """Return the names of all formats, sorted."""
    return sorted({*FORMATS, *_entries()})


def parser_named(name: str) -> type[ToolCallParser]:
    """Return the parser of a format.

    Raises:
        InputError: No format has this name, or it cannot be loaded.

    """
    if name in FORMATS:
        return FORMATS[name]
    if (entry := _entries().get(name)) is None:
        raise InputError(f"no format of tool calls is named {name!r}; there are {', '.join(format_names())}")
    return _loaded(entry)


def parser_for(template: str, vocabulary: Collection[str]) -> type[ToolCallParser] | None:
    """Return the parser for a checkpoint, or None if its template shows no known format.

    Formats of other packages come first.

    Args:
        template: The chat template.
        vocabulary: The added tokens of the tokenizer.

    """
    parsers = [*map(_loaded, _entries().values()), *FORMATS.values()]
    return next((parser for parser in parsers if parser.detects(template, vocabulary)), None)


def _entries() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _loaded(entry: EntryPoint) -> type[ToolCallParser]:
    try:
        parser = entry.load()
    except Exception as error:  # foreign code may raise anything, and the error must name the format
        raise InputError(f"the format {entry.name!r}, {entry.value}, does not load: {error!r}") from error
    if not (isinstance(parser, type) and issubclass(parser, ToolCallParser)):
        raise InputError(f"the format {entry.name!r}, {entry.value}, is no subclass of ToolCallParser")
    return parser
