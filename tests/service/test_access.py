"""Tests for API keys, cross-origin requests, host headers and client-given request ids."""

import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from fastapi import FastAPI

from mindie_mm.settings.config import ServiceConfig
from service.app import add_front
from service.http.access import is_loopback
from service.http.clients import Clients
from service.request.admission import Admission
from service.telemetry.metrics import Metrics
from tests.certificates import write_certificate
from tests.warm import running_service
from tests.watching import wait_until
from tools.serving import RunningService

KEYS = ("first-key", "second key with spaces")
NAMED = """
[alice]
key = "alices-key"
["bob@example.org"]
key = "bobs-key"
requests_per_minute = 2
"""
"""File of API keys with names."""
ORIGIN = "https://example.org"
ORIGINS = (ORIGIN, "http://localhost:*", "https://[::1]:*")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.toml").write_text(NAMED)
    write_certificate(folder / "cert.pem", folder / "key.pem")
    more = {
        "spool": folder / "spool",
        "api_key_file": folder / "keys.toml",
        "ssl_certfile": folder / "cert.pem",
        "ssl_keyfile": folder / "key.pem",
        "root_path": "/mm",
        "uds": folder / "socket",
        "log_level": "debug",
    }
    environment = {
        "MINDIE_MM_API_KEY": ",".join(KEYS),
        "MINDIE_MM_CORS_ORIGIN": ",".join(ORIGINS),
    }
    with running_service(settings | more, folder / "log", environment=environment) as running:
        yield running
        assert running.stop() == 0
    log = (folder / "log").read_text()
    assert not any(key in log for key in (*KEYS, "alices-key", "bobs-key", "carols-key"))


@pytest.fixture(scope="module")
def bare(guarded: RunningService) -> Iterator[httpx2.Client]:
    with trusting(guarded) as client:
        yield client


def trusting(guarded: RunningService) -> httpx2.Client:
    """Return a client that trusts the present certificate of the service."""
    trusted = ssl.create_default_context(cafile=str(guarded.log.with_name("cert.pem")))
    return httpx2.Client(base_url=guarded.url, timeout=300, verify=trusted)


def test_each_api_key_is_accepted(guarded: RunningService) -> None:
    for key in KEYS:
        with openai.OpenAI(
            base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, http_client=trusting(guarded)
        ) as client:
            assert client.models.list().data[0].id == "tiny"


