"""Headers and errors of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from service.http import errors

_PATHS = ("/messages", "/messages/count_tokens")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The error's `type` for each status. For other statuses, it is api_error from 500 on, and invalid_request_error
below."""


class MessageErrorObject(TypedDict):
    """Description of an error in Anthropic's format."""

    type: str
    message: str


class MessageError(TypedDict):
    """The body of an error in Anthropic's format."""

    type: Literal["error"]
    error: MessageErrorObject
    request_id: str | None


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {**response, "model": MessageError} for status, response in errors.RESPONSES.items()
}
"""Error responses of the routes of the Messages API, for /openapi.json."""


def is_messages(path: str) -> bool:
    """Return whether `path`, which may begin with the setting `root_path`, belongs to the Messages API."""
    return path.endswith(_PATHS)


def error_event(body: Mapping[str, Any], status: int, request_id: str | None = None) -> MessageError:
    """Return Anthropic's error object for the body of an error in OpenAI's format."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: MessageErrorObject = {"type": kind, "message": body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}


class MessagesFront:
    """ASGI middleware that accepts the header x-api-key, and answers errors in Anthropic's format.

    It is outside all other middleware, which may answer with errors, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as an ASGI application."""
        if scope["type"] != "http" or not is_messages(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "authorization" not in headers and (key := headers.get("x-api-key")) is not None:
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", f"Bearer {key}".encode("latin-1"))]}
        await self._app(scope, receive, _Sending(send).send)


class _Sending:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        """Start of the response, if it is an error in JSON."""
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            if request_id := headers.get("x-request-id"):
                headers["request-id"] = request_id
            message = {**message, "headers": headers.raw}
            if message["status"] >= 400 and headers.get("content-type") == "application/json":
                self._held = message
                return
        elif self._held is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            start, self._held = self._held, None
            headers = MutableHeaders(raw=start["headers"])
            body = msgspec.json.encode(
                error_event(msgspec.json.decode(self._body), start["status"], headers.get("request-id"))
            )
            headers["content-length"] = str(len(body))
            await self._send(start)
            message = {"type": "http.response.body", "body": body}
        await self._send(message)
