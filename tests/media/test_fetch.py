"""Tests for fetching media from loopback servers, and refused URLs and responses."""

import asyncio
import gzip
import re
import zlib
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.media.fetch.http import fetch, is_public
from mindie_mm.media.fetch.http_body import MAX_CODINGS, MAX_MEMBERS
from mindie_mm.media.fetch.http_url import checked_url, encoded_domain

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


def raw_deflate(data: bytes) -> bytes:
    """Compress without the header and trailer of zlib, as some servers do."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


ENCODED = {
    "gzip": (["gzip"], gzip.compress(BODY)),
    "gzip in mixed case": (["GZip"], gzip.compress(BODY)),
    "gzip with two members": (["gzip"], gzip.compress(BODY[:99]) + gzip.compress(BODY[99:])),
    "gzip with zeros behind it": (["gzip"], gzip.compress(BODY) + bytes(512)),
    "gzip with other bytes behind it": (["gzip"], gzip.compress(BODY) + b"\r\nend"),
    "x-gzip": (["x-gzip"], gzip.compress(BODY)),
    "deflate": (["deflate"], zlib.compress(BODY)),
    "bare deflate": (["deflate"], raw_deflate(BODY)),
    "deflate, gzip": (["deflate, gzip"], gzip.compress(zlib.compress(BODY))),
    "two headers": (["deflate", "gzip"], gzip.compress(zlib.compress(BODY))),
    "gzip twice": (["gzip,gzip"], gzip.compress(gzip.compress(BODY))),
    "gzip of a chunked upload": (["gzip,aws-chunked"], gzip.compress(BODY)),
    "gzip beside ignored names": (["utf-8, gzip, identity"], gzip.compress(BODY)),
    **{
        f"only {name!r}": ([name], BODY)
        for name in ("identity", "aws-chunked", "utf-8", "", ",", "binary", "UTF-8, ,none")
    },
    "invalid gzip": (["gzip"], BODY),
    "invalid deflate": (["deflate"], BODY),
    "gzip cut off": (["gzip"], gzip.compress(BODY)[:-9]),
    "gzip without its length": (["gzip"], gzip.compress(BODY)[:-4]),
    "gzip with a second member cut off": (["gzip"], gzip.compress(BODY) + gzip.compress(BODY)[:-9]),
    "deflate cut off": (["deflate"], zlib.compress(BODY)[:-9]),
    "br": (["br"], BODY),
    "gzip, zstd": (["gzip, zstd"], BODY),
    "too often": (["gzip"] * (MAX_CODINGS + 1), BODY),
    "a gzip bomb": (["gzip"], gzip.compress(bytes(1 << 20) + b"x")),
    "a deflate bomb": (["deflate"], zlib.compress(bytes(1 << 24))),
    "a nested gzip bomb": (["gzip, gzip"], gzip.compress(gzip.compress(bytes(1 << 26)))),
    "a bomb that decodes to little": (["gzip, deflate"], zlib.compress(gzip.compress(b"x", 0) + bytes(1 << 24))),
    "a gzip of empty members": (["gzip"], gzip.compress(b"") * (MAX_MEMBERS + 1)),
}
"""Content-Encoding headers and the body of each response, by name."""


async def _encoded(request: web.Request) -> web.Response:
    headers, body = ENCODED[request.query["name"]]
    response = web.Response(body=body)
    for header in headers:
        response.headers.add("Content-Encoding", header)
    return response


async def _missing(request: web.Request) -> web.Response:
    return web.Response(status=404)


async def _echo(request: web.Request) -> web.Response:
    """Respond with the request target exactly as the server received it."""
    return web.Response(body=request.raw_path.encode())


async def _redirect_raw(request: web.Request) -> web.StreamResponse:
    """Send the Location header as raw bytes, which aiohttp's server does not support."""
    assert request.transport is not None
    location = LOCATIONS[int(request.query["number"])][0]
    request.transport.write(
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + location + b"\r\nConnection: close\r\n\r\n"
    )
    request.transport.close()
    return web.Response()


LOCATIONS = [
    (b"/echo/p%40q%28x%29.png?sig=a%2Fb", "/echo/p%40q%28x%29.png?sig=a%2Fb"),
    (b"/echo/a//b/../c;d?", "/echo/a//b/../c;d?"),
    (b"echo/d%2Fe?sig=%2B+%20", "/from/echo/d%2Fe?sig=%2B+%20"),
    (b"../echo/d%2fe", "/echo/d%2fe"),
    (b"/echo/a b\tc", "/echo/a%20b%09c"),
    ("/echo/ä?ü".encode(), "/echo/%C3%A4?%C3%BC"),
    ("/echo/ä?ü".encode("latin-1"), "/echo/%E4?%FC"),
    (b"/echo/a#b", "/echo/a"),
    (b"//HOST/echo/%7E~", "/echo/%7E~"),
    (b"http://HOST/echo/%7E~?a=b%3D", "/echo/%7E~?a=b%3D"),
]
"""Location headers, and the request target that each header must lead to. HOST is replaced with the server's host."""


