"""Rewrites JSON schemas so that llguidance reads them as JSON Schema defines them."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any
from urllib.parse import quote

from mindie_mm.errors import InputError
from mindie_mm.structured.endless import without_endless
from mindie_mm.structured.schema_numbers import rewrite_numbers

_MAX_SHOWN = 40
_MAX_DIGITS = sys.get_int_max_str_digits()
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_UNCHANGED = frozenset({"const", "enum", "default", "examples", "title", "description", "$comment"})
_IN_FRAGMENTS = "!$&'()*+,;=:@/?-._~"
"""Characters that a URI fragment may contain beside letters, digits and percent-encoded characters."""
_LONE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")


def rewritten(schema: str) -> Any:
    """Parse a JSON schema, and rewrite it for llguidance without changing its meaning.

    Numbers are rewritten by `rewrite_numbers`. References are percent-encoded, because pydantic writes the names of
    classes as they are. A reference that no finite value can match allows nothing. A keyword that demands nothing
    (`"uniqueItems": false`) is left out.

    Raises:
        InputError: The schema is not valid JSON, or contains a number that llguidance would misread.

    """
    try:
        return _rewritten(without_endless(json.loads(schema, parse_float=_finite, parse_constant=_finite)))
    except RecursionError as error:
        raise InputError("the JSON schema is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InputError(f"the JSON schema is not valid JSON: {error}") from error
    except ValueError as error:
        raise InputError(f"the JSON schema is not valid JSON: an integer has more than {_MAX_DIGITS} digits") from error


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise InputError(f"the JSON schema is not valid JSON: {text[:_MAX_SHOWN]} is not a finite number")
    return number


def _rewritten(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_rewritten(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for key, value in schema.items():
        if key in _UNCHANGED:
            changed[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            changed[key] = {name: _rewritten(part) for name, part in value.items()}
        else:
            changed[key] = _rewritten(value)
    rewrite_numbers(changed)
    if isinstance(reference := changed.get("$ref"), str):
        changed["$ref"] = _encoded(reference)
    if changed.get("uniqueItems") is False:
        del changed["uniqueItems"]
    return changed


def _encoded(reference: str) -> str:
    """Percent-encode the characters that the fragment of a reference must not contain."""
    before, hash_sign, fragment = reference.partition("#")
    return before + hash_sign + quote(_LONE_PERCENT.sub("%25", fragment), safe=_IN_FRAGMENTS + "%")
