"""The interface of media stages. They write media to shared memory, and write handle words into prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from mindie_mm.inputs import Media
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.prompt import Prompt


class RequestMedia(ABC):
    """The media of all prompts of one request."""

    @abstractmethod
    async def plan(self, prompts: Sequence[Sequence[Media]]) -> list[list[PlannedItem]]:
        """Read and plan all items of each prompt, in order. Call this method once.

        Pictures of a prompt are not decoded until all items of the prompt have been checked against the limits.

        Raises:
            InputError: An item is invalid. The message says which item.

        """

    @abstractmethod
    async def fill(
        self, prompts: Sequence[Prompt], items: Sequence[tuple[PlannedItem, str]], path_file: Path | None
    ) -> list[Prompt]:
        """Write planned items to shared memory, record them in `path_file`, and return the prompts with handle words.

        Each item is paired with the salt of its digest. The items have the order of the spans of all prompts. Call this
        method once, because blocks for all items are allocated together. If anything fails, all blocks are freed.

        Raises:
            ArenaFull: Not enough memory became free in time.
            LimitExceeded: The items need more memory than a request may use.
            SharedMemoryError: Shared memory cannot be used.
            InputError: An item cannot be decoded, or `path_file` is missing. The message says which item.

        """


class MediaStage(ABC):
    """A stage that decodes media and writes them to shared memory."""

    caps: MediaCaps
    """Limits on media."""

    @abstractmethod
    async def num_pages(self, document: Media) -> int:
        """Return the number of pages of a PDF.

        Raises:
            InputError: The model does not accept images, or the PDF cannot be read.

        """

    @abstractmethod
    def request(self) -> AbstractAsyncContextManager[RequestMedia]:
        """Return a context manager for the media of one request. On exit, it closes the files of the media."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the stage. This may be called repeatedly."""
