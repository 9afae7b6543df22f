"""Tests for the ingress with a stand-in for Ray's handle of the workers. They need no cluster."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from service.http.errors import ErrorBody
from service.ray import plan
from service.ray.content import Route
from service.ray.plan import LOST, plan_of
from service.ray.worker_replica import WorkerReplica

pytest.importorskip("ray.serve", exc_type=ImportError)

CHAT = "/v1/chat/completions"
OK = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
FULL = {"type": "http.response.start", "status": 429, "headers": [(b"retry-after", b"1")]}
BODY = {"type": "http.response.body", "body": b"{}", "more_body": False}
PART = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}


class Handle:
    """Answers each call with the next script: ASGI messages, and errors to raise."""

    def __init__(self, *scripts: Sequence[Any], replicas: int = 3) -> None:
        self.scripts = list(scripts)
        self.bodies: list[bytes] = []
        self.replicas = [str(number) for number in range(replicas)]
        self.num_cancelled = 0

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, _: Any, body: bytes, *, num_tokens: int, route: Route) -> Handle:
        assert num_tokens == route.num_tokens
        route.names = self.replicas
        route.tried.append(self.replicas[len(self.bodies) % len(self.replicas)])
        self.bodies.append(body)
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for one in self.scripts.pop(0):
            if isinstance(one, Exception):
                raise one
            yield pickle.dumps([one])

    def cancel(self) -> None:
        self.num_cancelled += 1


class Workers(Handle):
    """Passes each call to the next of some worker replicas, which answer with the app `answered`."""

    def __init__(self, *versions: str) -> None:
        super().__init__(replicas=len(versions))
        self.versions = [*versions]

    def remote(self, scope: Any, body: bytes, *, num_tokens: int, route: Route) -> Any:
        super().remote(scope, body, num_tokens=num_tokens, route=route)
        return _Answers(self.versions.pop(0), scope, body)


class _Answers:
    """The messages of a worker replica of a version, which starts no processes."""

    def __init__(self, version: str, scope: Any, body: bytes) -> None:
        self._version, self._call = version, (scope, body, 1)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        replica = WorkerReplica.__new__(WorkerReplica)
        replica._app, replica._tasks, replica._queued_tokens = answered, set(), 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "versions", lambda: plan._Versions(self._version, f"wire {self._version}"))
            batches = [batch async for batch in replica.answer(*self._call)]
        for batch in batches:  # outside of the patch, because the caller may abandon this generator
            yield batch

    def cancel(self) -> None:
        pass


async def answered(scope: Any, receive: Any, send: Any) -> None:
    await send(OK)
    await send(BODY)


async def ask(
    handle: Handle,
    *parts: bytes,
    path: str = CHAT,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    **settings: Any,
) -> tuple[int, dict[str, str], str]:
    """Send a request through an ingress, and return the status, headers and body of the answer."""
    from service.ray.ingress import Ingress  # imported late, because it needs Ray Serve

    plain = Ingress.__mro__[1]  # the class without Serve's wrapper, which needs a cluster
    app = plain(plan_of(settings), handle).__serve_build_asgi_app__()
    received = [
        {"type": "http.request", "body": part, "more_body": index < len(parts) - 1} for index, part in enumerate(parts)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": pairs}
    await app(scope, receive, send)
    start, *rest = sent
    decoded = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], decoded, b"".join(message["body"] for message in rest).decode()


def error(answer: tuple[int, dict[str, str], str]) -> tuple[int, str]:
    """Check that the answer is an error in the service's form, and return its status and type."""
    status, _, body = answer
    found = ErrorBody.model_validate_json(body).error
    assert found.code == status
    return status, found.type


def died() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def back_pressure() -> Exception:
    from ray.serve.exceptions import BackPressureError

    return BackPressureError(num_queued_requests=1, max_queued_requests=1)


async def test_an_answer_is_passed_on_with_the_whole_body():
    handle = Handle([OK, BODY])
    assert await ask(handle, b'{"a"', b": 1}") == (200, {"content-type": "application/json"}, "{}")
    assert handle.bodies == [b'{"a": 1}']
    assert handle.num_cancelled == 0


async def test_a_request_without_output_is_tried_on_another_replica():
    handle = Handle([died()], [OK, BODY])
    assert (await ask(handle, b"{}"))[0] == 200
    assert len(handle.bodies) == 2


@pytest.mark.parametrize("first", [[], [[FULL, BODY]]], ids=["deaths", "a refusal and deaths"])
async def test_a_request_that_kills_its_workers_ends_at_most_two(first: list[list[Any]]):
    handle = Handle(*first, [died()], [died()], [OK, BODY], replicas=9)
    answer = await ask(handle, b"{}")
    assert error(answer) == (503, "ServiceUnavailableError")
    assert answer[1]["retry-after"] == "1"
    assert len(handle.bodies) == len(first) + 2


async def test_a_request_that_crashed_the_processes_of_a_worker_reaches_no_other_worker():
    handle = Handle([FULL | {"status": 503, LOST: True}, BODY], [OK, BODY])
    assert (await ask(handle, b"{}"))[0] == 503
    assert len(handle.bodies) == 1


async def test_a_refusal_is_passed_on_only_if_no_other_replica_is_left():
    assert (await ask(Handle([FULL, BODY], [OK, BODY]), b"{}"))[0] == 200
    handle = Handle([FULL, BODY], [FULL, BODY], replicas=2)
    assert (await ask(handle, b"{}"))[0] == 429
    assert len(handle.bodies) == 2


