"""The rule for rows at which workers die: a row is tried twice, and then skipped."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindie_mm.batch.input.source import Chunk
from mindie_mm.errors import ProcessDied

_TRIES = 2


@dataclass(slots=True)
class Deaths:
    """Rows at which workers died."""

    counts: dict[int, int] = field(default_factory=dict)
    """Number of each row at which a worker died, and the number of deaths there."""
    note: str = ""
    """Sentence to add to the error message of a row."""
    how: dict[int, str] = field(default_factory=dict)
    """Number of each row, and how the last worker exited there, if this is known."""

    def add(self, row: int, how: str) -> None:
        """Record a death at `row`. Raise the error of `require_skipped`."""
        self.counts[row] = self.counts.get(row, 0) + 1
        self.how[row] = how
        self.require_skipped()

    def require_skipped(self) -> None:
        """Raise ProcessDied if a worker died at a row that it should have skipped."""
        for row, count in self.counts.items():
            if count > _TRIES:
                raise ProcessDied(
                    f"a worker exited with {self._how(row)} at row {row} again, although this row was skipped"
                )

    def errors(self, chunk: Chunk) -> dict[int, str]:
        """Return the number and the error message of each row of a chunk that must not be tried again."""
        return {
            row: f"ProcessDied: the worker exited twice with {self._how(row)} at this row{self.note}"
            for row, count in self.counts.items()
            if count == _TRIES and chunk.first_row <= row < chunk.stop_row
        }

    def _how(self, row: int) -> str:
        return self.how.get(row, "an unknown status")
