"""Handles request fields that this service does not know.

Unknown fields are ignored, with one warning per name. With `--strict`, they are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.inputs.unknown_keys import warn_once

IGNORED_FIELDS = frozenset(
    {
        # OpenAI's fields about users, billing and storage
        *("store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "moderation"),
        *("parallel_tool_calls", "stream_options"),
        # fields of vLLM and SGLang about scheduling and logs
        *("request_id", "rid", "kv_transfer_params"),
    }
)
"""Fields that clients send, but that do not change answers. They are accepted even with `--strict`."""
_MAX_UNKNOWN = 16
"""Maximum number of unknown fields to remember per request. Clients may send any number of them."""
_MAX_SHOWN = 40


def unknown_fields(given: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the first `_MAX_UNKNOWN` names in `given` that are neither in `known` nor in `IGNORED_FIELDS`.

    Fields that are null count as absent.
    """
    unknown = (
        name for name, value in given.items() if value is not None and name not in known and name not in IGNORED_FIELDS
    )
    return tuple(islice(unknown, _MAX_UNKNOWN))


def pass_over_fields(names: Collection[str], *, strict: bool) -> None:
    """Warn about each unknown field when it occurs for the first time. If `strict`, raise InputError instead."""
    for name in names:
        if strict:
            shown = name[:_MAX_SHOWN]
            raise InputError(
                f"the request has the unknown field {shown!r}; this service refuses unknown fields (--strict)",
                param=shown,
            )
        warn_once(name, "a request")
