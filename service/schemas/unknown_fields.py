"""Fields of a request that this service does not know.

They are ignored, with one warning per name, or refused with `--strict`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from mindie_mm.errors import InputError
from mindie_mm.inputs.unknown_keys import warn_once

IGNORED_FIELDS = frozenset(
    {
        # OpenAI's: who asks, how it is billed, and where it is kept
        *("store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "moderation"),
        *("parallel_tool_calls", "stream_options"),
        # vLLM's and SGLang's: scheduling and records
        *("request_id", "rid", "kv_transfer_params"),
    }
)
"""Fields that clients send and that change no answer. Requests may have them in any case."""
_MAX_UNKNOWN = 16
"""Maximum number of unknown fields that a request remembers, because clients may send any number of them."""
_MAX_SHOWN = 40


def unknown_fields(given: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the first names in `given` that are neither `known` nor in `IGNORED_FIELDS`. Nulls count as absent."""
    unknown = (
        name for name, value in given.items() if value is not None and name not in known and name not in IGNORED_FIELDS
    )
    return tuple(islice(unknown, _MAX_UNKNOWN))


def pass_over_fields(names: Collection[str], *, strict: bool) -> None:
    """Warn about unknown fields the first time that each occurs. Raise InputError for the first one if `strict`."""
    for name in names:
        if strict:
            shown = name[:_MAX_SHOWN]
            raise InputError(f"the request has the unknown field {shown!r}, and this service is strict", param=shown)
        warn_once(name, "a request")
