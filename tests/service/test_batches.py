"""Tests for /v1/batches: answers, mistakes, cancellation, expiry, other keys, and the order beside other requests."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai.types import Batch

from tests.warm import running_service
from tests.watching import wait_until
from tools.serving import RunningService

KEYS = ("first-key", "second-key")
CHAT = "/v1/chat/completions"
LIMITS = {
    "max_batch_requests": 50,
    "max_concurrent_batch_requests": 2,
    "max_num_seqs": 2,
    "max_files_per_key": 40,
    "reclaim_interval_s": 0.5,
}
LONG = {"max_tokens": 200, "ignore_eos": True}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    } | fields


def line(custom_id: str, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture(scope="module")
def settings_of(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]
) -> Callable[[str], dict[str, object]]:
    """Return the function that makes settings with folders of the given name."""
    folder = tmp_path_factory.mktemp("batches")
    return lambda name: settings | LIMITS | {"spool": folder / f"{name}-spool", "files_path": folder / name}


@pytest.fixture(scope="module")
def runner(settings_of: Callable[[str], dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    given, log = settings_of("files"), tmp_path_factory.mktemp("log") / "log"
    with running_service(given, log, environment={"MINDIE_MM_API_KEY": ",".join(KEYS)}) as running:
        yield running, given["files_path"]


def connected(service: RunningService, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def clients(runner: tuple[RunningService, Path]) -> Iterator[list[openai.OpenAI]]:
    """Yield a client for each key. At the end, no batch may be running, and all files are removed."""
    made = [connected(runner[0], key) for key in KEYS]
    yield made
    for client in made:
        for batch in client.batches.list():
            ended(client, batch)
        for file in client.files.list():
            client.files.delete(file.id)
        client.close()
    folder = runner[1]
    assert not list(folder.glob("open/*"))
    left = {path.name for path in folder.rglob("*") if not path.is_dir()}
    assert left <= {"batch.json", "lock"}


def begun(client: openai.OpenAI, lines: list[dict[str, Any]] | bytes, url: Any = CHAT, window: Any = "24h") -> Batch:
    content = lines if isinstance(lines, bytes) else b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window)


def until(client: openai.OpenAI, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 120
    while not condition(batch := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    return until(client, batch, lambda now: now.status in ("completed", "failed", "expired", "cancelled"))


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by their custom ids, each of which must be there once."""
    if file_id is None:
        return {}
    lines = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in lines}) == len({one["id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one for one in lines}


def without_ids(value: Any) -> Any:
    """Return an answer without what differs between equal requests: ids, times and what the cache held."""
    if isinstance(value, dict):
        own = (
            "id",
            "created",
            "created_at",
            "completed_at",
            "prompt_tokens_details",
            "input_tokens_details",
            "call_id",
        )
        return {name: without_ids(one) for name, one in value.items() if name not in own}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def test_a_batch_has_the_answers_of_the_endpoint(clients: list[openai.OpenAI]) -> None:
    """A line that is refused has the error of the endpoint, in the file of errors. Empty lines do not count."""
    client = clients[0]
    bodies = {
        "a": chat("Hello!"),
        "b": chat("And now?", logprobs=True, top_logprobs=1, seed=3, temperature=1),
        "c": chat("x", temperature=-1),
        "d": chat("x", model="other"),
        "e": chat("x", priority=1),
    }
    written = b"\n \r\n".join(json.dumps(line(name, body)).encode() for name, body in bodies.items())
    file = client.files.create(file=("in.jsonl", written), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "mine"}
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"of": "mine"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    client.files.delete(file.id)
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert dict(batch.request_counts) == {"total": 5, "completed": 2, "failed": 3}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times, key=lambda one: one or 0)
    good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert (set(good), set(bad)) == ({"a", "b"}, {"c", "d", "e"})
    used = 0
    for name, found in (good | bad).items():
        online = client._client.post("/chat/completions", json=bodies[name], headers=client.auth_headers)
        assert found["response"]["status_code"] == online.status_code
        assert without_ids(found["response"]["body"]) == without_ids(online.json())
        assert found["response"]["request_id"]
        assert found["error"] is None
        used += online.json().get("usage", {}).get("total_tokens", 0)
    assert batch.usage is not None
    assert batch.usage.total_tokens == used
    output = client.files.retrieve(str(batch.output_file_id))
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 30 * 24 * 3600)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Hello!", "max_tokens": 4}),
        ("/v1/embeddings", {"input": "Hello!", "encoding_format": "base64"}),
        ("/v1/responses", {"input": "Hello!", "max_output_tokens": 4, "temperature": 0}),
    ],
)
def test_other_endpoints_are_answered(clients: list[openai.OpenAI], url: str, body: dict[str, Any]) -> None:
    batch = ended(clients[0], begun(clients[0], [line("a", body, url)], url))
    (found,) = lines_of(clients[0], batch.output_file_id).values()
    online = clients[0]._client.post(url.removeprefix("/v1"), json=body, headers=clients[0].auth_headers)
    assert without_ids(found["response"]["body"]) == without_ids(online.json())
    assert batch.usage is not None
    assert batch.usage.total_tokens