async def test_full_replicas_answer_429_with_retry_after():
    answer = await ask(Handle([back_pressure()]), b"{}")
    assert error(answer) == (429, "RateLimitError")
    assert answer[1]["retry-after"] == "1"


@pytest.mark.parametrize(("path", "last"), [(CHAT, "data: [DONE]\n\n"), ("/generate_stream", "")])
async def test_a_stream_that_has_begun_ends_with_an_error_event(path: str, last: str):
    handle = Handle([EVENTS, PART, died()], [OK, BODY])
    status, _, body = await ask(handle, b"{}", path=path)
    assert status == 200
    first, event, rest = body.split("\n\n", 2)
    assert (first, rest) == ("data: 1", last)
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == 503
    assert len(handle.bodies) == 1, "no request is answered twice"


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/transcriptions", "/v1/files"])
@pytest.mark.parametrize(
    ("setting", "refused"),
    [("max_request_bytes", (413, "RequestTooLargeError")), ("max_held_bytes", (429, "RateLimitError"))],
)
async def test_a_body_above_a_limit_reaches_no_worker(path, setting, refused):
    """The limits apply to uploads, too, because the ingress holds them in memory."""
    handle = Handle()
    headers = {} if path == CHAT else {"Content-Type": "multipart/form-data; boundary=edge"}
    announced = await ask(handle, path=path, headers={"Content-Length": "100"} | headers, **{setting: 10})
    assert error(announced) == refused
    counted = await ask(handle, b"123456", b"123456", b"123456", path=path, headers=headers, **{setting: 10})
    assert error(counted) == refused
    assert not handle.bodies


async def test_a_request_without_the_key_is_refused_before_its_body_is_read():
    handle = Handle([OK, BODY])
    assert error(await ask(handle, api_key=["secret"])) == (401, "AuthenticationError")
    assert (await ask(handle, b"{}", headers={"Authorization": "Bearer secret"}, api_key=["secret"]))[0] == 200


async def test_the_body_of_a_request_that_needs_no_key_is_not_read():
    handle = Handle([OK, BODY])
    assert (await ask(handle, path="/health", method="GET", api_key=["secret"]))[0] == 200
    assert handle.bodies == [b""]


async def test_the_metrics_page_leaves_out_workers_that_answer_with_an_error():
    page = {"type": "http.response.body", "body": b"# HELP one text\none 1\n", "more_body": False}
    refused = OK | {"status": 500}
    status, _, body = await ask(Handle([OK, page], [refused, BODY], [OK, page]), path="/metrics", method="GET")
    assert (status, body) == (200, '# HELP one text\none{replica="0"} 1\none{replica="2"} 1\n')
    assert error(await ask(Handle([refused, BODY]), path="/metrics", method="GET"))[0] == 503


async def test_a_reload_of_one_worker_is_refused():
    """The workers would otherwise answer with different weights."""
    handle = Handle([OK, BODY])
    assert error(await ask(handle, b"", path="/admin/reload"))[0] == 501
    assert not handle.bodies


async def test_the_ingress_adds_no_request_id_because_ray_adds_one():
    start = OK | {"headers": [(b"x-request-id", b"of the worker")]}
    assert (await ask(Handle([start, BODY]), b"{}", headers={"X-Request-Id": "mine"}))[1] == {}


async def test_an_unexpected_error_of_a_worker_is_not_shown():
    from ray.exceptions import RayTaskError

    answer = await ask(Handle([RayTaskError("answer", "a traceback", ValueError("private"))]), b"{}")
    assert error(answer) == (500, "InternalServerError")
    assert "private" not in answer[2]


async def test_an_open_service_can_be_refused():
    from mindie_mm.errors import InputError

    with pytest.raises(InputError, match="without an API key"):
        await ask(Handle(), host="0.0.0.0", allow_open=False)


@pytest.fixture
def old_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    old = plan._Versions("0.1", "wire 0.1")
    monkeypatch.setattr("service.ray.ingress.calling", lambda scope: {**scope, plan._CALLER: msgspec.to_builtins(old)})


@pytest.mark.filterwarnings("ignore:.*__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("old_ingress")
async def test_an_ingress_of_another_version_is_refused_with_both_versions():
    answer = await ask(Workers("0.2", "0.2", "0.2"), b"{}")
    assert error(answer) == (503, "ServiceUnavailableError")
    assert "the ingress has mindie_mm 0.1 with wire format wire 0.1, but the worker on node " in answer[2]
    assert " has mindie_mm 0.2 with wire format wire 0.2; try again when the update" in answer[2]


@pytest.mark.filterwarnings("ignore:.*__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("old_ingress")
async def test_a_request_is_passed_on_to_a_worker_of_the_same_version_during_an_update():
    handle = Workers("0.2", "0.1")
    assert (await ask(handle, b"{}"))[0] == 200
    assert len(handle.bodies) == 2


@pytest.mark.filterwarnings("ignore:.*__del__:pytest.PytestUnraisableExceptionWarning")
async def test_an_ingress_that_does_not_state_its_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("service.ray.ingress.calling", dict)
    answer = await ask(Workers("0.2", "0.2", "0.2"), b"{}")
    assert error(answer) == (503, "ServiceUnavailableError")
    assert "the ingress has an earlier version of mindie_mm, but the worker" in answer[2]
