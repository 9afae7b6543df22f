"""Tests for uploads: what is received, what is refused, and that no file is left behind."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import httpx2
import pytest
import uvicorn
from fastapi import Depends, FastAPI, Request

from mindie_mm.settings.config import ServiceConfig
from service import middleware
from service.http import errors
from service.http.clients import Clients
from service.http.connection import Connection
from service.middleware import Middleware
from service.request.admission import Admission
from service.request.upload import MAX_FIELDS, UPLOADING, Upload, receive_upload
from service.telemetry.metrics import Metrics

MAX_BYTES = 2**20
BOUND = "multipart/form-data; boundary=BOUND"


@pytest.fixture
async def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Yield the URL of a server that describes the upload that it receives. After a test, its folder must be empty."""
    monkeypatch.setattr(middleware, "BODY_IDLE_S", 0.3)
    app = FastAPI()

    async def received(request: Request) -> AsyncIterator[Upload]:
        async with receive_upload(request, tmp_path, MAX_BYTES, setting="--most") as upload:
            yield upload

    @app.post("/")
    async def answer(upload: Annotated[Upload, Depends(received)]) -> dict[str, Any]:
        content = upload.path.read_bytes()
        assert upload.num_bytes == len(content)
        return {
            "name": upload.filename,
            "type": upload.content_type,
            "content": content.decode("latin-1") if len(content) < 99 else len(content),
            "fields": upload.fields,
            "kept": names(tmp_path),
        }

    @app.post("/one")
    async def one(upload: Annotated[Upload, Depends(received)]) -> str | None:
        return upload.field("a")

    config = ServiceConfig(max_request_bytes=1000, max_held_bytes=1000, max_request_values=10)
    added: dict[str, Any] = {"clients": Clients(config), "admission": Admission(9, 60), "metrics": Metrics("x")}
    app.add_middleware(Middleware, config=config, **added)
    errors.install(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None))
        serving = asyncio.create_task(running.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = True
        await serving
    assert not names(tmp_path)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def post(url: str, path: str = "/", **given: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(url + path, **given)


async def raw(url: str, body: bytes, content_type: str = BOUND) -> httpx2.Response:
    return await post(url, content=body, headers={"Content-Type": content_type})


async def begun(url: str, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection that has sent the beginning of a form."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: {BOUND}\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + b"%x\r\n" % len(sent) + sent + b"\r\n")
    return reader, writer


def part(disposition: str, data: bytes = b"x") -> bytes:
    return f"--BOUND\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + data + b"\r\n"


FILE = part('form-data; name="file"')


async def test_a_form_is_received(url: str) -> None:
    """The limits on bodies in memory and on JSON values do not apply to it."""
    content = b"{,}" * 100_000
    files = {"file": ("a b.jsonl", content, "Application/JSONL; x=y")}
    answer = (await post(url, files=files, data={"purpose": "batch", "list[]": ["1", "ü"]})).json()
    (kept,) = answer.pop("kept")
    assert kept.startswith(UPLOADING)
    fields = {"purpose": ["batch"], "list[]": ["1", "ü"]}
    assert answer == {"name": "a b.jsonl", "type": "application/jsonl", "content": len(content), "fields": fields}


async def test_content_may_look_like_a_boundary(url: str) -> None:
    content = b"\r\n--BOUN\r\n--BOUNE--\r\n"
    answer = await raw(url, part('form-data; name="file"; filename="x"', content) + b"--BOUND--\r\n")
    assert answer.json()["content"] == content.decode()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("../../etc/passwd", "passwd"),
        ("/etc/", ""),
        ("C:\\\\temp\\\\x.txt", "x.txt"),
        ("..", ""),
        ("a\x01\x7fb", "ab"),
        ("n" * 999, "n" * 255),
    ],
)
async def test_file_names_have_no_folders_and_no_control_characters(url: str, given: str, name: str) -> None:
    answer = await raw(url, part(f'form-data; name="file"; filename="{given}"') + b"--BOUND--\r\n")
    assert answer.json()["name"] == name


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (FILE, "multipart/form-data", "has no boundary"),
        (FILE, "multipart/form-data; boundary=" + "x" * 999, "form is not valid"),
        (b"--OTHER\r\n", BOUND, "form is not valid"),
        (b"", BOUND, "form is not complete"),
        (FILE, BOUND, "form is not complete"),
        (part('form-data; name="other"; filename="x"') + b"--BOUND--\r\n", BOUND, "form has no field file"),
        (FILE * 2 + b"--BOUND--\r\n", BOUND, "several fields named file"),
        (part("form-data") + b"--BOUND--\r\n", BOUND, "form-data with a name"),
        (part("form-data; name=x\r\nA:" + "y" * 9999), BOUND, "form is not valid"),
        (part("form-data; name=x" + "\r\nA: y" * 99), BOUND, "form is not valid"),
        (part("form-data; name=x", b"\xff") + FILE + b"--BOUND--\r\n", BOUND, "is not UTF-8"),
    ],
)
async def test_other_bodies_are_400(url: str, body: bytes, content_type: str, message: str) -> None:
    answer = await raw(url, body, content_type)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_a_body_of_another_type_is_415(url: str) -> None:
    answer = await raw(url, b"{}", "application/json")
    assert (answer.status_code, "multipart/form-data" in answer.text) == (415, True)


async def test_a_field_with_several_values_is_400_if_one_is_expected(url: str) -> None:
    files = {"file": b"x"}
    assert (await post(url, "/one", files=files, data={"a": "1"})).json() == "1"
    assert (await post(url, "/one", files=files)).json() is None
    answer = await post(url, "/one", files=files, data={"a": ["1", "2"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "a")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"files": {"file": bytes(MAX_BYTES + 1)}}, "the limit is 1048576 (--most)"),
        ({"files": {"file": bytes(2 * MAX_BYTES)}}, "request body has at least"),
        ({"files": {"file": b"x"}, "data": {"a": "x" * 2**19}}, "besides the file"),
        ({"files": {"file": b"x"}, "data": {str(i): "x" for i in range(MAX_FIELDS + 1)}}, "more than 64 fields"),
    ],
)
async def test_forms_above_a_limit_are_413(url: str, form: dict[str, Any], message: str) -> None:
    answer = await post(url, **form)
    assert answer.status_code == 413
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(part('form-data; name="file"', bytes(MAX_BYTES + 1)), 413, id="too long"),
        pytest.param(FILE, 408, id="pausing"),
    ],
)
async def test_a_form_without_an_end_is_refused(url: str, sent: bytes, status: int) -> None:
    """A socket, because an HTTP client reads no answer before it has sent the body."""
    reader, writer = await begun(url, sent)
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()


async def test_a_client_that_disconnects_leaves_nothing(url: str, tmp_path: Path) -> None:
    _, writer = await begun(url, FILE[:-2] + bytes(2**19))
    async with asyncio.timeout(60):
        while not num_bytes(tmp_path):  # noqa: ASYNC110 - the file system has no event for it
            await asyncio.sleep(0.01)
        writer.close()
        while names(tmp_path):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
