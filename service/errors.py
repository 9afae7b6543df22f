"""From an exception to an HTTP answer: one table, and OpenAI's error object."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mindie_mm import errors
from service.json_response import JSONResponse

_log = logging.getLogger(__name__)

_MAX_DETAILS = 5
_MAX_MESSAGE = 800


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an error leaves the service."""

    status: int
    """HTTP status; 499 is nginx's `client closed request`, which nobody receives."""
    kind: str
    """The error object's `type`."""


TABLE: Mapping[type[BaseException], Outcome] = {
    errors.InputError: Outcome(400, "BadRequestError"),
    errors.ModelNotFound: Outcome(404, "NotFoundError"),
    errors.WorldError: Outcome(500, "InternalServerError"),
    errors.ArenaFull: Outcome(503, "ServiceUnavailableError"),
    errors.ProcessDied: Outcome(503, "ServiceUnavailableError"),
    errors.ServiceStopping: Outcome(503, "ServiceUnavailableError"),
    errors.QueueFull: Outcome(429, "RateLimitError"),
    errors.RequestTimeout: Outcome(504, "TimeoutError"),
    errors.RequestAborted: Outcome(499, "RequestAbortedError"),
    Exception: Outcome(500, "InternalServerError"),
}
"""The class nearest to the error's own, over its method resolution order, decides."""

_KINDS = {
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
}


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is to blame, where one is."""
    code: int
    """The HTTP status."""


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorObject


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong."},
    "5XX": {"model": ErrorBody, "description": "The service failed; the same request may work later."},
}
"""Every route's errors, for the interface's description."""


def outcome(error: BaseException) -> Outcome:
    """How `error` leaves the service."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def error_object(error: BaseException) -> dict[str, Any]:
    """OpenAI's error object for `error`; an error of ours speaks for itself, any other keeps its text."""
    found = outcome(error)
    message = str(error) if isinstance(error, errors.MindieMMError) else "internal error"
    param = "model" if isinstance(error, errors.ModelNotFound) else None
    return _object(message, found.kind, param, found.status)


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """OpenAI's error object for what is no exception."""
    return _object(message, kind, None, status)


def install(app: FastAPI) -> None:
    """Makes `app` answer every error with an error object."""
    app.add_exception_handler(errors.MindieMMError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)


def error_response(error: Exception) -> Response:
    """The answer that tells `error`, whatever it is."""
    status = outcome(error).status
    if status == 500:
        # A message of another's may quote what the client sent.
        _log.error("request failed: %s: %s", type(error).__name__, error_object(error)["error"]["message"])
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(error_object(error), status_code=status, headers=headers)


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_invalid_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    details = "; ".join(_detail(detail) for detail in found[:_MAX_DETAILS])
    if len(found) > _MAX_DETAILS:
        details += f"; and {len(found) - _MAX_DETAILS} more"
    location = found[0]["loc"][1:] if found else ()
    param = str(location[0]) if location and isinstance(location[0], str) else None
    return JSONResponse(_object(details, "BadRequestError", param, 400), status_code=400)


def _detail(detail: Mapping[str, Any]) -> str:
    """One mistake of the body: where and what, with the value where it is a number; any other may be a picture."""
    if detail["type"] == "json_invalid":
        return "the body is not valid JSON"
    where = ".".join(str(part) for part in detail["loc"][1:]) or "body"
    value = detail["input"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{where}: {detail['msg']}, not {value}" if number else f"{where}: {detail['msg']}"


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _KINDS.get(error.status_code, "BadRequestError")
    said = str(error.detail)
    if error.status_code == 400 and "parsing the body" in said:  # FastAPI's words for JSON that the decoder gives up
        said = "the body is not valid JSON, or is nested too deeply"
    body = _object(said, kind, None, error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _object(message: str, kind: str, param: str | None, status: int) -> dict[str, Any]:
    if len(message) > _MAX_MESSAGE:  # it quotes what the client sent
        message = f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
