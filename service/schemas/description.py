"""The interface's description, /openapi.json: what FastAPI cannot know of answers that it does not make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from service.http.access import OPEN_PATHS
from service.http.errors import ErrorBody

_SCHEMA = "#/components/schemas/{model}"


def answered(kind: type) -> dict[int | str, dict[str, Any]]:
    """A route's `responses` whose answer is a TypedDict."""
    return {200: {"model": kind}}


def streamed(event: type, whole: type | None = None, last: str | None = None) -> dict[int | str, dict[str, Any]]:
    """A route's `responses` whose answer comes in events: `event`s or an error, and `last` behind them.

    With `whole` it does so on request alone, and else comes as that.
    """
    written = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [{"$ref": _SCHEMA.format(model=kind.__name__)} for kind in (event, ErrorBody)]},
    }
    data = {"type": "string", **({"anyOf": [{"const": last}, written]} if last else written)}
    # OpenAPI 3.2's form, which FastAPI writes for streams of its own, too
    item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    in_events = {"content": {"text/event-stream": {"itemSchema": item}}}
    if whole is None:
        return {200: {"description": "The answer, in events.", **in_events}}
    return {200: {"description": "The answer, in events on request.", "model": whole, **in_events}}


def describe(app: FastAPI, events: Sequence[type], *, keys: bool) -> None:
    """Makes the description of `app`, which is kept: with the `events` of its streams, TypedDicts.

    And without FastAPI's 422: a body that is no good is a 400 here. With `keys` it says which operations need one.
    """
    described = app.openapi()
    for path, operations in described["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if keys and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
    components = described["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    _, schemas = TypeAdapter.json_schemas(
        [(event, "serialization", TypeAdapter(event)) for event in events], ref_template=_SCHEMA
    )
    components["schemas"] |= schemas["$defs"]
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
