"""Who may ask: API keys."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service import page
from service.errors import error_body
from service.json_response import JSONResponse

HEALTH_ELSEWHERE = ("/v2/health/ready", "/v2/health/live", "/ping")
"""The probes of MindIE and vLLM, which ask for the same."""
OPEN_PATHS = frozenset({"/health", "/health/live", "/metrics", *HEALTH_ELSEWHERE}) | page.PATHS
"""What orchestrators and scrapers ask for, without a key as in vLLM; and the web page, whose calls bear one."""


class Access:
    """ASGI middleware: 401 unless a request bears one of `keys`."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._may(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "the request bears no API key that is known here; it goes into Authorization, as Bearer KEY"
        answer = JSONResponse(error_body(message, 401), status_code=401, headers={"WWW-Authenticate": "Bearer"})
        await answer(scope, receive, send)

    def _may(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = sha256(key.strip().encode()).digest()
        # Digests are of one length, and all are compared: the time says nothing about any key.
        known = [compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(known)