@pytest.mark.parametrize(
    ("content", "code", "where"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{", "invalid_json_line", 1),
        (b"\xff\xfe", "invalid_json_line", 1),
        (b'{"custom_id": "a", "body": {"a": ' + b"[" * 100_000, "invalid_json_line", 1),
        (b"[]", "invalid_request", 1),
        (b'{"custom_id": 1}', "invalid_request", 1),
        ([line("a", {}) | {"body": []}], "invalid_request", 1),
        ([line("", {})], "invalid_custom_id", 1),
        ([line("a", {}), line("b", {}), line("a", {})], "duplicate_custom_id", 3),
        ([line("a", {}) | {"method": "GET"}], "invalid_method", 1),
        ([line("a", {}, "/v1/embeddings")], "mismatched_endpoint", 1),
        ([line("a", {"stream": True})], "invalid_request", 1),
        ([line(f"{i}", {}) for i in range(51)], "too_many_requests", 51),
        ([line("a", {"prompt": "x" * 2**23})], "line_too_long", 1),
    ],
)
def test_an_invalid_input_fails_the_batch(
    clients: list[openai.OpenAI], content: Any, code: str, where: int | None
) -> None:
    batch = ended(clients[0], begun(clients[0], content))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at
    assert batch.errors is not None
    assert (mistake := (batch.errors.data or [])[0]).code == code
    assert mistake.line == where


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        *(
            ({"completion_window": window}, "completion_window")
            for window in ("", "24", "0h", "31d", "1h\n", "99999999s")
        ),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {f"{i}": 1 for i in range(10_000)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"input_file_id": "../batches"}, "input_file_id"),
        ({"input_file_id": "file-" + "0" * 24}, "input_file_id"),
    ],
)
def test_invalid_fields_are_refused(clients: list[openai.OpenAI], change: dict[str, Any], param: str) -> None:
    file = clients[0].files.create(file=("in.jsonl", b"{}"), purpose="batch")
    given: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        clients[0].batches.create(**given)
    assert caught.value.param == param


@pytest.mark.parametrize("change", [{"metadata": {"a": "\ud800"}}, {"input_file_id": "\ud800"}])
def test_a_lone_surrogate_is_refused(clients: list[openai.OpenAI], change: dict[str, Any]) -> None:
    given = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h"} | change
    headers = {**clients[0].auth_headers, "Content-Type": "application/json"}
    answer = clients[0]._client.post("/batches", content=json.dumps(given), headers=headers)
    assert answer.status_code == 400
    assert re.search("surrogate|unicode", answer.json()["error"]["message"])


