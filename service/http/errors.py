"""HTTP responses for exceptions: the table of HTTP statuses, and OpenAI's error object."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from mindie_mm import errors
from service.http.json_response import JSONResponse
from service.http.reason import note_reason

_log = logging.getLogger(__name__)

_MAX_DETAILS = 5
_MAX_MESSAGE = 800
_MAX_VALUE = 40
_MAX_PATH = 100


TABLE: Mapping[type[BaseException], int] = {
    errors.InputError: 400,
    errors.ModelNotFound: 404,
    errors.NotStored: 404,
    errors.OperationalError: 500,
    errors.ArenaFull: 503,
    errors.SharedMemoryError: 503,
    errors.SpoolFull: 503,
    errors.ProcessDied: 503,
    errors.NoProcess: 503,
    errors.ServiceStopping: 503,
    errors.QueueFull: 429,
    errors.RequestTimeout: 504,
    errors.RequestAborted: 499,  # nginx's `client closed request`, only for the log
    Exception: 500,
}
"""HTTP status by class of error. The first class in the error's method resolution order applies."""

KINDS: Mapping[int, str] = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    499: "RequestAbortedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
"""The error object's `type` for each status. For other statuses, it is InternalServerError from 500 on, and
BadRequestError below."""


_OF_THE_BODY: Mapping[str, str] = {
    "missing": "the request has no body",
    "model_attributes_type": "the body must be a JSON object",
}
"""Messages for errors of the body as a whole, by pydantic's type of error."""


_ONLY_TEXT = "this service only generates text"
_ELSEWHERE: Mapping[str, str] = {
    "/v1/images": _ONLY_TEXT,
    "/v1/videos": _ONLY_TEXT,
    "/v1/audio/speech": _ONLY_TEXT,
    "/v1/realtime": "use /v1/chat/completions with stream",
    "/v1/assistants": "use /v1/responses",
    "/v1/threads": "use /v1/responses",
    "/v1/conversations": "use /v1/responses with previous_response_id",
    "/v1/uploads": "use /v1/files, which takes a file in one request",
    "/v1/vector_stores": "send the files to /v1/responses as input_file, or use /v1/embeddings",
    "/v1/messages/batches": "use /v1/batches",
    "/v1/complete": "use /v1/messages",
    "/v1/moderations": "the model can judge text in /v1/chat/completions",
    "/v1/fine_tuning": "this service does not train models",
    "/v1beta": "use /v1/chat/completions in place of Gemini's API",
    "/api/chat": "use /v1/chat/completions in place of Ollama's API",
    "/api/generate": "use /v1/completions in place of Ollama's API",
    "/api/tags": "use /v1/models in place of Ollama's API",
}
"""Advice for paths of other services, by the beginning of the path."""


class ErrorObject(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    """Field of the request that caused the error, or None."""
    code: int | Literal["context_length_exceeded"]
    """The HTTP status, as in vLLM. If the prompt is too long, it is OpenAI's code instead, because clients then know
    that they should shorten the prompt."""


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorObject


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid."},
    "5XX": {"model": ErrorBody, "description": "The service failed. The same request may succeed later."},
}
"""Error responses of every route, for /openapi.json."""


def status_of(error: BaseException) -> int:
    """Return the HTTP status for `error`."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def error_object(error: BaseException) -> dict[str, Any]:
    """Return OpenAI's error object for `error`.

    The client sees the message of a `MindieMMError`, but not the message of any other exception. Messages about shared
    memory are also hidden, because they contain paths on this machine.
    """
    message = str(error) if isinstance(error, errors.MindieMMError) else "internal error"
    if isinstance(error, errors.SharedMemoryError):
        message = "shared memory or the spool cannot be used; see the log of the service for the reason"
    param = error.param if isinstance(error, errors.InputError) else None
    body = error_body(message, status_of(error), param)
    if isinstance(error, errors.ContextLengthExceeded):
        body["error"]["code"] = "context_length_exceeded"
    return body


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object. `param` is the field of the request that caused the error."""
    if len(message) > _MAX_MESSAGE:  # a message may quote the client's input
        message = f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)"
    kind = KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def install(app: FastAPI, routes: Iterable[Route] = ()) -> None:
    """Install exception handlers that answer every error with an error object.

    If the path of a request does not exist, the message names the nearest path of `routes`. If its method does not
    exist, the message names those of the path.
    """
    methods: dict[str, set[str]] = {}
    for route in routes:
        methods.setdefault(route.path, set()).update(route.methods or ())
    app.add_exception_handler(errors.MindieMMError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, partial(_on_http_error, methods))


