"""GET /, /docs and /static: the web page, the description of the API, and their files."""

from __future__ import annotations

from importlib import resources
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
DOCS = "docs.html"
SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")
"""Files of Swagger UI in the package fastapi-swagger."""
FILES = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*") if path.suffix in _TYPES}
FILES |= {name: (resources.files("fastapi_swagger") / "resources" / name).read_bytes() for name in SWAGGER}
"""Path below `FOLDER` and contents of each file of the pages. The files are read when the service starts."""
PATHS = frozenset({"/", "/docs", *(f"/static/{name}" for name in FILES if name not in (INDEX, DOCS))})
"""URL paths of the files. The files contain nothing secret."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS_POLICY = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")  # Swagger UI styles elements
_HEADERS = {
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


@router.get("/docs")
async def docs() -> Response:
    """Return the description of the API, shown by Swagger UI."""
    return _file(DOCS, _DOCS_POLICY)


@router.get("/static/{name:path}")
async def file(name: str) -> Response:
    """Return one of the page's files, or 404 for any other name."""
    if f"/static/{name}" not in PATHS:
        raise HTTPException(404)
    return _file(name)


def _file(name: str, policy: str = _POLICY) -> Response:
    headers = {"Content-Security-Policy": policy, **_HEADERS}
    return Response(FILES[name], media_type=_TYPES[Path(name).suffix], headers=headers)
