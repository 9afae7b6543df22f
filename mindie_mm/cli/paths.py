"""Parameter types of click for paths and texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mindie_mm.errors import InputError
from mindie_mm.settings.environment import text_of
from mindie_mm.settings.paths import FILE_URL, is_url, shown_url

_URLS = ("http://", "https://")


class _Path(click.Path):
    """The type of a path that must not be empty.

    Python treats an empty path as the current folder. On a command line, an empty path usually comes from an unset
    variable.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the value is empty. Leave the option out, or give a path", param, ctx)
        if isinstance(value, str) and is_url(value):
            self.fail(f"{shown_url(value)!r} is a URL; give the path of a local file or folder", param, ctx)
        if isinstance(value, str) and FILE_URL.match(value):
            self.fail(f"{value!r} is a URL; give the path without file://", param, ctx)
        return super().convert(value, param, ctx)


class _RunFolder(_Path):
    """The type of the folder of a run, which may be the URL of a folder in an object store."""

    name = "folder|url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and is_url(value) else super().convert(value, param, ctx)


class _Text(click.ParamType[str]):
    """The type of text in UTF-8 or in the locale's encoding."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return text_of("it", value)
        except InputError as error:
            self.fail(str(error), param, ctx)


class _MediaFile(_Path):
    """The type of a media file: the path of a file, an http(s) URL, or - for standard input."""

    name = "file|url|-"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            from mindie_mm.settings.config import MAX_SOURCE_BYTES  # imported late, because `shm` starts without it

            return sys.stdin.buffer.read(MAX_SOURCE_BYTES + 1)
        if isinstance(value, str) and value.startswith(_URLS):
            return value
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)
"""Type of options and arguments that are paths."""
RUN_FOLDER = _RunFolder(path_type=Path)
"""Type of options and arguments that are folders of runs. A URL is a string."""
MODEL = _Path(path_type=str)
"""Type of an argument that is the folder of a checkpoint or the name of a repository, as the user has written it."""
MEDIA_FILE = _MediaFile(path_type=Path, exists=True, dir_okay=False, readable=True)
"""Type of options that are media. If a file cannot be read, parsing the command line fails. A URL is a string, and
standard input is read as bytes."""
TEXT = _Text()
"""Type of options and arguments that are texts."""