def ask(client: httpx2.Client, key: str) -> httpx2.Response:
    """Request an answer of 4 tokens to a prompt of 3 tokens."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    return client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def counts(client: httpx2.Client, name: str) -> dict[str, float]:
    """Return the metrics of the key with this name."""
    pattern = rf'^mindie_mm:client_(\w+){{client="{name}",model_name="tiny"}} (\S+)$'
    return {metric: float(value) for metric, value in re.findall(pattern, client.get("/metrics").text, re.MULTILINE)}


def test_requests_and_tokens_are_counted_by_the_name_of_their_key(guarded: RunningService, bare: httpx2.Client) -> None:
    assert ask(bare, "alices-key").status_code == 200
    assert counts(bare, "alice") == {
        "requests_running": 0,
        "requests_total": 1,
        "requests_refused_total": 0,
        "prompt_tokens_total": 3,
        "generation_tokens_total": 4,
    }
    assert not any(key in bare.get("/metrics").text for key in ("alices-key", KEYS[0]))


def test_a_key_that_has_used_its_quota_gets_429_with_the_time_to_wait(bare: httpx2.Client) -> None:
    assert [ask(bare, "bobs-key").status_code for _ in range(2)] == [200, 200]
    refused = ask(bare, "bobs-key")
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert "named bob@example.org has made 2 requests in a minute" in refused.json()["error"]["message"]
    assert 25 <= int(refused.headers["Retry-After"]) <= 31
    assert counts(bare, "bob@example.org")["requests_refused_total"] == 1
    assert ask(bare, "alices-key").status_code == 200
    listing = bare.get("/v1/models", headers={"Authorization": "Bearer bobs-key"})
    assert listing.status_code == 200, "only requests to the model count"


def test_the_file_of_keys_is_read_again_when_it_changes_and_on_a_reload(
    guarded: RunningService, bare: httpx2.Client
) -> None:
    file = guarded.log.with_name("keys.toml")
    file.write_text("[carol]\nkey = 'carols-key'\n")
    wait_until(lambda: ask(bare, "carols-key").status_code == 200)
    assert ask(bare, "alices-key").status_code == 401
    file.write_text("[carol]\nkey = 'carols-key'\n[dave]\n")
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(file.with_name("socket"))), timeout=300) as unix:
        answer = unix.post("http://localhost/admin/reload")
    assert answer.status_code == 400
    reason = "[dave]: Object missing required field `key`"
    assert reason in answer.json()["error"]["message"]
    lines = guarded.log.read_text
    wait_until(lambda: re.search(rf"stay in use: .*{re.escape(reason)}", lines()) is not None)
    assert "Traceback" not in lines()
    assert ask(bare, "carols-key").status_code == 200


def test_the_service_encrypts_the_port_and_not_the_unix_socket(guarded: RunningService) -> None:
    assert guarded.url.startswith("https://127.0.0.1:")
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(guarded.url.replace("https", "http"))
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(guarded.log.with_name("socket")))) as unix:
        assert unix.get("http://localhost/health").status_code == 200


def test_a_malformed_request_over_tls_is_answered(guarded: RunningService) -> None:
    url = urlsplit(guarded.url)
    trusted = ssl.create_default_context(cafile=str(guarded.log.with_name("cert.pem")))
    with (
        socket.create_connection((url.hostname, url.port), timeout=300) as raw,
        trusted.wrap_socket(raw, server_hostname=url.hostname) as encrypted,
    ):
        encrypted.sendall(b"no HTTP\r\n\r\n")
        assert encrypted.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_new_certificate_is_used_for_new_connections(guarded: RunningService, bare: httpx2.Client) -> None:
    def is_accepted() -> bool:
        with trusting(guarded) as client:
            try:
                return client.get("/health").status_code == 200
            except httpx2.ConnectError:
                return False

    files = [guarded.log.with_name(name) for name in ("cert.pem", "key.pem")]
    former = [file.read_bytes() for file in files]
    assert is_accepted()
    write_certificate(*files)
    assert not is_accepted()
    wait_until(is_accepted)
    assert bare.get("/health").status_code == 200, "a connection that is open goes on"
    for file, content in zip(files, former, strict=True):
        file.write_bytes(content)
    wait_until(is_accepted)


def test_the_root_path_may_be_in_the_path_of_a_request(bare: httpx2.Client) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    for root in ("", "/mm"):
        assert bare.get(f"{root}/health").status_code == 200
        assert bare.get(f"{root}/").headers["content-type"].startswith("text/html")
        assert bare.get(f"{root}/v1/models").status_code == 401
        assert bare.get(f"{root}/v1/models", headers=headers).status_code == 200
        assert bare.get(f"{root}/openapi.json", headers=headers).json()["servers"] == [{"url": "/mm"}]
    assert bare.get("/mmhealth", headers=headers).status_code == 404
    assert bare.get("/mm/mm/health").status_code == 401


def test_media_by_uuid_belong_to_their_key(bare: httpx2.Client, red_square: str) -> None:
    def status(key: str, url: str | None) -> int:
        part = {"type": "image_url", "image_url": {"url": url}, "uuid": "an image"}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        return bare.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status(KEYS[0], url) for url in (red_square, None)] == [200, 200]
    assert [status(key, None) for key in (KEYS[1], "third-key", "-")] == [400, 401, 401]


def test_an_unknown_api_key_is_refused(guarded: RunningService) -> None:
    with (
        openai.OpenAI(
            base_url=f"{guarded.url}/v1", api_key="third-key", max_retries=0, http_client=trusting(guarded)
        ) as client,
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
    for path in (
        "/v1/models",
        "/models",
        "/shm",
        "/v1/responses/resp_0",
        "/v1/../v1/models",
        "//v1/models",
        "/nothing",
    ):
        assert bare.get(path, headers=headers).status_code == 401


def test_health_and_metrics_need_no_key(bare: httpx2.Client) -> None:
    assert [bare.get(path).status_code for path in ("/health", "/health/live", "/metrics", "/docs")] == [200] * 4
    assert [bare.get(path).status_code for path in ("/ping", "/v2/health/ready", "/v2/health/live")] == [200] * 3


def test_the_openapi_schema_names_the_paths_that_need_a_key(bare: httpx2.Client, http: Any) -> None:
    schema = bare.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    assert schema["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        named = re.sub(r"{\w+}", "tiny", path)
        keyed = bare.request(next(iter(operations)).upper(), named, json={}).status_code == 401
        assert all(("security" in operation) == keyed for operation in operations.values())
    unguarded = http.get("/openapi.json").json()
    assert "securitySchemes" not in unguarded["components"]
    assert not any("security" in operation for path in unguarded["paths"].values() for operation in path.values())


def test_a_foreign_origin_is_refused_by_every_api(bare: httpx2.Client) -> None:
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/audio/transcriptions"):
        assert bare.options(path, headers=preflight).status_code == 400


def test_the_messages_api_takes_the_key_of_anthropics_clients(bare: httpx2.Client) -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello!"}]}
    for path in ("/v1/messages", "/messages", "/v1/messages/count_tokens"):
        assert bare.post(path, json=body, headers={"x-api-key": KEYS[0]}).status_code == 200
        refused = bare.post(path, json=body, headers={"x-api-key": "other"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert bare.get("/v1/models", headers={"x-api-key": KEYS[0]}).status_code == 401


def test_a_stored_response_belongs_to_its_key(bare: httpx2.Client) -> None:
    own, other = ({"Authorization": f"Bearer {key}"} for key in KEYS[:2])
    given = {"input": "Hello!", "max_output_tokens": 1}
    made = bare.post("/v1/responses", json=given, headers=own).json()
    assert made["store"]
    path, item = f"/v1/responses/{made['id']}", made["output"][0]["id"]
    following = {**given, "previous_response_id": made["id"]}
    reference = {**given, "input": [{"type": "item_reference", "id": item}]}
    for method, route, body in (
        ("GET", path, None),
        ("GET", f"{path}/input_items", None),
        ("POST", f"{path}/cancel", None),
        ("DELETE", path, None),
        ("POST", "/v1/responses", following),
        ("POST", "/v1/responses", reference),
    ):
        assert bare.request(method, route, json=body, headers=other).status_code == 404
    assert bare.get(path, headers=own).json() == made
    for body in (following, reference):
        assert bare.post("/v1/responses", json=body, headers=own).status_code == 200


def test_files_without_a_folder_name_the_setting(bare: httpx2.Client) -> None:
    own = {"Authorization": f"Bearer {KEYS[0]}"}
    form: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
    for answer in (bare.get("/v1/files", headers=own), bare.post("/v1/files", headers=own, **form)):
        assert answer.status_code == 404
        assert "--files-path" in answer.json()["error"]["message"]


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


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost", "http://127.0.0.1:1"])
def test_a_form_of_a_foreign_web_page_is_refused_without_keys(http: Any, bare: httpx2.Client, origin: str) -> None:
    """Browsers send forms to other origins without a preflight. With keys, they do not know the key."""
    form: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
    refused = http.post("/v1/files", headers={"Origin": origin}, **form)
    assert refused.status_code == 403
    assert "--cors-origin" in refused.json()["error"]["message"]
    keyed = {"Origin": origin, "Authorization": f"Bearer {KEYS[0]}"}
    assert bare.post("/v1/files", headers=keyed, **form).status_code == 404  # this service stores no files


def test_forms_of_the_service_itself_and_of_programs_are_accepted_without_keys(http: Any) -> None:
    form: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
    own = {"Origin": str(http.base_url).rstrip("/")}
    for headers in ({}, own):
        stored = http.post("/v1/files", headers=headers, **form)
        assert stored.status_code == 200
        assert http.delete(f"/v1/files/{stored.json()['id']}").status_code == 200


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (ORIGINS, ORIGIN, True),
        (ORIGINS, "http://localhost:3000", True),
        (ORIGINS, "http://localhost.evil.example", False),
        (("*",), "https://evil.example", True),
        ((), ORIGIN, False),
    ],
)
async def test_forms_of_allowed_origins_are_accepted(origins: tuple[str, ...], origin: str, allowed: bool) -> None:
    app = FastAPI()
    app.post("/")(lambda: None)
    config = ServiceConfig(cors_origin=origins)
    add_front(app, config, Clients(config), Admission(9, 60), Metrics("x"))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post("/", files={"file": b"x"}, headers={"Origin": origin})
    assert answer.status_code == (200 if allowed else 403)


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
