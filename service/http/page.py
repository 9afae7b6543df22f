"""GET / and /static: the web page and its files."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".mp4": "video/mp4",
    ".ogg": "audio/ogg",
}

FOLDER = Path(__file__).parents[1] / "static"
INDEX = "index.html"
FILES = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*") if path.suffix in _TYPES}
"""Path below `FOLDER` and contents of each file of the page. The files are read when the service starts."""
PATHS = frozenset({"/", *(f"/static/{name}" for name in FILES if name != INDEX)})
"""URL paths of the files. The files contain nothing secret."""

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
    """Return the page."""
    return _file(INDEX)


@router.get("/static/{name:path}")
async def file(name: str) -> Response:
    """Return one of the page's files, or 404 for any other name."""
    if f"/static/{name}" not in PATHS:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    return Response(FILES[name], media_type=_TYPES[Path(name).suffix], headers=_HEADERS)
