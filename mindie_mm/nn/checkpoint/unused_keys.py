"""Detection of keys in config.json that have no effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from mindie_mm.nn.checkpoint.config_keys import HOUSEKEEPING
from mindie_mm.nn.checkpoint.directory import Checkpoint

_PROBE = "mindie_mm probes whether this key is read"
_ABSENT = object()

Path = tuple[str, ...]
"""Names of the sections around a key, outermost first, followed by the key."""


def unused_keys(stated: Mapping[str, Any], resolve: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Return the keys of config.json that have no effect on the configuration.

    A key in a section is returned as `section.key`. A key counts as used if the configuration class has a field of this
    name or computes an attribute of this name. A key also counts as used if another value is refused or changes other
    attributes, as with old spellings that the class translates. Finally, a key at the top level counts as used if it
    repeats a section's value.

    Args:
        stated: The contents of config.json.
        resolve: Function that builds a transformers configuration from such contents. It may change its argument.

    """
    with _silent():
        config = resolve(deepcopy(dict(stated)))
        sections = [getattr(config, name, None) for name in config.sub_configs]
        strange = [
            path
            for path, value in _strange(config, stated)
            if not (len(path) == 1 and any(_same(getattr(part, path[0], _ABSENT), value) for part in sections))
        ]
        return [".".join(path) for path in _untranslated(stated, strange, resolve)]


def original_keys(
    names: Iterable[str],
    checkpoint: Checkpoint,
    translated: Checkpoint,
    translate: Callable[[Checkpoint], Checkpoint],
) -> list[str]:
    """Return the keys of a config.json in its authors' layout that have no effect.

    Args:
        names: Keys of the translated config.json that have no effect.
        checkpoint: The checkpoint in its authors' layout.
        translated: The same checkpoint in transformers' layout.
        translate: Function that translates such a checkpoint.

    """
    files = {"tokenizer.json": translated.json("tokenizer.json")}  # translated once, because that may take a second

    def contents(stated: dict[str, Any]) -> Any:
        return translate(replace(checkpoint.with_files(files), config=stated)).contents

    untranslated = _untranslated_keys(checkpoint.config, contents)
    return [*untranslated, *(_original_name(name, checkpoint.config, translated.config) for name in names)]


def _original_name(name: str, original: Mapping[str, Any], translated: Mapping[str, Any]) -> str:
    """Return the name that a key of the translated config.json has in the original file.

    The section of the key may have another name in the original file.
    """
    section, _, key = name.partition(".")
    if not key or section in original:
        return name
    keys = translated[section].keys()
    sections = {own: value.keys() for own, value in original.items() if isinstance(value, Mapping)}
    return f"{max(sections, key=lambda own: len(keys & sections[own]))}.{key}"


def _untranslated_keys(stated: Mapping[str, Any], translate: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """Yield the keys of a config.json in its authors' layout that have no effect on the translation.

    Args:
        stated: The contents of config.json.
        translate: Function that translates such contents into an object that `!=` can compare.

    """
    for path, value in _leaves(stated):
        if value is not None and not _makes_difference(stated, path, translate):
            yield ".".join(path)


def _leaves(stated: Mapping[str, Any], sections: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the keys whose values are not sections, with the values. Skip the keys in HOUSEKEEPING."""
    for name, value in stated.items():
        if name in HOUSEKEEPING:
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*sections, name))
        else:
            yield (*sections, name), value


def _makes_difference(stated: Mapping[str, Any], path: Path, translate: Callable[[dict[str, Any]], Any]) -> bool:
    """Return whether another value of the key is refused or changes the translation."""
    translations = []
    for value in (_ABSENT, _PROBE):
        contents = deepcopy(dict(stated))
        _put(contents, path, value)
        try:
            translations.append(translate(contents))
        except Exception:  # noqa: BLE001 - a translation may compute with the value
            return True
    return bool(translations[0] != translations[1])


def _strange(config: Any, stated: Mapping[str, Any], sections: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the keys that are not fields of their configuration class, with their values."""
    known = {*HOUSEKEEPING, *config.attribute_map, *(field.name for field in dataclasses.fields(config))}
    if "rope_parameters" in known:  # `PreTrainedConfig` translates both old spellings, which most checkpoints have
        known |= {"rope_scaling", "rope_theta"}
    for name, value in stated.items():
        if isinstance(value, Mapping) and name in config.sub_configs and (part := getattr(config, name, None)):
            yield from _strange(part, value, (*sections, name))
        elif name not in known:
            yield (*sections, name), value


def _same(actual: Any, value: Any) -> bool:
    return type(actual) is type(value) and bool(actual == value)


def _untranslated(
    stated: Mapping[str, Any], paths: Sequence[Path], resolve: Callable[[dict[str, Any]], Any]
) -> list[Path]:
    """Return the keys that `_are_translated` does not find.

    Most keys are in large groups that are not translated. Groups are divided, because each question takes time.
    """
    if not paths or not _are_translated(stated, paths, resolve):
        return [*paths]
    half = len(paths) // 2
    parts = (paths[:half], paths[half:]) if half else ()
    return [path for part in parts for path in _untranslated(stated, part, resolve)]


def _are_translated(stated: Mapping[str, Any], paths: Sequence[Path], resolve: Callable[[dict[str, Any]], Any]) -> bool:
    """Return whether other values of the keys are refused, or change attributes other than those of their names.

    Also return True if the class computes the attribute of a key when the key is missing.
    """
    resolved = []
    for value in (_ABSENT, _PROBE):
        contents = deepcopy(dict(stated))
        for path in paths:
            _put(contents, path, value)
        try:
            settled = resolve(contents).to_dict()
        except Exception:  # noqa: BLE001 - transformers' classes refuse values in many ways
            return True
        were_there = [_put(settled, path, _ABSENT) for path in paths]
        if any(were_there) and value is _ABSENT:
            return True
        resolved.append(settled)
    return bool(resolved[0] != resolved[1])


def _put(contents: Any, path: Path, value: Any) -> bool:
    """Set the key, or remove it if `value` is `_ABSENT`. Return whether the key existed."""
    for section in path[:-1]:
        contents = contents.get(section, {})
    was_there = path[-1] in contents
    if value is _ABSENT:
        contents.pop(path[-1], None)
    else:
        contents[path[-1]] = value
    return was_there


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress transformers' warnings about the values that these functions try."""
    from transformers.utils import logging  # imported late: the tokenizer imports the families, but does not need it

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
