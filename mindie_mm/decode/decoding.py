"""The interface of decoding, which decoder processes or the caller's own process implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from mindie_mm.decode.decoder_messages import Planned
from mindie_mm.decode.jobs import Group
from mindie_mm.inputs import Kind, Media

S = TypeVar("S")


class Decoding(ABC, Generic[S]):
    """Planning and writing of media items.

    `S` is the type of the source of an item between planning and writing.
    """

    @abstractmethod
    async def read(self, group: Group, media: Media, counts: Mapping[Kind, int]) -> S:
        """Open or read the source of an item. It is kept until the files of `group` are closed.

        Args:
            group: Group of the item's request.
            media: The item.
            counts: Number of items of each kind in the prompt.

        Raises:
            InputError, MediaError, LimitExceeded: In the same cases as `read_source`.

        """

    @abstractmethod
    async def plan(self, group: Group, source: S) -> Planned:
        """Plan an item.

        Raises:
            InputError: The item is invalid, or has crashed two decoders (MediaError).
            OperationalError: The decoder has failed, two decoders have died (ProcessDied), or no decoder can be started
                or the pool is closed (NoProcess).

        """

    @abstractmethod
    async def digest(self, settings: str, source: S, salt: str) -> bytes:
        """Return the digest of an item's content with `Plan.settings`. `content_digest` describes the arguments."""

    @abstractmethod
    async def write(self, group: Group, source: S, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Decode a planned item to `arrays`, which have the dtypes and shapes of its plan.

        Raise the same errors as `plan`.
        """

    @abstractmethod
    def let_go(self, group: Group) -> None:
        """Free the decoders that are reserved for `group`, so that other requests can use them."""
