"""Describes the differences between recorded and current values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return each name whose value differs, with a description that contains both values."""
    return {
        name: _difference(name, before.get(name), value) for name, value in now.items() if before.get(name) != value
    }


def first_difference(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ."""
    return next(at for at, (was, value) in enumerate(zip_longest(before, now)) if was != value)


def _difference(name: str, before: Any, now: Any) -> str:
    """Describe how a value differs. For a mapping, show the keys that differ. For a list, show its first difference."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return f"{name} was {_shown(before, keys)} and is now {_shown(now, keys)}"
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        at = first_difference(before, now)
        was, value = (one[at] if at < len(one) else None for one in (before, now))
        return f"{name}[{at}] was {was} and is now {value}"
    return f"{name} was {before} and is now {now}"


def _shown(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {values.get(key, '(none)')}" for key in keys)
