"""Sources of settings.

A flag overrides a variable, a variable overrides the TOML file, and the file overrides the default.

The TOML file has no tables. Its keys are the field names of all settings classes.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from mindie_mm.errors import InputError
from mindie_mm.settings.config import SERVICE_PROMPT_LIMITS, EngineConfig, MediaCaps, ServiceConfig, WorkerConfig
from mindie_mm.settings.environment import given, text_of, unknown_variables, variable
from mindie_mm.settings.limits import converted

CLASSES: tuple[type[Any], ...] = (WorkerConfig, EngineConfig, MediaCaps, ServiceConfig)
PARTS = frozenset({"engine", "media"})
"""Fields whose values are objects of other settings classes. They are not settings themselves."""
SECRETS = frozenset(field.name for cls in CLASSES for field in fields(cls) if "secret" in field.metadata)
REMOVED = {
    "measure_s": "the memory of the largest step is computed when the engine starts; remove the setting",
    "max_images": "set limit_mm_per_prompt, such as image=4",
    "max_videos": "set limit_mm_per_prompt, such as video=4",
    "max_audios": "set limit_mm_per_prompt, such as audio=4",
}
"""Settings of earlier versions, with the reason for their removal and what to do."""
MASK = "***"
DEFAULT = "default"
"""Origin of settings that are at their default."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with its value and origin as text."""

    name: str
    value: str
    """Value as in a TOML file. It is `none` if the program chooses the value, and *** for a secret."""
    origin: str
    """Source of the value: the flag, the variable, the file, or `DEFAULT`."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """All settings."""

    worker: WorkerConfig
    service: ServiceConfig
    origins: Mapping[str, str]
    """Source of each setting that is not at its default, by the name of the setting."""

    def for_service(self) -> Configuration:
        """Return the settings with the service's defaults."""
        limits = SERVICE_PROMPT_LIMITS | self.worker.limit_mm_per_prompt
        return replace(self, worker=replace(self.worker, limit_mm_per_prompt=limits))

    def settings(self) -> list[Setting]:
        """Return every setting with its origin. Secrets are masked."""
        owners = (self.worker, self.worker.engine, self.worker.media, self.service)
        return [
            Setting(
                field.name,
                _shown(getattr(owner, field.name), secret=field.name in SECRETS),
                self.origins.get(field.name, DEFAULT),
            )
            for owner in owners
            for field in fields(owner)
            if field.name not in PARTS
        ]


def configuration(flags: Mapping[str, Any], file: Path | None = None) -> Configuration:
    """Combine the settings from flags, the environment and the file.

    Args:
        flags: Values of flags by field name. A flag with the value None or an empty tuple was not given.
        file: TOML file. None means the file in MINDIE_MM_CONFIG, if that variable is set.

    Raises:
        InputError: A setting is invalid. The message states the setting and its source.

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
    """Return the values of the fields of the settings class `cls` that environment variables set, by field name.

    Raise InputError if a value is invalid. The message states the variable.
    """
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
        raise InputError(f"{name} is {text!r}, which is empty; leave it out, or give a value")
    return converted(name, parts, hint, strict=False, secret=name in map(variable, SECRETS))


def misspelt_variables() -> list[str]:
    """Return a warning for each MINDIE_MM_ variable that is not a setting. Leave out its value, which may be secret.

    Such a variable is not an error, unlike an unknown key in the file, because the user may not have set it.
    """
    hints = _hints()
    warnings = []
    for name in unknown_variables(hints):
        own = name.removeprefix(variable("")).lower()
        if own in REMOVED:
            warnings.append(f"{name} has no effect: {REMOVED[own]}")
            continue
        near = difflib.get_close_matches(own, hints, n=1)
        warnings.append(f"{name} is not a setting{f'; did you mean {variable(near[0])}?' if near else ''}")
    return warnings


def without_effect(configuration: Configuration, names: Collection[str], command: str) -> list[str]:
    """Return a warning for each variable that sets one of the settings `names`, which have no effect on `command`.

    Like misspelt variables, they are no errors, because the user may have set them for another command.

    Raises:
        InputError: The file sets one of them.

    """
    given = {name: origin for name, origin in configuration.origins.items() if name in names}
    variables = sorted(origin for name, origin in given.items() if origin == variable(name))
    for name, origin in given.items():
        if origin not in variables:
            raise InputError(f"{origin}: {name} has no effect on mindie-mm {command}; remove it")
    return [f"{origin} has no effect on mindie-mm {command}" for origin in variables]


def read_file(file: Path) -> dict[str, Any]:
    """Return the settings in a TOML file, by field name.

    Raise InputError if the file or a value is invalid. The message states the file, the key and the expected value.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is not valid TOML: {error}") from error
    return checked_settings(str(file), table)


def checked_settings(source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `given`, by field name, with values of their types.

    Raise InputError if a name or a value is invalid. The message states `source`, the name and the expected value.
    """
    hints = _hints()
    return {name: _checked(source, name, value, hints) for name, value in given.items()}


def _hints() -> dict[str, Any]:
    """Return the type of each setting, by the name of the setting."""
    return {
        name: hint
        for cls in CLASSES
        for name, hint in get_type_hints(cls, include_extras=True).items()
        if name not in PARTS
    }


def _checked(file: str, key: str, value: Any, hints: Mapping[str, Any]) -> Any:
    if key not in hints:
        if isinstance(value, dict):
            raise InputError(f"{file}: [{key}] is a table; settings must be top-level keys")
        if (own := key.replace("-", "_")) in REMOVED:
            raise InputError(f"{file}: the setting {own!r} was removed: {REMOVED[own]}")
        near = difflib.get_close_matches(own, hints, n=1)
        raise InputError(f"{file}: there is no setting {key!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    if key == "served_model_name" and isinstance(value, str) and value.strip():
        value = [value]  # earlier versions took a single name
    return converted(f"{file}: {key}", value, hints[key], secret=key in SECRETS)


def _flag(name: str, value: object) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}" if name != "model" else "argument"


def _shown(value: object, *, secret: bool) -> str:
    if secret and value:
        return f"{MASK} ({len(value)} of them)" if isinstance(value, tuple) else MASK
    match value:
        case None | {} if not value:
            return "none"
        case bool():
            return str(value).lower()
        case str() | Path():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(_shown(part, secret=False) for part in value)}]"
        case dict():
            value = f"{{{', '.join(f'{key} = {_shown(one, secret=False)}' for key, one in value.items())}}}"
    return str(value)
