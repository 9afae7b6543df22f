"""Salted digests of contents.

Requests with different salts do not share cache entries. A client therefore cannot use a cache to learn what other
clients have sent.
"""

from __future__ import annotations

from blake3 import blake3


def salted(salt: str, lora: str | None = None) -> blake3:
    """Return a hash object keyed by `salt`, and by the key of a LoRA adapter. Without a salt, the salt is empty."""
    if lora is not None:
        return blake3(key=blake3(blake3(salt.encode()).digest() + lora.encode()).digest())
    return blake3(key=blake3(salt.encode()).digest()) if salt else blake3()
