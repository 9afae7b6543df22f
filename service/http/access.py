"""Who may ask: API keys, and without any, who names a host that is this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http import page
from service.http.errors import error_body
from service.http.json_response import JSONResponse

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


class OwnHost:
    """ASGI middleware for a service on loopback without keys: 403 where Host is another machine's name.

    Whoever owns a name can let it lead to 127.0.0.1 (DNS rebinding). To a browser a page of that name is of one origin
    with the service then, so that no CORS holds it off; but the Host that it names is its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._names = {"localhost", socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http" or self._is_own(Headers(scope=scope).get("host")):
            await self._app(scope, receive, send)
            return
        message = (
            "the Host header is neither an IP address nor localhost. Without an API key, a service on loopback accepts "
            "no other Host, so that web pages cannot reach it through a name of their own. Start it with --api-key, or "
            "let the proxy in front of it set the header (nginx: proxy_set_header Host 127.0.0.1;)"
        )
        await JSONResponse(error_body(message, 403), status_code=403)(scope, receive, send)

    def _is_own(self, host: str | None) -> bool:
        if host is None:  # browsers always send it
            return True
        name = _host_name(host)
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def is_loopback(host: str) -> bool:
    """Whether what listens on `host` is reached from this machine alone."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _host_name(host: str) -> str:
    """Of a Host header, in small letters, without the port; empty where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
