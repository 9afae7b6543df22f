"""Sources of settings.

A flag overrides a variable, a variable overrides the TOML file, and the file overrides the default.

The file is flat. Its keys are the field names of all settings classes, like flags and variables.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from mindie_mm.errors import InputError
from mindie_mm.settings.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig
from mindie_mm.settings.environment import given, text_of, unknown_variables, variable
from mindie_mm.settings.limits import converted

CLASSES: tuple[type[Any], ...] = (WorkerConfig, EngineConfig, MediaCaps, ServiceConfig)
PARTS = frozenset({"engine", "media"})
"""Fields that are settings classes themselves, not settings."""
SECRETS = frozenset(field.name for cls in CLASSES for field in fields(cls) if "secret" in field.metadata)
MASK = "***"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in readable form."""

    name: str
    value: str
    """Value as in a TOML file. `none` if the program chooses it, *** for a secret."""
    origin: str
    """Source of the value: the flag, the variable, the file, or `default`."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """All settings."""

    worker: WorkerConfig
    service: ServiceConfig
    origins: Mapping[str, str]
    """Source of each setting that was given, by its name."""

    def settings(self) -> list[Setting]:
        """Return every setting with its origin. Secrets are masked."""
        owners = (self.worker, self.worker.engine, self.worker.media, self.service)
        return [
            Setting(
                field.name,
                _shown(getattr(owner, field.name), secret=field.name in SECRETS),
                self.origins.get(field.name, "default"),
            )
            for owner in owners
            for field in fields(owner)
            if field.name not in PARTS
        ]


def configuration(flags: Mapping[str, Any], file: Path | None = None) -> Configuration:
    """Combine the settings of flags, environment and file.

    Args:
        flags: Values of flags by field name. None and empty tuples count as not given.
        file: TOML file. None: the file that MINDIE_MM_CONFIG names, if any.

    Raises:
        InputError: A setting is wrong. The message names it and its source.

    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def give(entries: Mapping[str, Any], origin: Mapping[str, str]) -> None:
        values.update(entries)
        origins.update(origin)

    if (file := file or _config_file()) is not None:
        entries = read_file(file)
        give(entries, dict.fromkeys(entries, str(file)))
    for cls in CLASSES:
        entries = from_environment(cls)
        give(entries, {name: variable(name) for name in entries})
    named = {name: value for name, value in flags.items() if value is not None and value != ()}
    give(named, {name: _flag(name, value) for name, value in named.items()})

    def build(cls: type[Any], **parts: Any) -> Any:
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values} | parts)

    worker = build(WorkerConfig, engine=build(EngineConfig), media=build(MediaCaps))
    return Configuration(worker, build(ServiceConfig), origins)


def _config_file() -> Path | None:
    name = variable("config")
    return None if (text := given("config")) is None else converted(name, text, Path, strict=False)


def from_environment(cls: type[Any]) -> dict[str, Any]:
    """Return the fields of the settings class `cls` that variables set. InputError names a wrong value's variable."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        one.name: _parse(variable(one.name), text, hints[one.name])
        for one in fields(cls)
        if (text := given(one.name)) is not None
    }


def _parse(name: str, text: str, hint: Any) -> Any:
    if get_origin(hint) is not tuple:
        return converted(name, text, hint, strict=False)
    if not (parts := tuple(part.strip() for part in text_of(name, text).split(",") if part.strip())):
        raise InputError(f"{name} is {text!r}, which holds no value: leave it out, or give one")
    return converted(name, parts, hint, strict=False, secret=name in map(variable, SECRETS))


def misspelt_variables() -> list[str]:
    """Return a warning for each MINDIE_MM_ variable that is not a setting. Leave out its value, which may be secret.

    Unlike an unknown key of the file, such a variable does not prevent the start, because the user may not have set it.
    """
    hints = _hints()
    warnings = []
    for name in unknown_variables(hints):
        near = difflib.get_close_matches(name.removeprefix(variable("")).lower(), hints, n=1)
        warnings.append(f"{name} is not a setting{f'; did you mean {variable(near[0])}?' if near else ''}")
    return warnings


def read_file(file: Path) -> dict[str, Any]:
    """Return the settings of a TOML file. InputError names the file, the key and the expected value."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is no TOML: {error}") from error
    hints = _hints()
    return {key: _checked(file, key, value, hints) for key, value in table.items()}


def _hints() -> dict[str, Any]:
    """Return the type of each setting, by its name."""
    return {
        name: hint
        for cls in CLASSES
        for name, hint in get_type_hints(cls, include_extras=True).items()
        if name not in PARTS
    }


def _checked(file: Path, key: str, value: Any, hints: Mapping[str, Any]) -> Any:
    if key not in hints:
        if isinstance(value, dict):
            raise InputError(f"{file}: [{key}] is a table; every setting stands at the top, by its own name")
        near = difflib.get_close_matches(key.replace("-", "_"), hints, n=1)
        raise InputError(f"{file}: there is no setting {key!r}{f'; {near[0]!r} is one' if near else ''}")
    if key == "served_model_name" and isinstance(value, str) and value.strip():
        value = [value]  # earlier versions took a single name
    return converted(f"{file}: {key}", value, hints[key], secret=key in SECRETS)


def _flag(name: str, value: object) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}" if name != "model" else "argument"


def _shown(value: object, *, secret: bool) -> str:
    if secret and value:
        return f"{MASK} ({len(value)} of them)" if isinstance(value, tuple) else MASK
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str() | Path():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(_shown(part, secret=False) for part in value)}]"
    return str(value)
