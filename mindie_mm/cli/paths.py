"""Parameter types of click for paths and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mindie_mm.errors import InputError
from mindie_mm.settings.environment import text_of


class _Path(click.Path):
    """The type of a path that must not be empty.

    Python treats an empty path as the current folder. On a command line, an empty path usually comes from an unset
    variable.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the value is empty. Leave the option out, or give a path", param, ctx)
        return super().convert(value, param, ctx)


class _Text(click.ParamType[str]):
    """The type of text in UTF-8 or in the locale's encoding."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return text_of("it", value)
        except InputError as error:
            self.fail(str(error), param, ctx)


PATH = _Path(path_type=Path)
"""Type of options and arguments that are paths."""
READABLE_FILE = _Path(path_type=Path, exists=True, dir_okay=False, readable=True)
"""Type of options that are files to read. If such a file cannot be read, parsing the command line fails."""
TEXT = _Text()
"""Type of options and arguments that are texts."""