def test_the_input_must_be_a_batch_of_the_same_key(clients: list[openai.OpenAI]) -> None:
    other = clients[0].files.create(file=("in.jsonl", b"{}"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose user_data"):
        clients[0].batches.create(input_file_id=other.id, endpoint=CHAT, completion_window="24h")
    own = clients[0].files.create(file=("in.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        clients[1].batches.create(input_file_id=own.id, endpoint=CHAT, completion_window="24h")


def test_a_batch_belongs_to_its_key(clients: list[openai.OpenAI]) -> None:
    first, second = clients
    batch = ended(first, begun(first, [line("a", chat("x"))]))
    assert batch.id not in [one.id for one in second.batches.list()]
    for call in (second.batches.retrieve, second.batches.cancel):
        for name in (batch.id, "batch_" + "0" * 24, "..%2f..", f"{batch.id}%00"):
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                call(name)
    with pytest.raises(openai.NotFoundError):
        second.files.content(str(batch.output_file_id))


def test_lists_have_pages(clients: list[openai.OpenAI]) -> None:
    made = [begun(clients[1], b"").id for _ in range(3)]
    assert [batch.id for batch in clients[1].batches.list(limit=2)][:3] == made[::-1]
    page = clients[1].batches.list(after=made[2], limit=1)
    assert ([batch.id for batch in page.data], page.has_more) == ([made[1]], True)


def test_a_cancelled_batch_has_a_line_for_each_request(clients: list[openai.OpenAI]) -> None:
    client = clients[0]
    batch = begun(client, [line(f"{i}", chat("x", **LONG)) for i in range(40)])
    waiting = begun(client, [line("a", chat("x"))])
    until(client, batch, lambda now: bool(now.request_counts and now.request_counts.completed))
    assert client.batches.cancel(waiting.id).status in ("cancelling", "cancelled")
    assert ended(client, waiting).status == "cancelled"
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at
    assert batch.cancelled_at
    good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert good.keys() | bad.keys() == {f"{i}" for i in range(40)}
    assert not good.keys() & bad.keys()
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    assert batch.request_counts is not None
    assert dict(batch.request_counts) == {"total": 40, "completed": len(good), "failed": len(bad)}
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.batches.cancel(batch.id)


def test_an_expired_batch_has_a_line_for_each_request(clients: list[openai.OpenAI]) -> None:
    client = clients[0]
    batch = ended(client, begun(client, [line(f"{i}", chat("x", **LONG)) for i in range(50)], window="2s"))
    assert batch.status == "expired"
    assert batch.expired_at
    good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert good.keys() | bad.keys() == {f"{i}" for i in range(50)}
    assert {one["error"]["code"] for one in bad.values()} == {"batch_expired"}
    assert all(one["response"] is None for one in bad.values())


def test_a_request_is_answered_before_the_rest_of_a_batch(clients: list[openai.OpenAI]) -> None:
    """The engine runs two requests at a time, and the batch has as many in progress."""
    client, other = clients
    batch = begun(client, [line(f"{i}", chat("x", max_tokens=400, ignore_eos=True)) for i in range(50)])
    until(client, batch, lambda now: bool(now.request_counts and now.request_counts.completed))
    for _ in range(3):
        other.chat.completions.create(**chat("Hello!", max_tokens=2))
    after = client.batches.retrieve(batch.id)
    assert after.status == "in_progress"
    assert client.batches.cancel(batch.id).status == "cancelling"


def test_a_batch_needs_room_for_its_output(clients: list[openai.OpenAI]) -> None:
    client = clients[1]
    made = [client.files.create(file=("x", b"{}"), purpose="batch").id for _ in range(39)]
    with pytest.raises(openai.BadRequestError, match="--max-files-per-key"):
        client.batches.create(input_file_id=made[0], endpoint=CHAT, completion_window="24h")


@contextmanager
def uploading(service: RunningService, folder: Path) -> Iterator[None]:
    """Begin an upload, and wait until a part of it is in the folder."""
    with socket.create_connection(("127.0.0.1", urlsplit(service.url).port or 0)) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n"
        head += "Content-Type: multipart/form-data; boundary=B\r\n\r\n"
        part = '--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        connection.sendall(f"{head}{part}".encode() + bytes(2**20))
        wait_until(lambda: any(path.stat().st_size > 2**18 for path in folder.rglob(".upload-*")))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_ends_continues_its_batches_when_it_starts_again(
    settings_of: Callable[[str], dict[str, object]], tmp_path: Path, number: signal.Signals
) -> None:
    """No answered line is repeated, and none is lost. A line that was not written completely is written again."""
    bodies = {f"{i}": chat(f"Number {i}", max_tokens=60, ignore_eos=True) for i in range(50)}
    given = settings_of(number.name)
    with running_service(given, tmp_path / "log") as service, connected(service) as client:
        batch = begun(client, [line(name, body) for name, body in bodies.items()])
        until(client, batch, lambda now: bool(now.request_counts and now.request_counts.completed))
        with uploading(service, Path(str(given["files_path"])) / "uploads"):
            service.process.send_signal(number)
            assert service.process.wait() == (0 if number == signal.SIGTERM else -number)
    (output,) = Path(str(given["files_path"])).rglob("output.jsonl")
    early = [one for one in output.read_text().splitlines(keepends=True) if one.endswith("\n")]
    assert 0 < len(early) < 50
    with output.open("a") as file:
        file.write(early[0][:30])
    with running_service(given, tmp_path / "log2") as service, connected(service) as client:
        assert not list((Path(str(given["files_path"])) / "uploads").iterdir())
        batch = ended(client, batch)
        assert batch.status == "completed"
        late = client.files.content(str(batch.output_file_id)).text
        assert late.startswith("".join(early))
        found = lines_of(client, batch.output_file_id)
        assert found.keys() == bodies.keys()
        for name in ("0", "20", "49"):
            online = client._client.post("/chat/completions", json=bodies[name], headers=client.auth_headers)
            assert without_ids(found[name]["response"]["body"]) == without_ids(online.json())