@pytest_asyncio.fixture(scope="module")
async def server() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/media", _serve_media)
    app.router.add_get("/redirect/{left}", _redirect)
    app.router.add_get("/to", _redirect_to)
    app.router.add_get("/endless", _endless)
    app.router.add_get("/stalling", _stalling)
    app.router.add_get("/encoded", _encoded)
    app.router.add_get("/missing", _missing)
    app.router.add_get("/from/away", _redirect_raw)
    app.router.add_get(r"/{path:[\s\S]*}", _echo)
    async with TestServer(app, host="127.0.0.1") as running:
        host = f"127.0.0.1:{running.port}".encode()
        LOCATIONS[:] = [(location.replace(b"HOST", host), requested) for location, requested in LOCATIONS]
        yield f"http://127.0.0.1:{running.port}"


async def get(url: str, **changes: object) -> bytes:
    settings = {"max_bytes": 1 << 20, "timeout_s": 5.0, "allow_private": True}
    return await fetch(url, **(settings | changes))


async def test_returns_the_body(server: str) -> None:
    assert await get(f"{server}/media") == BODY


async def test_follows_three_redirects(server: str) -> None:
    assert await get(f"{server}/redirect/2") == BODY


async def test_refuses_a_fourth_redirect(server: str) -> None:
    with pytest.raises(MediaError, match="more redirects than the limit of 3"):
        await get(f"{server}/redirect/3")


async def test_refuses_private_addresses_by_default(server: str) -> None:
    with pytest.raises(MediaError, match="not public"):
        await get(f"{server}/media", allow_private=False)
    with pytest.raises(MediaError, match="not public"):
        await get(f"{server.replace('127.0.0.1', 'localhost')}/media", allow_private=False)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://a:b@127.0.0.1/", "http:///x"])
async def test_checks_a_redirect_like_the_first_url(server: str, url: str) -> None:
    with pytest.raises(MediaError):
        await get(f"{server}/to?url={url}")


async def test_checks_a_redirect_against_the_domain_list(server: str) -> None:
    url = server.replace("127.0.0.1", "localhost")
    with pytest.raises(MediaError, match="localhost is not one of the allowed"):
        await get(f"{server}/to?url={url}/media", allowed_domains=("127.0.0.1",))


async def test_stops_reading_at_the_limit(server: str) -> None:
    with pytest.raises(LimitExceeded, match="limit of 1000 for one item"):
        await get(f"{server}/endless", max_bytes=1000)


async def test_refuses_an_announced_length_above_the_limit(server: str) -> None:
    with pytest.raises(LimitExceeded, match="announced 10240 bytes"):
        await get(f"{server}/media", max_bytes=10_239)
    assert await get(f"{server}/media", max_bytes=10_240) == BODY


async def test_stops_at_the_timeout(server: str) -> None:
    with pytest.raises(MediaError, match=r"longer than the limit of 0\.2 s"):
        await get(f"{server}/stalling", timeout_s=0.2)


async def test_refuses_an_error_status(server: str) -> None:
    with pytest.raises(MediaError, match="status 404"):
        await get(f"{server}/missing")


@pytest.mark.parametrize(
    ("given", "requested"),
    [
        ("/p%40q%28x%29.png?sig=a%2Fb", "/p%40q%28x%29.png?sig=a%2Fb"),
        (
            "/%7e%7E~%41A?X-Amz-Credential=AK%2F20%2fs3&k=%2B+%20&k",
            "/%7e%7E~%41A?X-Amz-Credential=AK%2F20%2fs3&k=%2B+%20&k",
        ),
        ("/a/./b/../c//d;e=f/", "/a/./b/../c//d;e=f/"),
        ("/a?", "/a?"),
        ("/a??b?c=/d", "/a??b?c=/d"),
        ("?a=b", "/?a=b"),
        ("", "/"),
        ("/100%/%zz%", "/100%/%zz%"),
        ("/[a]{b}|c^`\"'<d>?[e]={f}|\"'<g>", "/[a]{b}|c^`\"'<d>?[e]={f}|\"'<g>"),
        ("/ä%C3%A4?ü=%e4", "/%C3%A4%C3%A4?%C3%BC=%e4"),
        ("/a%0d%0aX:%20y?b%0d%0a", "/a%0d%0aX:%20y?b%0d%0a"),
        ("/a?b#c?d", "/a?b"),
        ("/a@b:c", "/a@b:c"),
    ],
)
async def test_a_url_is_requested_byte_for_byte(server: str, given: str, requested: str) -> None:
    assert (await get(server + given)).decode() == requested