def error_response(error: Exception) -> Response:
    """Return the response for any `error`."""
    status = status_of(error)
    if status == 500 or isinstance(error, errors.SharedMemoryError):
        # The message of an error from another library may quote the client's input.
        text = error if isinstance(error, errors.MindieMMError) else "internal error"
        _log.error("request failed: %s: %s", type(error).__name__, text)
    headers = retry_after(error) if status in (429, 503) else None
    return JSONResponse(error_object(error), status_code=status, headers=headers)


def retry_after(error: Exception) -> dict[str, str]:
    """Return the header that says when to send a request again that failed with status 429 or 503."""
    return {"Retry-After": str(error.retry_after_s if isinstance(error, errors.QuotaExceeded) else 1)}


async def _on_error(request: Request, error: Exception) -> Response:
    await note_reason(request, error_object(error)["error"]["message"])
    return error_response(error)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    details = mistakes_in_words(mistakes)
    await note_reason(request, details)
    return JSONResponse(error_body(details, 400, _param(mistakes[0]) if mistakes else None), status_code=400)


def mistakes_in_words(mistakes: Sequence[Mapping[str, Any]]) -> str:
    """Describe pydantic's errors for a body. The first part of the location of each error is left out."""
    details = "; ".join(_detail(detail) for detail in mistakes[:_MAX_DETAILS])
    return f"{details}; and {len(mistakes) - _MAX_DETAILS} more" if len(mistakes) > _MAX_DETAILS else details


def _param(detail: Mapping[str, Any]) -> str | None:
    """Return the name of the invalid field, or None if the body as a whole is invalid."""
    first = next(iter(detail["loc"][1:]), detail.get("ctx", {}).get("name"))
    return first if isinstance(first, str) else None


def _detail(detail: Mapping[str, Any]) -> str:
    """Describe one validation error. The value is quoted only if it is short, because it may be an image."""
    if detail["type"] == "json_invalid":
        (_, position), reason = detail["loc"], detail["ctx"]["error"]
        return f"the body is not valid JSON: {reason} at character {position}"
    where = ".".join(str(part) for part in detail["loc"][1:])
    message = f"{where}: {detail['msg']}" if where else _OF_THE_BODY.get(detail["type"], detail["msg"])
    value = detail["input"]
    short = isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _MAX_VALUE)
    return f"{message}, not {json.dumps(value)}" if short else message


async def _on_http_error(methods: Mapping[str, Collection[str]], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text, headers = str(error.detail), error.headers
    if error.status_code == 405:
        headers = {**(headers or {}), "Allow": _allowed(request, error, methods)}
    if error.status_code in (404, 405):
        text = _no_route(request, error, methods)
    elif error.status_code == 400 and "parsing the body" in text:  # FastAPI's message if the JSON decoder gives up
        text = "the body is not valid JSON or is nested too deeply"
    await note_reason(request, text)
    return JSONResponse(error_body(text, error.status_code), status_code=error.status_code, headers=headers)


def _allowed(request: Request, error: HTTPException, methods: Mapping[str, Collection[str]]) -> str:
    """Return the methods of a path. The error names only those of the first route with this path."""
    path = getattr(request.scope.get("route"), "path", "")
    return ", ".join(sorted(methods.get(path, ()))) or (error.headers or {}).get("Allow", "")


def _no_route(request: Request, error: HTTPException, methods: Mapping[str, Collection[str]]) -> str:
    """Return the message for a path or method that no route has. It names the nearest path without parameters."""
    path = request.scope["path"]
    shown = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
    if error.status_code == 405:
        allowed = _allowed(request, error, methods).replace(", ", " or ") or "another method"
        return f"{shown} does not accept {request.method}; use {allowed}"
    for start, advice in _ELSEWHERE.items():
        if path.startswith(start):
            return f"there is no path {shown}; {advice}"
    near = difflib.get_close_matches(path[: 2 * _MAX_PATH], [known for known in methods if "{" not in known], n=1)
    advice = f"did you mean {near[0]}?" if near else "/openapi.json lists the paths"
    return f"there is no path {shown}; {advice}"
