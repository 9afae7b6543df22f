"""The arena of a media stage, and how long its requests wait for room there."""

from __future__ import annotations

from dataclasses import dataclass

from mindie_mm.shm import Arena


@dataclass(frozen=True, slots=True)
class Room:
    """An arena in which the media of requests are stored."""

    arena: Arena
    wait_s: float
    """Maximum time in seconds that a request waits for memory."""
    is_own: bool = False
    """Whether `close` closes the arena."""

    def close(self) -> None:
        """Close the arena if `is_own` is set. This may be called repeatedly."""
        if self.is_own:
            self.arena.close()
