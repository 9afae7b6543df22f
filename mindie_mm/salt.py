"""Salted digests of contents.

Requests with different salts share no cache entries. A client therefore cannot learn the contents of other clients from
a cache.
"""

from __future__ import annotations

from blake3 import blake3


def salted(salt: str) -> blake3:
    """Return a hash object keyed by `salt`. Clients without a salt share the empty one."""
    return blake3(key=blake3(salt.encode()).digest()) if salt else blake3()
