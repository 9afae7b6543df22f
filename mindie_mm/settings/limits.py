"""Types of settings with limits, and checks of values against them."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from mindie_mm.errors import InputError, naming
from mindie_mm.settings.environment import text_of
from mindie_mm.settings.paths import absolute

Count = Annotated[int, Meta(ge=1)]
CountOrNone = Annotated[int, Meta(ge=0)]
"""A count that may be 0. The meaning of 0 depends on the setting, such as no limit, no cache or no items."""
Seconds = Annotated[float, Meta(gt=0)]
PromptLimits = dict[Literal["image", "video", "audio"], CountOrNone]
"""Maximum number of media items in one prompt, by kind."""
_SHOWN = (str, int, float, list, tuple, dict)
_NAMES = {str: "a string", Path: "a string", int: "an integer", float: "a number", bool: "true or false"}


def python_number(value: Any) -> Any:
    """Return a number of numpy or another library as `bool`, `int` or `float`. Return any other value unchanged."""
    if isinstance(value, int | str) or not (isinstance(value, Real) or getattr(value, "ndim", None) == 0):
        return value
    if "bool" in str(getattr(value, "dtype", "")):  # numpy's bool is not a Real
        return bool(value)
    with suppress(TypeError):
        return operator.index(value)
    with suppress(TypeError, ValueError):
        return float(value)
    return value


def _with_python_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: python_number(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(python_number, value))
    return python_number(value)


def converted(name: str, value: object, hint: Any, *, strict: bool = True, secret: bool = False) -> Any:
    """Convert `value` to the type `hint`.

    Unless `strict` is set, parse texts as numbers or booleans, as needed for environment variables. Refuse an empty
    text, because scripts produce an empty text if a variable is not set. As a path, an empty text would mean the
    working directory. A string is parsed as JSON or as `image=4,video=1` if a mapping is needed.

    Raises:
        InputError: The value is invalid. The message states the setting and the expected type, and also the value
            unless `secret` is set.

    """
    value = _with_python_numbers(value)
    if isinstance(value, str) and not value.strip():
        raise InputError(f"{name} is {value!r}, which is empty; leave it out, or give a value")
    if isinstance(value, str) and strict and Path not in (hint, *get_args(hint)):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{name} contains a lone surrogate at character {error.start}") from None
    if isinstance(value, str) and not strict and hint is not Path:
        value = text_of(name, value)
    try:
        if isinstance(value, str) and get_origin(hint) is dict:
            return msgspec.convert(_entries(value), hint, strict=False)
        return msgspec.convert(value, hint, strict=strict, dec_hook=_path)
    except (msgspec.ValidationError, AttributeError, TypeError, ValueError) as error:  # msgspec may raise any of them
        is_shown = isinstance(value, _SHOWN) and not secret
        found = f"{name}={value!r}" if is_shown else f"{name} is of type {type(value).__name__}; it"
        raise InputError(f"{found} must be {_wanted(hint)}") from error


def require(settings: Any) -> None:
    """Raise InputError if a field of a settings dataclass has the wrong type or exceeds its limits.

    Replace numbers of numpy by Python's numbers.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        if not is_dataclass(value := getattr(settings, field.name)):
            converted(field.name, value, hints[field.name], secret="secret" in field.metadata)
            object.__setattr__(settings, field.name, _with_python_numbers(value))


def complete_paths(settings: Any) -> None:
    """Make the paths in a settings object absolute. Its `__post_init__` calls this. Raise the errors of `absolute`."""
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None and Path in (hints[field.name], *get_args(hints[field.name])):
            with naming(field.name):
                object.__setattr__(settings, field.name, absolute(value))


def _entries(text: str) -> Any:
    """Parse a mapping. Raise msgspec.ValidationError if the text is not a mapping, or has a key twice."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise msgspec.ValidationError(str(error)) from error
    pairs = [part.partition("=") for part in text.split(",")]
    entries = {key.strip(): value.strip() for key, _, value in pairs}
    if len(entries) < len(pairs):
        raise msgspec.ValidationError("a key is given twice")
    return entries


def _path(hint: type, value: object) -> Path:
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    raise msgspec.ValidationError


def _wanted(hint: Any) -> str:
    """Describe the values that the type `hint` allows."""
    if hint in _NAMES:
        return _NAMES[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin is tuple:
        count = f"{len(parts)} " if parts[-1] is not Ellipsis else ""
        return f"a list of {count}elements, each {_wanted(parts[0])}"
    if origin is dict:
        return f"a mapping from {', '.join(get_args(parts[0]))} to {_wanted(parts[1])}, such as image=4,video=1"
    if origin is Annotated:
        return f"{_wanted(parts[0])} {_limits(parts[1])}"
    return ", or ".join(_wanted(part) for part in parts if part is not type(None))


def _limits(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f"from {meta.ge} to {meta.le}"
    least = f"above {meta.gt}" if meta.gt is not None else f"of at least {meta.ge}"
    return least if meta.le is None else f"{least} and at most {meta.le}"
