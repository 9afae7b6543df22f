"""GET /: the web page, and the files that it is made of."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

FOLDER = Path(__file__).parents[1] / "static"
INDEX = "index.html"
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
"""By name, as they were when the service started: the page itself, and what it is made of."""
PATHS = frozenset({"/", *(f"/static/{name}" for name in FILES if name != INDEX)})
"""Where they are; they hold nothing that a key guards."""

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
    if f"/static/{name}" not in PATHS:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    return Response(FILES[name], media_type=_TYPES[Path(name).suffix], headers=_HEADERS)
