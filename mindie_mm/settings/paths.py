"""Conversion of relative paths to absolute paths, at the time when the caller passes them.

A script may change its working directory at any time, as Hydra does. If a worker process is restarted after that, it
starts in the new directory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mindie_mm.errors import InputError

_MAX_SHOWN = 200
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,63})://")
FILE_URL = re.compile("file://", re.IGNORECASE)
"""The beginning of the URL of a local file, such as file:///data/a.jsonl."""
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(:/|::)")
"""A URL that lost a slash in `pathlib.Path`, or a chain of URLs. A local path can begin with ./ instead."""
_SECRET = re.compile(r"//[^/@]*:[^/@]*@|\bhttps?://([^/@]*@|[^?]*\?)", re.IGNORECASE)
"""A password in a URL, or a user name or a query of http, which are often tokens."""


def is_url(text: str) -> bool:
    """Return whether a string is the URL of a file that is not local, such as s3://bucket/a.jsonl."""
    return (match := _URL.match(text)) is not None and match[1].lower() != "file"


def require_url(name: str, url: str) -> str:
    """Return the URL `name` with its scheme in lower case.

    Raises:
        InputError: The URL contains a secret. The message does not show the URL.

    """
    if _SECRET.search(url):
        raise InputError(
            f"{name} is a URL with a password, or an http URL with a user name or a query, which files of a run and "
            "messages would show. Put credentials where fsspec's package for the store reads them. Fetch a file from "
            "http with curl, and give its path, or - for standard input"
        )
    scheme, mark, rest = url.partition("://")
    return f"{scheme.lower()}{mark}{rest}"


def require_no_broken_url(name: str, given: object) -> None:
    """Raise InputError if the path `name` is a URL that lost a slash in `pathlib.Path`, or a chain of URLs.

    `require_path` refuses a `file:` URL.
    """
    if _BROKEN_URL.match(text := str(given)) and not FILE_URL.match(text):
        shown = shown_url(text)
        raise InputError(
            f"{name} is {shown}, which looks like a URL but is not one. Give a URL as a string with // in it, and a "
            f"path as ./{shown}"
        )


def shown_url(url: str) -> str:
    """Return a URL for a message, without its user name and password, and without a query of http."""
    url = re.sub(r"//[^/@]*@", "//", url)
    return url.partition("?")[0] if url.lower().startswith("http") else url


def working_directory() -> str:
    """Return the working directory, or "" if it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - Path.cwd takes ten times as long
    except FileNotFoundError:
        return ""


def require_path(value: str | os.PathLike[str]) -> Path:
    """Return `value` as a path. Raise InputError if no file can have this path, or the value has another type."""
    if isinstance(value, str) and FILE_URL.match(value):
        raise InputError(f"the path is {ascii(value)[:_MAX_SHOWN]}, a URL. Give the path without file://")
    try:
        path = Path(value)
        name = os.fsencode(path)
    except (TypeError, ValueError):
        shown = ascii(value)[:_MAX_SHOWN] if isinstance(value, str) else f"a {type(value).__name__}"
        raise InputError(f"the path is {shown}; it must be a string or a pathlib.Path") from None
    if b"\0" in name:
        raise InputError(f"the path {ascii(str(path))[:_MAX_SHOWN]} has a null character, which no path can have")
    return path


def local(name: str, path: str | os.PathLike[str]) -> Path:
    """Return the argument `name` as an absolute path. Raise InputError if it is empty, a URL or not a path."""
    if isinstance(path, str) and (not path or is_url(path)):
        raise InputError(f"{name}={shown_url(path)!r} must be the path of a local file or folder")
    require_no_broken_url(name, path)
    return absolute(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return `path`, resolved against the working directory if it is relative.

    Raises:
        InputError: As in `require_path`, or the path is relative and the working directory was removed.

    """
    path = require_path(path)
    if path.is_absolute():
        return path
    if not (folder := working_directory()):
        raise InputError(f"{path} is a relative path, but the working directory was removed; give an absolute path")
    return Path(folder, path)
