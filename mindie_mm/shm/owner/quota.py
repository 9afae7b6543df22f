"""Quotas: the number of bytes of an arena that each request uses, and the maximum for one request."""

from __future__ import annotations

from mindie_mm.errors import LimitExceeded


class Quotas:
    """Number of bytes that each request uses, with the same limit for every request. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[bytes, int] = {}

    def has_room(self, request: bytes, size: int) -> bool:
        """Return whether the request may use `size` more bytes."""
        return self._held.get(request, 0) + size <= self.limit_bytes

    def require(self, request: bytes, size: int) -> None:
        """Raise LimitExceeded unless the request may use `size` more bytes."""
        if not self.has_room(request, size):
            raise LimitExceeded(
                f"the block has {size} bytes and its request already holds {self._held.get(request, 0)} bytes; "
                f"a request may hold at most {self.limit_bytes} bytes of an arena"
            )

    def add(self, request: bytes, nbytes: int) -> None:
        """Add `nbytes` to the number of bytes that the request uses."""
        self._held[request] = self._held.get(request, 0) + nbytes

    def remove(self, request: bytes, nbytes: int) -> None:
        """Subtract `nbytes` from the number of bytes that the request uses."""
        self._held[request] -= nbytes
        if not self._held[request]:
            del self._held[request]
