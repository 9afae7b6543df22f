"""Tests for how the service serves the page's files over HTTP."""

from __future__ import annotations

import http.client
import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from service.http import page
from tests.warm import running_service
from tests.web.conftest import START_TIMEOUT_S, TINY
from tools.serving import RunningService

MOST_BYTES = 400_000


def test_every_file_of_the_folder_is_served() -> None:
    files = {path.relative_to(page.FOLDER).as_posix() for path in page.FOLDER.rglob("*") if path.is_file()}
    own = {name: content for name, content in page.FILES.items() if name not in page.SWAGGER}
    assert {name for name in files if not name.endswith((".LICENSE", ".md"))} == own.keys()
    assert sum(map(len, own.values())) < MOST_BYTES


def test_each_library_has_its_licence_and_is_listed() -> None:
    vendor = page.FOLDER / "vendor"
    listed = (vendor / "README.md").read_text()
    for path in vendor.glob("*.js"):
        version = re.search(r"\d+\.\d+\.\d+", path.read_text()[:300])
        assert version
        assert re.search(rf"`{path.name}` \| \S+ {version[0]} ", listed)
        assert path.with_suffix(".LICENSE").stat().st_size > 1000


def test_each_file_is_served_with_its_type_and_security_headers(service: RunningService) -> None:
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    types |= {"png": "image/png", "mp4": "video/mp4", "ogg": "audio/ogg"}
    with httpx2.Client(base_url=service.url) as client:
        for path in page.PATHS:
            answer = client.get(path)
            assert answer.status_code == 200
            name = {"/": page.INDEX, "/docs": page.DOCS}.get(path, path.removeprefix("/static/"))
            assert answer.content == page.FILES[name]
            assert answer.headers["content-type"].split(";")[0] == types.get(path.rpartition(".")[2], "text/html")
            policy = answer.headers["content-security-policy"]
            for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
                assert rule in policy.split("; ")
            assert ("unsafe" in policy) == (path == "/docs")  # Swagger UI styles elements
            assert answer.headers["x-content-type-options"] == "nosniff"
            if "/vendor/" not in path and "/examples/" not in path and name not in page.SWAGGER:
                assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), path


OTHERS = (
    "/static/",
    "/static/index.html",
    "/static/../page.py",
    "/static/%2e%2e/page.py",
    "/static/..%2fpage.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/vendor/marked.LICENSE",
    "/static/page.css%00",
    "/static/PAGE.CSS",
)


def test_other_paths_are_404(service: RunningService) -> None:
    for path in OTHERS:
        connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=300)  # keeps the path as it is
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 404, path
        assert answer.read().startswith(b'{"error"')
        connection.close()


@pytest.mark.slow  # starts a service
def test_web_page_false_serves_no_page(tmp_path: Path, settings: dict[str, object]) -> None:
    off = settings | {"spool": tmp_path / "spool", "web_page": False}
    with running_service(off, tmp_path / "log", TINY, start_timeout_s=START_TIMEOUT_S) as running:
        for path in ("/", "/static/main.js"):
            assert httpx2.get(running.url + path).status_code == 404
        assert httpx2.get(f"{running.url}/v1/models").status_code == 200
        assert running.stop() == 0
