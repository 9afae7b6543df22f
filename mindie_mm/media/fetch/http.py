"""Fetching of media over HTTP from public addresses only.

A host name is resolved once per connection, and all its addresses must be public. The socket connects only to an
address that has been checked, so a DNS record that changes after the check has no effect. Each redirect is checked like
the first URL (`http_url.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.fetch.http_body import codings_of, decode_body
from mindie_mm.media.fetch.http_connector import MAX_INTERIM, Connector, TooManyInterim
from mindie_mm.media.fetch.http_url import checked_url, redirected_url
from mindie_mm.media.fetch.threads import Threads
from mindie_mm.processes.tasks import in_thread

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 1 << 16

# Python's is_global accepts these networks, but their addresses may lead to any IPv4 address, or to internal services
# of a cloud.
_CLOSED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "::/96",  # IPv4-compatible
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64, local use
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local
        "192.88.99.0/24",  # 6to4 relays
        "192.0.0.0/24",  # IETF protocols; a cloud's metadata service is at .192
        "168.63.129.16/32",  # host service of another cloud
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
    )
)


def is_public(address: str) -> bool:
    """Return whether the IP `address` belongs to the public internet. The zone of an IPv6 address is ignored."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return (
        ip.is_global
        and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)
        and not any(ip in network for network in _CLOSED if network.version == ip.version)
    )


async def fetch(
    url: str,
    *,
    max_bytes: int,
    timeout_s: float,
    connect_timeout_s: float = 5.0,
    read_timeout_s: float = 10.0,
    max_redirects: int = 3,
    allowed_domains: Sequence[str] = (),
    allow_private: bool = False,
    spend: Callable[[int], None] | None = None,
    request: str | None = None,
) -> bytes:
    """Fetch the body of `url`.

    Args:
        url: An http or https URL.
        max_bytes: Maximum size of the body in bytes, both as sent and after decoding.
        timeout_s: Maximum duration in seconds, including redirects.
        connect_timeout_s: Maximum time in seconds to open a connection.
        read_timeout_s: Maximum time in seconds between two pieces of data from the server.
        max_redirects: Maximum number of redirects.
        allowed_domains: Allowed hosts, including their subdomains. If empty, every host is allowed.
        allow_private: Whether to allow addresses that are not public.
        spend: Function that is called with the size of each chunk in bytes, and with the number of bytes that decoding
            adds. It can raise an exception to abort the fetch.
        request: Id of the request that needs the URL. The number of its concurrent name lookups is limited.

    Raises:
        MediaError: The URL is not allowed or cannot be fetched.
        LimitExceeded: The URL or the body is too long.

    """
    target = checked_url(url, allowed_domains)
    connector = Connector(
        resolver=_Resolver(allow_private, request), socket_factory=_socket_factory(allow_private), force_close=True
    )
    try:
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(
                connector=connector,
                trust_env=False,  # a proxy would connect on our behalf, so that no address could be checked
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity", "User-Agent": "mindie_mm"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s),
            ) as session,
        ):
            for _ in range(1 + max_redirects):
                async with session.get(target, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await _body(response, max_bytes, spend)
                    location = response.headers.get("Location", "")
                    target = checked_url(redirected_url(location, target), allowed_domains)
            raise MediaError(f"{target.host} sent more redirects than the limit of {max_redirects}")
    except aiohttp.ConnectionTimeoutError as error:
        raise MediaError(
            f"{target.host} did not accept a connection within the limit of {connect_timeout_s:g} s"
        ) from error
    except aiohttp.SocketTimeoutError as error:
        raise MediaError(f"{target.host} sent nothing for longer than the limit of {read_timeout_s:g} s") from error
    except TimeoutError as error:
        raise MediaError(f"fetching from {target.host} took longer than the limit of {timeout_s:g} s") from error
    except TooManyInterim as error:
        raise MediaError(f"{target.host} sent more interim responses than the limit of {MAX_INTERIM}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MediaError(f"could not fetch from {target.host}: {_reason(error)}") from error


async def _body(response: aiohttp.ClientResponse, max_bytes: int, spend: Callable[[int], None] | None) -> bytes:
    host = response.url.host
    if response.status != 200:
        raise MediaError(f"{host} responded with status {response.status}")
    codings = codings_of(response.headers.getall("Content-Encoding", ()), host)
    if (length := response.content_length) is not None and length > max_bytes:
        raise LimitExceeded(f"{host} announced {length} bytes; the limit for one item is {max_bytes}")
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > max_bytes:
            raise LimitExceeded(f"{host} sent more bytes than the limit of {max_bytes} for one item")
        if spend is not None:
            spend(len(chunk))
    if not codings:
        return bytes(body)
    decoded = await in_thread(lambda: decode_body(bytes(body), codings, max_bytes, host))
    if spend is not None:
        spend(max(0, len(decoded) - len(body)))
    return decoded


LOOKUPS = Threads("lookup")
"""Threads for name lookups. All fetches share them, because the number of threads is limited per process."""


class _Resolver(AbstractResolver):
    """Resolver that uses the system's resolver, but refuses a name if any of its addresses is not public."""

    def __init__(self, allow_private: bool, request: str | None) -> None:
        self._allow_private = allow_private
        self._request = request

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await LOOKUPS.run(lambda: _resolve(host, port, family), self._request)
        if not self._allow_private and not all(is_public(result["host"]) for result in results):
            raise _NotPublic
        return results

    async def close(self) -> None:
        """Do nothing, because the resolver has no resources to release."""


def _resolve(host: str, port: int, family: int) -> list[ResolveResult]:
    """Resolve `host` as aiohttp does, but in the calling thread.

    Raises:
        OSError: The name cannot be resolved (gaierror).
        UnicodeError: The name is malformed.

    """
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, numeric)[0],  # includes the zone of an IPv6 address
            port=port,
            family=address_family,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for address_family, _, protocol, _, address in socket.getaddrinfo(
            host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    ]


class _NotPublic(OSError):
    """An error for an address that is not public.

    The class derives from OSError, because the connector expects an OSError if a connection fails.
    """


def _socket_factory(allow_private: bool) -> Callable[[aiohttp.AddrInfoType], socket.socket]:
    def create(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        if not allow_private and not is_public(str(address[0])):
            raise _NotPublic
        return socket.socket(family=family, type=kind, proto=protocol)

    return create


def _reason(error: BaseException) -> str:
    """Describe a failure. Do not use the messages of aiohttp, which contain addresses and may be long."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _NotPublic):
            return "its address is not public. Send the data instead, or start the service with --allow-private-media"
        cause = getattr(cause, "os_error", None) or cause.__cause__
    if isinstance(error, aiohttp.InvalidURL):
        return "its host is neither a valid name nor a canonical address"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name cannot be resolved"
    if isinstance(error, aiohttp.ClientSSLError):
        return "the TLS certificate or handshake is invalid"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "the connection failed"
    return "the response ended early or is not valid HTTP"
