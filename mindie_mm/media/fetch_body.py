"""Bodies of answers with a Content-Encoding, decoded within the limit of an item.

A fetch asks for none. Object stores send the one that an object was stored with, whatever is asked for.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable

from mindie_mm.errors import LimitExceeded, MediaError

MAX_CODINGS = 3
"""Most times that a body may be compressed."""
MAX_MEMBERS = 2**14
"""Most members of a gzip body, told by how they begin: each costs a turn of a Python loop, however short it is."""
_DECODED = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_UNDECODED = frozenset(("br", "zstd", "dcb", "dcz", "compress", "x-compress", "exi", "pack200-gzip", "aes128gcm"))
"""Further codings that IANA registers. Any other name (identity, aws-chunked, utf-8) says nothing of the body."""
_MEMBER_START = b"\x1f\x8b\x08"


def codings_of(headers: Iterable[str], host: str | None) -> list[str]:
    """Return the codings, gzip or deflate, that a body was given, in order, by the answer's Content-Encoding `headers`.

    Raises MediaError for a coding that is not decoded, LimitExceeded for more than MAX_CODINGS.
    """
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    if undecoded := _UNDECODED.intersection(names):
        raise MediaError(
            f"{host} answered with the content encoding {min(undecoded)}, which was not asked for; gzip and deflate "
            "are decoded"
        )
    codings = [_DECODED[name] for name in names if name in _DECODED]
    if len(codings) > MAX_CODINGS:
        raise LimitExceeded(f"{host} answered with {len(codings)} content encodings, the limit is {MAX_CODINGS}")
    return codings


def decode_body(body: bytes, codings: list[str], max_bytes: int, host: str | None) -> bytes:
    """Return `body` with its `codings` undone, the last first.

    Raises MediaError for a body that is not in its coding or ends early, LimitExceeded where more than `max_bytes`
    come out of one.
    """
    for coding in reversed(codings):
        try:
            body = _gunzip(body, max_bytes + 1) if coding == "gzip" else _inflate(body, max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise MediaError(f"{host} answered with a body that is no {coding}, or broken or cut off") from error
        if len(body) > max_bytes:
            raise LimitExceeded(f"{host} sends {coding} of more than {max_bytes} bytes, the limit for one item")
    return body


def _gunzip(body: bytes, reach: int) -> bytes:
    """The first `reach` bytes. OSError, EOFError, zlib.error, LimitExceeded."""
    if (num_members := body.count(_MEMBER_START)) > MAX_MEMBERS:
        raise LimitExceeded(f"a gzip body of {num_members} members, the limit is {MAX_MEMBERS}")
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
        return file.read(reach)


def _inflate(body: bytes, reach: int) -> bytes:
    """The first `reach` bytes. zlib.error, EOFError.

    Deflate is meant to be in zlib's frame (RFC 9110, 8.4.1.2). Some servers send it bare, and clients take both.
    """
    is_framed = len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0
    inflater = zlib.decompressobj(zlib.MAX_WBITS if is_framed else -zlib.MAX_WBITS)
    data = inflater.decompress(body, reach)
    if len(data) < reach and not inflater.eof:
        raise EOFError
    return data
