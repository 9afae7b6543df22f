"""Checks of URLs before they are fetched.

The path and the query are sent byte for byte, because the signature of a signed URL covers them. Only yarl parses the
host, so that the host in the check is the same as the host in the connection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import quote, urljoin

from yarl import URL

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.media.fetch.urls import scheme_of

MAX_URL_LENGTH = 4096
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9_-]*[a-z0-9])?)*", re.IGNORECASE)
_ORIGIN = re.compile(r"(?:[^/?#:]+:)?//[^/?#]*")
"""Scheme and authority of a URL, or the authority of a relative reference."""
_PRINTABLE = "".join(map(chr, range(33, 127)))
_UNPRINTABLE = re.compile(r"[\0-\x20\x7f]")


def checked_url(url: str, allowed_domains: Sequence[str]) -> URL:
    """Return `url` in the form in which it is requested, without its fragment.

    Characters outside ASCII are percent-encoded as UTF-8, as in browsers. Otherwise, the path and the query are not
    changed.

    Args:
        url: The URL as the client gave it.
        allowed_domains: Allowed hosts, including their subdomains. If empty, every host is allowed.

    Raises:
        MediaError: The URL is malformed or not allowed.
        LimitExceeded: The URL is too long.

    """
    if len(url) > MAX_URL_LENGTH:
        raise LimitExceeded(f"the URL has {len(url)} characters; the limit is {MAX_URL_LENGTH}")
    if "\\" in url or _UNPRINTABLE.search(url):
        raise MediaError("the URL has a backslash, white space or a control character")
    try:
        parsed = URL(url)
        own, port = parsed.host, parsed.port  # yarl decodes the host here, and raises if an xn-- name is invalid
        target = _escaped(url).partition("#")[0]
    except ValueError as error:
        raise MediaError("the URL cannot be parsed") from error
    if parsed.scheme not in ("http", "https"):
        raise MediaError(f"the URL has the scheme {parsed.scheme!r}; it must be http or https")
    origin = _ORIGIN.match(target)
    if not own or port == 0 or origin is None:
        raise MediaError("the URL has no host, or its port is 0")
    if parsed.user is not None or parsed.password is not None:
        raise MediaError("the URL has a user name or password; remove it")
    host = (parsed.raw_host or "").rstrip(".").lower()
    allowed = map(encoded_domain, allowed_domains)
    if allowed_domains and not any(host == domain or host.endswith(f".{domain}") for domain in allowed):
        raise MediaError(f"{own} is not one of the allowed media domains (--allowed-media-domains)")
    path_and_query = target[origin.end() :]
    # The query is passed as part of the path, because yarl would drop the ? of an empty query.
    path = path_and_query if path_and_query.startswith("/") else f"/{path_and_query}"
    return URL.build(scheme=parsed.scheme, authority=parsed.raw_authority, path=path, encoded=True)


def redirected_url(location: str, base: URL) -> str:
    """Resolve the Location header of a response against `base`.

    Some servers send white space, control characters and bytes that are not UTF-8. This function percent-encodes them.

    Raises:
        MediaError: The location is empty, too long or malformed.

    """
    if not location or len(location) > MAX_URL_LENGTH:
        raise MediaError(f"{base.host} sent a redirect whose location is empty or too long")
    try:
        location = _escaped(location)
    except ValueError as error:
        raise MediaError(f"{base.host} sent a redirect to a URL that cannot be parsed") from error
    if scheme_of(location):
        return location
    if location.startswith("//"):
        return f"{base.scheme}:{location}"
    if location.startswith("/"):
        return f"{base.scheme}://{base.raw_authority}{location}"
    return urljoin(str(base), location)


@lru_cache
def encoded_domain(domain: str) -> str:
    """Return a domain name in ASCII and lower case, without a trailing dot.

    The result is xn--bcher-kva.de for bücher.de, Bücher.de and xn--bcher-kva.de.

    Raises:
        InputError: The name cannot be the host of a URL or a parent domain of a host.

    """
    try:
        host = URL.build(scheme="http", host=domain.rstrip(".")).raw_host or ""
    except ValueError:
        host = ""
    if not _DOMAIN.fullmatch(host) and ":" not in host:
        raise InputError(
            f"allowed_media_domains has {domain!r}; it must be a host name such as example.org, without a "
            "scheme, port or *. Subdomains of the host are allowed, too"
        )
    return host.lower()


def _escaped(url: str) -> str:
    """Percent-encode all characters after the origin that are not printable ASCII. May raise UnicodeEncodeError."""
    origin = _ORIGIN.match(url)
    start = origin.end() if origin is not None else 0
    return url[:start] + quote(url[start:], safe=_PRINTABLE, errors="surrogateescape")
