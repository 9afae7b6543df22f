"""The OpenAPI description, /openapi.json.

The types of the answers are added here. FastAPI cannot infer them, because routes return plain responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from threading import Lock
from types import UnionType
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from service.http.access import ADMIN_PATHS, OPEN_PATHS
from service.http.errors import ErrorBody
from service.http.json_response import JSONResponse

_SCHEMA = "#/components/schemas/{model}"


def answered(kind: type) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route whose answer is the TypedDict `kind`."""
    return {200: {"model": kind}}


def streamed(
    event: type, whole: type | UnionType | None = None, last: str | None = None
) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that streams events.

    Args:
        event: TypedDict of the events. An event may also be an ErrorBody.
        whole: TypedDict of an answer that is not streamed, a union of several, or None if the route always streams.
        last: Data of a special event that ends the stream, or None if there is no such event.

    """
    written = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [{"$ref": _SCHEMA.format(model=kind.__name__)} for kind in (event, ErrorBody)]},
    }
    data = {"type": "string", **({"anyOf": [{"const": last}, written]} if last else written)}
    # OpenAPI 3.2 describes streams in this way, and so does FastAPI for its own streams.
    item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    in_events = {"content": {"text/event-stream": {"itemSchema": item}}}
    if whole is None:
        return {200: {"description": "The response, as events.", **in_events}}
    return {200: {"description": "The response, as events if stream is true.", "model": whole, **in_events}}


def form_of(body: type[BaseModel], file: str) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes a form with the fields of `body` and a file.

    Args:
        body: Class of the fields. A list has brackets after its name, as OpenAI's clients send it.
        file: Description of the part `file`.

    """
    schema = body.model_json_schema()
    lists = {name for name, field in schema["properties"].items() if "array" in str(field)}
    properties = {f"{name}[]" if name in lists else name: field for name, field in schema["properties"].items()}
    properties["file"] = {"type": "string", "format": "binary", "description": file}
    return form(properties, ["file"])


def form(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes a form. `properties` are schemas by the names of the fields."""
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def describe(app: FastAPI, events: Sequence[type], *, keys: bool) -> None:
    """Add /openapi.json to `app`.

    The first request creates the description, because that takes 0.3 s of processor time, and few services are asked
    for it. A thread creates it, so that the service answers other requests meanwhile.

    The schemas of `events`, the TypedDicts of streams, are added to FastAPI's description. Its status 422 is removed,
    because an invalid body gets status 400 here. If `keys` is true, operations that need an API key are described as
    such.
    """
    lock, described = Lock(), cache(partial(_description, app, events, keys=keys))

    def openapi(request: Request) -> Response:
        with lock:
            found = described()
        root = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(found | {"servers": [{"url": root}]} if root else found)

    app.add_route("/openapi.json", openapi, include_in_schema=False)


def _description(app: FastAPI, events: Sequence[type], *, keys: bool) -> dict[str, Any]:
    described = app.openapi()
    for path, operations in described["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if keys and path not in OPEN_PATHS | ADMIN_PATHS:
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
    return described
