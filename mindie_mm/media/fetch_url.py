"""URLs to fetch: judged by their host, and requested byte for byte as they were given.

The path and the query of a signed URL are part of what was signed: no escape in them is decoded, added or changed. yarl
is the one parser of hosts: the host that is judged is the host that is connected to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import quote, urljoin

from yarl import URL

from mindie_mm.errors import InputError, LimitExceeded, MediaError
from mindie_mm.media.urls import scheme_of

MAX_URL_LENGTH = 4096
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9_-]*[a-z0-9])?)*", re.IGNORECASE)
_ORIGIN = re.compile(r"(?:[^/?#:]+:)?//[^/?#]*")
"""Scheme and authority of a URL, or the authority alone of a reference."""
_PRINTABLE = "".join(map(chr, range(33, 127)))
_UNPRINTABLE = re.compile(r"[\0-\x20\x7f]")


def checked_url(url: str, allowed_domains: Sequence[str]) -> URL:
    """Return what to request for `url`, without its fragment.

    Characters beyond ASCII are escaped as UTF-8, as browsers do. Nothing else of the path and the query is changed.
    `allowed_domains` names the hosts allowed, their subdomains too; empty allows every host. Raises MediaError for a
    URL that is not fetched, LimitExceeded for one that is too long.
    """
    if len(url) > MAX_URL_LENGTH:
        raise LimitExceeded(f"a URL of {len(url)} characters, the limit is {MAX_URL_LENGTH}")
    if "\\" in url or _UNPRINTABLE.search(url):
        raise MediaError("a URL with a backslash, white space or a control character")
    try:
        parsed = URL(url)
        own, port = parsed.host, parsed.port  # decoded when they are asked for: xn-- may be no name
        target = _escaped(url).partition("#")[0]
    except ValueError as error:
        raise MediaError("a URL that cannot be parsed") from error
    if parsed.scheme not in ("http", "https"):
        raise MediaError(f"a URL of scheme {parsed.scheme!r}, http and https are fetched")
    origin = _ORIGIN.match(target)
    if not own or port == 0 or origin is None:
        raise MediaError("a URL without a host or with port 0")
    if parsed.user is not None or parsed.password is not None:
        raise MediaError("a URL with a user name or password")
    host = (parsed.raw_host or "").rstrip(".").lower()
    allowed = map(encoded_domain, allowed_domains)
    if allowed_domains and not any(host == domain or host.endswith(f".{domain}") for domain in allowed):
        raise MediaError(f"{own} is none of the allowed media domains")
    path_and_query = target[origin.end() :]
    # The query goes with the path: by itself yarl would drop the mark of an empty one.
    path = path_and_query if path_and_query.startswith("/") else f"/{path_and_query}"
    return URL.build(scheme=parsed.scheme, authority=parsed.raw_authority, path=path, encoded=True)


def redirected_url(location: str, base: URL) -> str:
    """Return the URL that the Location of an answer names, seen from `base`. MediaError for none or one too long.

    White space, control characters and bytes that are no UTF-8, which servers do send, are escaped.
    """
    if not location or len(location) > MAX_URL_LENGTH:
        raise MediaError(f"{base.host} redirects without a usable location")
    try:
        location = _escaped(location)
    except ValueError as error:
        raise MediaError(f"{base.host} redirects to a URL that cannot be parsed") from error
    if scheme_of(location):
        return location
    if location.startswith("//"):
        return f"{base.scheme}:{location}"
    if location.startswith("/"):
        return f"{base.scheme}://{base.raw_authority}{location}"
    return urljoin(str(base), location)


@lru_cache
def encoded_domain(domain: str) -> str:
    """Return a domain's name as DNS has it, without a final dot.

    That is xn--bcher-kva.de for bücher.de, Bücher.de and itself. Raises InputError for what no URL's host can be, or
    be below.
    """
    try:
        host = URL.build(scheme="http", host=domain.rstrip(".")).raw_host or ""
    except ValueError:
        host = ""
    if not _DOMAIN.fullmatch(host) and ":" not in host:
        raise InputError(
            f"allowed_media_domains holds {domain!r}, it must be a host's name such as example.org, with no scheme, "
            "port or *: those below it are allowed with it"
        )
    return host.lower()


def _escaped(url: str) -> str:
    """Escape what is not printable ASCII behind the origin of a URL or a reference. UnicodeEncodeError."""
    origin = _ORIGIN.match(url)
    start = origin.end() if origin is not None else 0
    return url[:start] + quote(url[start:], safe=_PRINTABLE, errors="surrogateescape")
