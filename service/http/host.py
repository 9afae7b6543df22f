"""The Host header of a request, which names the host that the client wants to reach (RFC 9112, 3.2)."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from mindie_mm.errors import InputError

_HOST = re.compile(rb"(?:\[[0-9A-Za-z:._~!$&'()*+,;=-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
"""Pattern of a Host header: an IP address in brackets or a name, and a port (RFC 3986, 3.2.2). It may be empty."""
_AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
"""Pattern of the beginning of a target in absolute form. Its group is the host with the port."""


def set_host(headers: list[tuple[bytes, bytes]], target: bytes, http_version: str) -> None:
    """Check the Host header, and replace it by the host in `target` if the target is a URL.

    White space around the host is removed, because it is not part of the value (RFC 9112, 5).

    Args:
        headers: Names in lower case and values. The Host header is changed in place.
        target: Target of the request: a path, or a URL as clients send it to a proxy. A server must ignore the Host
            header beside a URL.
        http_version: Version of the request, such as 1.1.

    Raises:
        InputError: The request has several Host headers or a malformed one, or has none although its version is 1.1.

    """
    headers[:] = [(name, value.strip(b" \t") if name == b"host" else value) for name, value in headers]
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise InputError(f"the request has {len(hosts)} Host headers; send one")
    if not hosts and http_version == "1.1":
        raise InputError("the request has no Host header, which HTTP/1.1 requires")
    if url := _AUTHORITY.match(target):
        hosts = [url[1]]
        headers[:] = [(b"host", url[1]), *(header for header in headers if header[0] != b"host")]
    if not all(map(_HOST.fullmatch, hosts)):
        raise InputError("the Host header must be a host name or an address, with or without a port")


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case and without the port. "" if the header contains no name."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
