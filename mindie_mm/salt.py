"""Names of contents that only requests of one salt have in common: nobody learns from a cache what others asked."""

from __future__ import annotations

from blake3 import blake3


def salted(salt: str) -> blake3:
    """A hash to begin such a name with; the empty salt is everybody's."""
    return blake3(key=blake3(salt.encode()).digest()) if salt else blake3()