@pytest.mark.parametrize("number", range(len(LOCATIONS)))
async def test_a_location_is_requested_byte_for_byte(server: str, number: int) -> None:
    assert (await get(f"{server}/from/away?number={number}")).decode() == LOCATIONS[number][1]


@pytest.mark.parametrize("name", [*ENCODED][: [*ENCODED].index("invalid gzip")])
async def test_decodes_supported_content_encodings(server: str, name: str) -> None:
    spent: list[int] = []
    assert await get(f"{server}/encoded?name={quote(name)}", spend=spent.append) == BODY
    assert sum(spent) >= len(BODY)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("invalid gzip", "not valid gzip"),
        ("invalid deflate", "not valid deflate"),
        ("gzip cut off", "not valid gzip or is truncated"),
        ("gzip without its length", "not valid gzip or is truncated"),
        ("gzip with a second member cut off", "not valid gzip or is truncated"),
        ("deflate cut off", "not valid deflate or is truncated"),
        ("br", "content encoding br; only gzip and deflate are supported"),
        ("gzip, zstd", "content encoding zstd"),
        ("too often", "4 content encodings; the limit is 3"),
        ("a gzip bomb", "gzip body that decodes to more bytes than the limit of 1048576 for one item"),
        ("a deflate bomb", "deflate body that decodes to more bytes than the limit of 1048576 for one item"),
        ("a nested gzip bomb", "gzip body that decodes to more bytes than the limit of 1048576 for one item"),
        (
            "a bomb that decodes to little",
            "deflate body that decodes to more bytes than the limit of 1048576 for one item",
        ),
        ("a gzip of empty members", f"gzip body has {MAX_MEMBERS + 1} members; the limit is {MAX_MEMBERS}"),
    ],
)
async def test_refuses_invalid_content_encodings(server: str, name: str, message: str) -> None:
    with pytest.raises((MediaError, LimitExceeded), match=message):
        await get(f"{server}/encoded?name={quote(name)}")


async def test_spend_counts_the_bytes_that_decoding_adds(server: str) -> None:
    def spend(num_bytes: int) -> None:
        spent.append(num_bytes)
        if sum(spent) > len(BODY) - 1:
            raise LimitExceeded("the request's media take too much")

    spent: list[int] = []
    with pytest.raises(LimitExceeded, match="take too much"):
        await get(f"{server}/encoded?name=gzip", spend=spend)
    assert sum(spent) == len(BODY)


async def test_refuses_a_closed_port() -> None:
    with pytest.raises(MediaError, match="the connection failed"):
        await get("http://127.0.0.1:1/")


@pytest.mark.parametrize("domain", ["127.0.0.1", "0.0.1"])
async def test_the_domain_list_includes_subdomains(server: str, domain: str) -> None:
    assert await get(f"{server}/media", allowed_domains=("example.org", domain)) == BODY


async def test_the_domain_list_does_not_match_part_of_a_label(server: str) -> None:
    with pytest.raises(MediaError, match="not one of the allowed"):
        await get(f"{server}/media", allowed_domains=("7.0.0.1",))


@pytest.mark.parametrize("domain", ["bücher.example", "Bücher.example", "xn--bcher-kva.example", "bücher.example."])
@pytest.mark.parametrize("host", ["bücher.example", "XN--BCHER-KVA.example.", "a.bücher.example"])
def test_the_domain_list_matches_unicode_and_punycode_names(domain: str, host: str) -> None:
    assert checked_url(f"http://{host}/a", [domain]).raw_path == "/a"
    with pytest.raises(MediaError, match="not one of the allowed"):
        checked_url("http://a-bücher.example/a", [domain])


@pytest.mark.parametrize(
    "domain", ["example.org", "a-b.c_d.example", "हिन्दी.भारत", "bu\u0308cher.de", "中文.com", "10.0.0.5", "::1"]
)
def test_valid_domains_are_accepted(domain: str) -> None:
    assert encoded_domain(domain).isascii()


@pytest.mark.parametrize(
    "domain",
    [
        *("http://x.org", "*.example.org", ".example.org", "example.org:443", "example.org/a", "a b", "u@x.org"),
        *("[::1]", "ü" * 64 + ".de", "xn--ü.de", "."),
    ],
)
def test_invalid_domains_are_refused(domain: str) -> None:
    message = f"allowed_media_domains has {re.escape(repr(domain))}; it must be a host name"
    with pytest.raises(InputError, match=message):
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
async def test_refuses_private_and_invalid_urls(url: str) -> None:
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
def test_only_public_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public
