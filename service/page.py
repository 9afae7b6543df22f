"""GET /: the web page, and the files that it is made of."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
FILES = (
    "api.js",
    "bar.js",
    "chart.js",
    "composer.js",
    "conversation.js",
    "dom.js",
    "format.js",
    "history.js",
    "icon.svg",
    "items.js",
    "key.js",
    "load.js",
    "main.js",
    "memory.js",
    "page.css",
    "recorder.js",
    "timings.js",
    "tokens.js",
    "watch.js",
)
"""All that is served of the folder, besides the page itself."""
PATHS = frozenset({"/", *(f"/static/{name}" for name in FILES)})
"""Where they are; they hold nothing that a key guards."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(self), geolocation=()",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file(INDEX)


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """One of its files; no other of the folder, and none outside."""
    if name not in FILES:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    path = FOLDER / name
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=_HEADERS)
