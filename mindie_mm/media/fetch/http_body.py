"""Decoding of response bodies that have a Content-Encoding, up to the maximum size of an item.

Requests do not ask for a content encoding. Object stores nevertheless send an object in the encoding in which it was
stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from mindie_mm.errors import LimitExceeded, MediaError

MAX_CODINGS = 3
"""Maximum number of content encodings of one body."""
MAX_MEMBERS = 2**14
"""Maximum number of members in a gzip body. Members are counted by their magic bytes.

Each member takes one iteration of a Python loop, even if it is empty.
"""
_DECODED = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_UNDECODED = frozenset(("br", "zstd", "dcb", "dcz", "compress", "x-compress", "exi", "pack200-gzip", "aes128gcm"))
"""Registered content codings that are not supported. Other names, such as identity or aws-chunked, are ignored."""
_MEMBER_START = b"\x1f\x8b\x08"
_CHUNK_BYTES = 2**14
"""Number of bytes to pass to zlib at once. At the end of each member, zlib copies the input that it has not used."""


def codings_of(headers: Iterable[str], host: str | None) -> list[str]:
    """Return the gzip and deflate codings in the Content-Encoding `headers` of a response.

    The codings are in the order in which the server applied them.

    Raises:
        MediaError: A coding is not supported.
        LimitExceeded: There are more than `MAX_CODINGS` codings.

    """
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    if undecoded := _UNDECODED.intersection(names):
        raise MediaError(
            f"{host} responded with content encoding {min(undecoded)}; only gzip and deflate are supported"
        )
    codings = [_DECODED[name] for name in names if name in _DECODED]
    if len(codings) > MAX_CODINGS:
        raise LimitExceeded(f"{host} responded with {len(codings)} content encodings; the limit is {MAX_CODINGS}")
    return codings


def decode_body(body: bytes, codings: list[str], max_bytes: int, host: str | None) -> bytes:
    """Decode all `codings` of `body`, starting with the last one.

    Raises:
        MediaError: The body is not valid in one of the codings, or is truncated.
        LimitExceeded: After decoding, the body has more than `max_bytes` bytes.

    """
    for coding in reversed(codings):
        try:
            body = _gunzip(body, max_bytes + 1) if coding == "gzip" else _inflate(body, max_bytes + 1)
        except (EOFError, zlib.error) as error:
            raise MediaError(f"{host} sent a body that is not valid {coding} or is truncated") from error
        if len(body) > max_bytes:
            raise LimitExceeded(
                f"{host} sent a {coding} body that decodes to more bytes than the limit of {max_bytes} for one item"
            )
    return body


def _gunzip(body: bytes, reach: int) -> bytes:
    """Return the first `reach` decoded bytes. Raise EOFError, zlib.error or LimitExceeded.

    If the bytes after a member are not the start of another member, they are ignored, as in browsers and urllib3.
    """
    if (num_members := body.count(_MEMBER_START)) > MAX_MEMBERS:
        raise LimitExceeded(f"the gzip body has {num_members} members; the limit is {MAX_MEMBERS}")
    data = bytearray()
    start = 0
    while True:
        inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while not inflater.eof and len(data) < reach and start < len(body):
            chunk = body[start : start + _CHUNK_BYTES]
            data += inflater.decompress(chunk, reach - len(data))
            start += len(chunk) - len(inflater.unused_data)
        if not inflater.eof and len(data) < reach:
            raise EOFError
        if len(data) >= reach or not body.startswith(_MEMBER_START, start):
            return bytes(data)


def _inflate(body: bytes, reach: int) -> bytes:
    """Return the first `reach` decoded bytes. Raise zlib.error or EOFError.

    RFC 9110, 8.4.1.2 defines deflate as the zlib format. Some servers send raw deflate data instead. This function
    accepts both, like other clients.
    """
    is_framed = len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0
    inflater = zlib.decompressobj(zlib.MAX_WBITS if is_framed else -zlib.MAX_WBITS)
    data = inflater.decompress(body, reach)
    if len(data) < reach and not inflater.eof:
        raise EOFError
    return data
