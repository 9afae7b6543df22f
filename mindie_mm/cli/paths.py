"""Paths on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class _Path(click.Path):
    """An empty one, which Python takes for the working directory, is what a script has not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: leave it out, or give one", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)
"""The type of options and arguments that are paths."""
