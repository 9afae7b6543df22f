"""How the media of a prompt become words: the interface of its two implementations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from mindie_mm.inputs import Media
from mindie_mm.tokenize.planning import PlannedItem


class PromptMedia(ABC):
    """The media of one prompt."""

    @abstractmethod
    async def plan(self, media: Sequence[Media]) -> list[PlannedItem]:
        """Read and plan all items of a prompt, in order. Call this once.

        No picture is decoded before all items are known to be within the caps.

        Raises:
            InputError: An item is wrong. The message names it.

        """

    @abstractmethod
    async def store(self, items: Sequence[PlannedItem], path_file: Path | None, salt: str) -> list[Sequence[int]]:
        """Write planned items to shared memory, record them in `path_file`, and return the words of each.

        On any failure, all of them are freed. `salt` is that of the digests.

        Raises:
            ArenaFull: There was no room in time.
            LimitExceeded: The items take more room than a request may have.
            SharedMemoryError: Shared memory cannot be used.
            InputError: An item cannot be decoded, or there is no path file. The message names the item.

        """


class MediaStage(ABC):
    """Where media are decoded."""

    @abstractmethod
    def prompt(self) -> AbstractAsyncContextManager[PromptMedia]:
        """Open the media of one prompt. Leaving the context closes their files."""

    @abstractmethod
    def close(self) -> None:
        """Release what the stage has made. Idempotent."""
