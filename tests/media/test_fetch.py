"""Fetching media: what is fetched, and everything that is refused. Loopback servers only."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.media.fetch import _checked, encoded_domain, fetch, is_public

BODY = bytes(range(256)) * 40


async def _serve_media(request: web.Request) -> web.Response:
    return web.Response(body=BODY)


async def _redirect(request: web.Request) -> web.Response:
    left = int(request.match_info["left"])
    return web.Response(status=302, headers={"Location": f"/redirect/{left - 1}" if left else "/media"})


async def _redirect_to(request: web.Request) -> web.Response:
    return web.Response(status=307, headers={"Location": request.query["url"]})


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(10_000):
        await response.write(bytes(1 << 16))
    return response


async def _stalling(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"x")
    await asyncio.Event().wait()
    return response


async def _compressed(request: web.Request) -> web.Response:
    return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})


@pytest_asyncio.fixture(scope="module")
async def server() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/media", _serve_media)
    app.router.add_get("/redirect/{left}", _redirect)
    app.router.add_get("/to", _redirect_to)
    app.router.add_get("/endless", _endless)
    app.router.add_get("/stalling", _stalling)
    app.router.add_get("/compressed", _compressed)
    async with TestServer(app, host="127.0.0.1") as running:
        yield f"http://127.0.0.1:{running.port}"


async def get(url: str, **changes: object) -> bytes:
    settings = {"max_bytes": 1 << 20, "timeout_s": 5.0, "allow_private": True}
    return await fetch(url, **(settings | changes))


async def test_gives_the_body(server: str) -> None:
    assert await get(f"{server}/media") == BODY


async def test_follows_three_redirects(server: str) -> None:
    assert await get(f"{server}/redirect/2") == BODY


async def test_refuses_a_fourth_redirect(server: str) -> None:
    with pytest.raises(MediaError, match="more than 3 times"):
        await get(f"{server}/redirect/3")


async def test_refuses_private_addresses_by_default(server: str) -> None:
    with pytest.raises(MediaError, match="not public"):
        await get(f"{server}/media", allow_private=False)
    with pytest.raises(MediaError, match="not public"):
        await get(f"{server.replace('127.0.0.1', 'localhost')}/media", allow_private=False)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://a:b@127.0.0.1/", "http:///x"])
async def test_judges_redirects_as_the_first_url(server: str, url: str) -> None:
    with pytest.raises(MediaError):
        await get(f"{server}/to?url={url}")


async def test_judges_redirects_by_the_domain_list(server: str) -> None:
    url = server.replace("127.0.0.1", "localhost")
    with pytest.raises(MediaError, match="localhost is none of the allowed"):
        await get(f"{server}/to?url={url}/media", allowed_domains=("127.0.0.1",))


async def test_stops_reading_at_the_limit(server: str) -> None:
    with pytest.raises(LimitExceeded, match="limit for one item"):
        await get(f"{server}/endless", max_bytes=1000)


async def test_refuses_by_announced_length(server: str) -> None:
    with pytest.raises(LimitExceeded, match="announces 10240 bytes"):
        await get(f"{server}/media", max_bytes=10_239)
    assert await get(f"{server}/media", max_bytes=10_240) == BODY


async def test_ends_in_time(server: str) -> None:
    with pytest.raises(MediaError, match=r"longer than the limit of 0\.2 s"):
        await get(f"{server}/stalling", timeout_s=0.2)


async def test_refuses_other_statuses_and_encodings(server: str) -> None:
    with pytest.raises(MediaError, match="status 404"):
        await get(f"{server}/nothing")
    with pytest.raises(MediaError, match="content encoding"):
        await get(f"{server}/compressed")


async def test_refuses_a_dead_port() -> None:
    with pytest.raises(MediaError, match="no connection"):
        await get("http://127.0.0.1:1/")


@pytest.mark.parametrize("domain", ["127.0.0.1", "0.0.1"])
async def test_the_domain_list_takes_subdomains(server: str, domain: str) -> None:
    assert await get(f"{server}/media", allowed_domains=("example.org", domain)) == BODY


async def test_the_domain_list_takes_no_suffix_of_a_name(server: str) -> None:
    with pytest.raises(MediaError, match="none of the allowed"):
        await get(f"{server}/media", allowed_domains=("7.0.0.1",))


@pytest.mark.parametrize("domain", ["bücher.example", "Bücher.example", "xn--bcher-kva.example", "bücher.example."])
@pytest.mark.parametrize("host", ["bücher.example", "XN--BCHER-KVA.example.", "a.bücher.example"])
def test_the_domain_list_takes_a_name_in_either_spelling(domain: str, host: str) -> None:
    assert _checked(f"http://{host}/a", [domain]).path == "/a"
    with pytest.raises(MediaError, match="none of the allowed"):
        _checked("http://a-bücher.example/a", [domain])


@pytest.mark.parametrize(
    "domain", ["example.org", "a-b.c_d.example", "हिन्दी.भारत", "bu\u0308cher.de", "中文.com", "10.0.0.5", "::1"]
)
def test_domains_that_hosts_can_be_below(domain: str) -> None:
    assert encoded_domain(domain).isascii()


@pytest.mark.parametrize(
    "domain",
    [
        *("http://x.org", "*.example.org", ".example.org", "example.org:443", "example.org/a", "a b", "u@x.org"),
        *("[::1]", "ü" * 64 + ".de", "xn--ü.de", "."),
    ],
)
def test_domains_that_no_host_can_be_below(domain: str) -> None:
    said = f"allowed_media_domains holds {re.escape(repr(domain))}, it must be a host's name"
    with pytest.raises(InputError, match=said):
        encoded_domain(domain)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/",
        "http://localhost:9/",
        "http://localhost.:9/",
        "http://0x7f.1:9/",
        "http://0177.0.0.1:9/",
        "http://2130706433:9/",
        "http://0:9/",
        "http://[::1]:9/",
        "http://[::]:9/",
        "http://[::ffff:127.0.0.1]:9/",
        "http://[::127.0.0.1]:9/",
        "http://[64:ff9b::127.0.0.1]:9/",
        "http://[2002:7f00:1::]:9/",
        "http://[fd00::1]:9/",
        "http://[fe80::1]:9/",
        "http://10.0.0.1:9/",
        "http://172.16.0.1:9/",
        "http://192.168.0.1:9/",
        "http://100.64.0.1:9/",
        "http://169.254.169.254/latest/meta-data/",
        "http://224.0.0.1:9/",
        "http://255.255.255.255:9/",
        "http://x\\@127.0.0.1/",
        "http://x y/",
        "http://x\n/",
        "http://user@example.org/",
        "http://",
        "http:///x",
        "http://[::1/",
        "http://example.org:99999/",
        "http://example.org:0/",
        "gopher://example.org/",
        "//example.org/",
        "http://" + "a" * 5000,
    ],
)
async def test_refuses(url: str) -> None:
    with pytest.raises((MediaError, LimitExceeded)) as caught:
        await get(url, allow_private=False, timeout_s=2)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.1.1.1", True),
        ("2606:4700::1111", True),
        ("::ffff:1.1.1.1", True),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::1.1.1.1", False),
        ("2001:0:1::", False),
        ("2002:101:101::", False),
        ("fec0::1", False),
        ("192.88.99.1", False),
        ("fe80::1%eth0", False),
        ("ff0e::1", False),
        ("0.0.0.0", False),
        ("198.18.0.1", False),
    ],
)
def test_public(address: str, public: bool) -> None:
    assert is_public(address) is public
