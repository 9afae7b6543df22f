"""Access control: API keys, or a check of the Host header for services on loopback without keys."""

from __future__ import annotations

import socket
from collections.abc import Callable
from hashlib import sha256
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from service.http import page
from service.http.clients import Clients
from service.http.errors import error_body
from service.http.host import host_name
from service.http.json_response import JSONResponse

HEALTH_ELSEWHERE = ("/v2/health/ready", "/v2/health/live", "/ping")
"""Paths of the health probes in MindIE and vLLM. Here they are aliases of this service's own probes."""
OPEN_PATHS = frozenset({"/health", "/health/live", "/metrics", "/openapi.json", *HEALTH_ELSEWHERE}) | page.PATHS
"""Paths that require no key: probes, metrics and the description of the API, as in vLLM, and the web page, which sends
the key in its requests."""

RELOAD = "/admin/reload"
LOAD_LORA = "/v1/load_lora_adapter"
UNLOAD_LORA = "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({RELOAD, LOAD_LORA, UNLOAD_LORA})
"""Paths of administrative routes. They take the key of `admin_key` in place of an API key, and check it themselves."""

OPEN_WARNING = (
    "THIS SERVICE IS OPEN: it listens on %s without an API key, so that anybody who can reach this machine can use it. "
    "Set --api-key, or listen on 127.0.0.1"
)
"""Warning for a service without API keys that listens beyond loopback."""


class Access:
    """ASGI middleware that answers 401 unless the request carries the key of one of `clients` as a bearer token.

    It stores the client in `scope["state"]["client"]`.
    """

    def __init__(self, app: ASGIApp, *, clients: Clients) -> None:
        self._app = app
        self._clients = clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as an ASGI application."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS | ADMIN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client = self._clients.find(key_digest(headers))
        if client is not None and headers.get("authorization", "").partition(" ")[0].lower() == "bearer":
            scope.setdefault("state", {})["client"] = client
            await self._app(scope, receive, send)
            return
        message = "the request has no valid API key; send the header Authorization: Bearer KEY"
        scope.setdefault("state", {})["reason"] = message
        answer = JSONResponse(error_body(message, 401), status_code=401, headers={"WWW-Authenticate": "Bearer"})
        await answer(scope, receive, send)


def key_digest(headers: Headers) -> bytes:
    """Return the digest of a request's API key, or of no characters if it has none."""
    _, _, key = headers.get("authorization", "").partition(" ")
    return sha256(key.strip().encode()).digest()


class OwnHost:
    """ASGI middleware that answers 403 if the Host header names another machine.

    This protects a service on loopback without keys from DNS rebinding: an attacker points a domain at 127.0.0.1, so a
    browser regards pages from that domain and the service as one origin. CORS then does not apply, but the Host header
    still contains the attacker's domain.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._names = {"localhost", socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as an ASGI application."""
        # Browsers always send the header. The server of Ray Serve accepts several, so each of them is checked.
        if scope["type"] != "http" or all(map(self._is_own, Headers(scope=scope).getlist("host"))):
            await self._app(scope, receive, send)
            return
        message = (
            "the Host header is neither an IP address nor localhost. Without an API key, a service on "
            "loopback accepts no other Host, because web pages could otherwise reach the service through "
            "their own domain (DNS rebinding). Start the service with --api-key, or set the header in the "
            "proxy in front of the service (nginx: proxy_set_header Host 127.0.0.1;)"
        )
        scope.setdefault("state", {})["reason"] = "the Host header is neither an IP address nor localhost"
        await JSONResponse(error_body(message, 403), status_code=403)(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = host_name(host)
        return name in self._names or name.endswith(".localhost") or _is_address(name)


class OwnForms:
    """ASGI middleware that answers 403 to forms (multipart/form-data) of foreign web pages, for services without keys.

    Browsers ask before they send JSON to another origin, but not before they send a form. Any web page could otherwise
    store files, or let the model work.
    """

    def __init__(self, app: ASGIApp, *, allows: Callable[[str], bool]) -> None:
        """Create the middleware. `allows` returns whether an origin may call the service (`--cors-origin`)."""
        self._app = app
        self._allows = allows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request as an ASGI application."""
        if scope["type"] != "http" or not self._is_foreign(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = (
            "the form comes from a web page of another origin; start the service with --cors-origin and this origin, "
            "or with --api-key"
        )
        scope.setdefault("state", {})["reason"] = message
        await JSONResponse(error_body(message, 403), status_code=403)(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or not headers.get("content-type", "").lower().startswith("multipart/"):
            return False
        return origin.partition("://")[2] != headers.get("host") and not self._allows(origin)


def is_loopback(host: str) -> bool:
    """Return whether a socket that listens on `host` can be reached only from this machine."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def is_open(config: ServiceConfig) -> bool:
    """Return whether a service with this configuration answers anybody who can reach this machine."""
    return not config.has_keys and not is_loopback(config.host)


def require_key(config: ServiceConfig) -> None:
    """Raise InputError if the service is open, and the setting `allow_open` is off."""
    if is_open(config) and not config.allow_open:
        raise InputError(
            f"the service would listen on {config.host} without an API key, so that anybody who can reach this machine "
            "could use it; set MINDIE_MM_API_KEY or MINDIE_MM_API_KEY_FILE, or set MINDIE_MM_ALLOW_OPEN=1 if this is "
            "intended"
        )


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
