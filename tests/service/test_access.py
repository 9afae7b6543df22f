"""Tests of API keys, cross-origin requests, host headers and client-given request ids."""

import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from service.http.access import is_loopback
from tests.warm import running_service
from tests.watching import wait_until
from tools.serving import RunningService

KEYS = ("first-key", "second key with spaces")
ORIGIN = "https://example.org"
ORIGINS = (ORIGIN, "http://localhost:*", "https://[::1]:*")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("guarded")
    more = {"spool": folder / "spool"}
    environment = {"MINDIE_MM_API_KEY": ",".join(KEYS), "MINDIE_MM_CORS_ORIGIN": ",".join(ORIGINS)}
    with running_service(settings | more, folder / "log", environment=environment) as running:
        yield running
        assert running.stop() == 0
    assert not any(key in (folder / "log").read_text() for key in KEYS)


@pytest.fixture(scope="module")
def bare(guarded: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=guarded.url, timeout=300) as client:
        yield client


def test_each_api_key_is_accepted(guarded: RunningService) -> None:
    for key in KEYS:
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.list().data[0].id == "tiny"


def test_media_by_uuid_belong_to_their_key(bare: httpx2.Client, red_square: str) -> None:
    def status(key: str, url: str | None) -> int:
        part = {"type": "image_url", "image_url": {"url": url}, "uuid": "a picture"}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        return bare.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status(KEYS[0], url) for url in (red_square, None)] == [200, 200]
    assert [status(key, None) for key in (KEYS[1], "third-key", "-")] == [400, 401, 401]


def test_an_unknown_api_key_is_refused(guarded: RunningService) -> None:
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="third-key", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.type == "AuthenticationError"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "first-key",
        "Basic first-key",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer \xff",
    ],
)
def test_a_missing_or_malformed_key_is_401_on_every_path(bare: httpx2.Client, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in ("/v1/chat/completions", "/infer", "/generate", "/tokenize"):
        answer = bare.post(path, json={"inputs": "x"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/shm", "/openapi.json", "/v1/../v1/models", "//v1/models", "/nothing"):
        assert bare.get(path, headers=headers).status_code == 401


def test_health_and_metrics_need_no_key(bare: httpx2.Client) -> None:
    assert [bare.get(path).status_code for path in ("/health", "/health/live", "/metrics")] == [200] * 3
    assert [bare.get(path).status_code for path in ("/ping", "/v2/health/ready", "/v2/health/live")] == [200] * 3


def test_the_openapi_schema_names_the_paths_that_need_a_key(bare: httpx2.Client, http: Any) -> None:
    schema = bare.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    assert schema["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        keyed = bare.request(next(iter(operations)).upper(), path.replace("{name}", "tiny"), json={}).status_code == 401
        assert all(("security" in operation) == keyed for operation in operations.values())
    unguarded = http.get("/openapi.json").json()
    assert "securitySchemes" not in unguarded["components"]
    assert not any("security" in operation for path in unguarded["paths"].values() for operation in path.values())


def test_an_allowed_origin_gets_cors_headers(bare: httpx2.Client) -> None:
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = bare.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    answer = bare.get("/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer first-key"})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}


@pytest.mark.parametrize(
    "origin", [ORIGIN, "http://localhost", "http://localhost:3000", "https://[::1]:8443", "https://[::1]"]
)
def test_an_origin_with_any_port_is_allowed_from_a_private_network(bare: httpx2.Client, origin: str) -> None:
    answer = bare.options("/v1/chat/completions", headers=PREFLIGHT | {"Origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    "origin",
    ["https://localhost:3000", "http://localhost:1.evil.example", "http://localhostx", "https://example.org:1"],
)
def test_a_similar_origin_is_not_allowed(bare: httpx2.Client, origin: str) -> None:
    answer = bare.options("/v1/chat/completions", headers=PREFLIGHT | {"Origin": origin})
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_another_origin_gets_no_cors_headers(bare: httpx2.Client) -> None:
    answer = bare.get("/health", headers={"Origin": "https://example.com"})
    assert "access-control-allow-origin" not in answer.headers


def test_no_origin_gets_cors_headers_without_the_setting(http: Any) -> None:
    assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": ORIGIN}).headers


@pytest.mark.parametrize("path", ["/", "/shm", "/metrics", "/v1/models", "/health"])
@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1,evil", ""]
)
def test_a_foreign_host_header_is_refused(http: Any, path: str, host: str) -> None:
    """If a web page rebinds its DNS name to the service, the browser treats the page and the service as same-origin."""
    answer = http.get(path, headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "PermissionDeniedError"
    for advice in ("--api-key", "proxy_set_header Host 127.0.0.1;"):
        assert advice in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost:1", "LocalHost", "app.localhost", "127.0.0.1", "[::1]:8000", "10.1.2.3", socket.gethostname()]
)
def test_local_names_and_addresses_are_accepted_as_host(http: Any, host: str) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_a_check_of_hosts_does_not_depend_on_which_header_wins(service: RunningService) -> None:
    """The server of Ray Serve accepts several Host headers, and the check then applies to each of them."""
    url = urlsplit(service.url)
    for hosts in (("127.0.0.1", "evil"), ("evil", "127.0.0.1")):
        with socket.create_connection((url.hostname, url.port), timeout=300) as raw:
            raw.sendall(
                b"GET /v1/models HTTP/1.1\r\n" + b"".join(f"Host: {one}\r\n".encode() for one in hosts) + b"\r\n"
            )
            assert re.match(rb"HTTP/1\.1 40[03] ", raw.recv(4096))


def test_a_key_allows_any_host_header(bare: httpx2.Client) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Host": "behind.a.proxy"}
    assert bare.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_only_loopback_addresses_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_clients_request_id_is_returned_and_logged(service: RunningService, http: Any) -> None:
    answer = http.post("/tokenize", json={"prompt": "a"}, headers={"X-Request-Id": "trace-17:a.b_c"})
    assert answer.headers.get_list("x-request-id") == ["trace-17:a.b_c"]
    wait_until(lambda: "trace-17:a.b_c" in service.log.read_text())


@pytest.mark.parametrize("given", ["x" * 129, "a b", "a\xe9"])
def test_a_request_id_unfit_for_a_log_is_replaced(http: Any, given: str) -> None:
    answer = http.get("/v1/models", headers={"X-Request-Id": given.encode("latin-1")})
    assert answer.headers["x-request-id"] != given
    assert len(answer.headers["x-request-id"]) == 24


def test_two_requests_with_the_same_id_do_not_collide(http: Any) -> None:
    """The client's id is only a label. The engine gets a unique id."""
    body = {"prompt": "x", "max_tokens": 1}
    answers = [http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"}) for _ in range(2)]
    assert len({answer.json()["id"] for answer in answers}) == 2
