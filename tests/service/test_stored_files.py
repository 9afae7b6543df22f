"""Tests for /v1/files: what is stored, for whom, and within which limits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.warm import running_service
from tools.serving import RunningService

KEYS = ("first-key", "second-key")
LIMITS = {"max_file_bytes": 2**20, "max_files_per_key": 5, "max_file_bytes_per_key": 3 * 2**20}


@pytest.fixture(scope="module")
def keeper(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]
) -> Iterator[tuple[RunningService, Path]]:
    """Yield a service that stores files, and the folder in which it does so."""
    folder = tmp_path_factory.mktemp("keeper")
    given = settings | LIMITS | {"spool": folder / "spool", "files_path": folder / "files"}
    with running_service(given, folder / "log", environment={"MINDIE_MM_API_KEY": ",".join(KEYS)}) as running:
        yield running, folder / "files"


@pytest.fixture
def clients(keeper: tuple[RunningService, Path]) -> Iterator[list[openai.OpenAI]]:
    """Yield a client for each key. At the end, no file may be left in progress, and all files are removed."""
    made = [openai.OpenAI(base_url=f"{keeper[0].url}/v1", api_key=key, max_retries=0, timeout=60) for key in KEYS]
    yield made
    for client in made:
        for file in client.files.list():
            client.files.delete(file.id)
        client.close()
    assert not [path for path in keeper[1].rglob("*") if not path.is_dir()]


@pytest.fixture
def bare(keeper: tuple[RunningService, Path]) -> Iterator[httpx2.Client]:
    with httpx2.Client(
        base_url=keeper[0].url, timeout=60, headers={"Authorization": f"Bearer {KEYS[0]}"}
    ) as http_client:
        yield http_client


def test_a_file_is_stored_described_returned_and_deleted(clients: list[openai.OpenAI]) -> None:
    files, content = clients[0].files, os.urandom(100_000)
    file = files.create(file=("a b\u00fc.bin", content), purpose="user_data")
    assert re.fullmatch("file-[0-9a-f]{24}", file.id)
    assert (file.bytes, file.filename, file.purpose) == (len(content), "a b\u00fc.bin", "user_data")
    assert (file.object, file.status, file.expires_at) == ("file", "processed", None)
    assert files.retrieve(file.id) == file
    assert files.content(file.id).content == content
    assert files.delete(file.id).deleted
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_of_batches_expire_after_thirty_days_and_others_when_asked(clients: list[openai.OpenAI]) -> None:
    files = clients[0].files
    batch = files.create(file=("x.jsonl", b"{}"), purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * 24 * 3600
    hour = files.create(file=("x", b""), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (hour.bytes, hour.expires_at) == (0, hour.created_at + 3600)


def test_an_expired_file_is_gone(clients: list[openai.OpenAI], keeper: tuple[RunningService, Path]) -> None:
    file = clients[0].files.create(file=("x.jsonl", b"{}"), purpose="batch")
    (description,) = keeper[1].rglob(f"{file.id}.json")
    description.write_bytes(description.read_bytes().replace(str(file.expires_at).encode(), b"1"))
    with pytest.raises(openai.NotFoundError, match="has expired"):
        clients[0].files.content(file.id)
    assert not list(keeper[1].rglob(f"{file.id}*"))


def test_lists_have_pages(clients: list[openai.OpenAI]) -> None:
    files = clients[0].files
    made = [files.create(file=("x", b"x"), purpose=("batch", "user_data")[index % 2]).id for index in range(4)]
    assert [file.id for file in files.list()] == made[::-1]
    assert [file.id for file in files.list(order="asc", limit=3)] == made  # the client asks for further pages
    assert [file.id for file in files.list(purpose="batch")] == [made[2], made[0]]
    page = files.list(after=made[2], limit=1)
    assert ([file.id for file in page.data], page.has_more) == ([made[1]], True)
    with pytest.raises(openai.BadRequestError, match="not in the list"):
        files.list(after="file-0")


def test_a_file_belongs_to_its_key(clients: list[openai.OpenAI]) -> None:
    first, second = clients
    file = first.files.create(file=("x", b"secret"), purpose="user_data")
    assert second.files.list().data == []
    for call in (second.files.retrieve, second.files.content, second.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.BadRequestError):
        second.files.list(after=file.id)
    assert first.files.content(file.id).content == b"secret"


@pytest.mark.parametrize(
    "name",
    ["../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "file-" + "0" * 24, "file-" + "0" * 24 + "%00", "%2e%2e", "."],
)
def test_only_ids_of_files_are_found(bare: httpx2.Client, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        answer = bare.get(path, follow_redirects=False)
        assert answer.status_code in (404, 405) or "data" in answer.json()
    assert bare.delete(f"/v1/files/{name}").status_code in (404, 405)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "x\x00y", "a" * 999])
def test_a_file_name_is_only_a_label(
    clients: list[openai.OpenAI], keeper: tuple[RunningService, Path], name: str
) -> None:
    file = clients[0].files.create(file=(name, b"x"), purpose="user_data")
    assert "/" not in file.filename
    assert len(file.filename) <= 255
    assert {path.name for path in keeper[1].rglob("*") if not path.is_dir()} == {file.id, f"{file.id}.json"}


def test_content_is_never_a_page_of_the_service(clients: list[openai.OpenAI], bare: httpx2.Client) -> None:
    file = clients[0].files.create(file=('x".html\r\nA: b', b"<script>", "text/html"), purpose="user_data")
    headers = bare.get(f"/v1/files/{file.id}/content").headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"].startswith("attachment")
    assert headers["x-content-type-options"] == "nosniff"
    assert "a" not in headers


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ["batch", "batch"]}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
        *(
            (
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds},
                "expires_after",
            )
            for seconds in ("3599", "2592001", "-1", "1e4", "\u0663\u0663\u0663\u0663", "9" * 5000)
        ),
    ],
)
@pytest.mark.usefixtures("clients")
def test_invalid_fields_are_refused(bare: httpx2.Client, data: dict[str, Any], param: str) -> None:
    answer = bare.post("/v1/files", files={"file": b"x"}, data=data)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_file_has_a_maximum_size(clients: list[openai.OpenAI], bare: httpx2.Client) -> None:
    files = clients[0].files
    assert files.create(file=("x", bytes(LIMITS["max_file_bytes"])), purpose="user_data").bytes == 2**20
    answer = bare.post("/v1/files", files={"file": bytes(2**20 + 1)}, data={"purpose": "user_data"})
    assert answer.status_code == 413
    assert "--max-file-bytes" in answer.json()["error"]["message"]


def test_a_key_has_a_quota_of_files_and_bytes(clients: list[openai.OpenAI]) -> None:
    files, mib = clients[0].files, bytes(2**20)
    made = [files.create(file=("x", mib), purpose="user_data").id for _ in range(2)]
    files.create(file=("x", mib[1:]), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="--max-file-bytes-per-key"):
        files.create(file=("x", b"xx"), purpose="user_data")
    files.delete(made[0])
    for _ in range(3):
        files.create(file=("x", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match=r"has 5 files, .*; the limit is 5 \(--max-files-per-key\)"):
        files.create(file=("x", b"x"), purpose="user_data")
    assert clients[1].files.create(file=("x", mib), purpose="user_data").bytes == 2**20


def test_paths_without_v1_are_accepted(bare: httpx2.Client, clients: list[openai.OpenAI]) -> None:
    file = bare.post("/files", files={"file": b"x"}, data={"purpose": "user_data"}).json()
    assert bare.get(f"/files/{file['id']}/content").content == b"x"
    assert clients[0].files.retrieve(file["id"]).bytes == 1


def said(client: openai.OpenAI, part: dict[str, Any]) -> str:
    content = [{"type": "input_text", "text": "What does the file say?"}, {"type": "input_file", **part}]
    given: Any = [{"role": "user", "content": content}]
    return client.responses.create(model="tiny", input=given, max_output_tokens=20, temperature=0).output_text


def test_a_response_reads_files_of_its_key(clients: list[openai.OpenAI]) -> None:
    first, second = clients
    file = first.files.create(file=("note.txt", b"A red circle."), purpose="user_data")
    sent = {"filename": "note.txt", "file_data": "data:text/plain;base64,QSByZWQgY2lyY2xlLg=="}
    assert said(first, {"file_id": file.id}) == said(first, sent)
    with pytest.raises(openai.NotFoundError, match=re.escape("input[0]: the file")):
        said(second, {"file_id": file.id})


def test_a_file_counts_as_part_of_the_body(clients: list[openai.OpenAI]) -> None:
    file = clients[0].files.create(file=("x", bytes(2**20)), purpose="user_data")
    part: Any = {"type": "input_file", "file_id": file.id}
    with pytest.raises(openai.APIStatusError, match="request body has at least") as caught:
        clients[0].responses.create(model="tiny", input=[{"role": "user", "content": [part] * 9}])
    assert caught.value.status_code == 413


def test_a_chat_reads_files_of_its_key(clients: list[openai.OpenAI]) -> None:
    first, second = clients
    file = first.files.create(file=("note.txt", b"A red circle."), purpose="user_data")
    sent = {"filename": "note.txt", "file_data": "data:text/plain;base64,QSByZWQgY2lyY2xlLg=="}

    def chat(client: openai.OpenAI, part: Any) -> str | None:
        content: Any = [{"type": "text", "text": "What does the file say?"}, {"type": "file", "file": part}]
        given: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model="tiny", messages=given, max_tokens=20, temperature=0)
        return answer.choices[0].message.content

    assert chat(first, {"file_id": file.id}) == chat(first, sent)
    assert chat(first, {"file_id": file.id, "filename": "b.txt"}) == chat(first, sent | {"filename": "b.txt"})
    with pytest.raises(openai.NotFoundError, match=re.escape("messages[0].content[1]: the file")):
        chat(second, {"file_id": file.id})
