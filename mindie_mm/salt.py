"""Salted digests of contents.

Requests with different salts do not share cache entries. A client therefore cannot use a cache to learn what other
clients have sent.
"""

from __future__ import annotations

from blake3 import blake3


def salted(salt: str) -> blake3:
    """Return a hash object keyed by `salt`. Clients without a salt share the empty salt."""
    return blake3(key=blake3(salt.encode()).digest()) if salt else blake3()
