"""The interface of media stages, which turn the media of a request into words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from mindie_mm.inputs import Media
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize.planning import PlannedItem


class RequestMedia(ABC):
    """The media of all prompts of one request."""

    @abstractmethod
    async def plan(self, prompts: Sequence[Sequence[Media]]) -> list[list[PlannedItem]]:
        """Read and plan all items of each prompt, in order. Call this once.

        No picture is decoded before all items of its prompt are known to be within the caps.

        Raises:
            InputError: An item is wrong. The message names it.

        """

    @abstractmethod
    async def store(self, items: Sequence[tuple[PlannedItem, str]], path_file: Path | None) -> list[Sequence[int]]:
        """Write planned items to shared memory, record them in `path_file`, and return the words of each.

        Each item comes with the salt of its digest. Call this once, because the items get room together. On any
        failure, all of them are freed.

        Raises:
            ArenaFull: There was no room in time.
            LimitExceeded: The items take more room than a request may have.
            SharedMemoryError: Shared memory cannot be used.
            InputError: An item cannot be decoded, or there is no path file. The message names the item.

        """


class MediaStage(ABC):
    """A stage that decodes media and stores them."""

    caps: MediaCaps
    """Limits on media."""

    @abstractmethod
    async def num_pages(self, document: Media) -> int:
        """Return the number of pages of a PDF.

        Raises:
            InputError: The model takes no images, or the PDF cannot be read.

        """

    @abstractmethod
    def request(self) -> AbstractAsyncContextManager[RequestMedia]:
        """Open the media of one request. Leaving the context closes their files."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the stage. Idempotent."""
