"""Media that clients have named by a `uuid`. Later requests may leave out the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from cachetools import LRUCache

from mindie_mm.errors import InputError, naming
from mindie_mm.inputs import Media, Message, Paths, messages_with_media
from mindie_mm.processes.tasks import in_thread
from mindie_mm.salt import salted

MAX_ENTRIES = 4096
"""Maximum number of items. Each item needs some memory in addition to its bytes."""
_MAX_SHOWN = 40

_Data = bytes | tuple[bytes, ...]
"""The file of an item, or the files of its frames or of its embeddings and their grid."""


class KeptMedia:
    """The encoded bytes of the most recently used items, at most `max_bytes` in total.

    Only a request with the same API key, `cache_salt`, kind and `uuid` reaches an item. All caches after this store
    identify an item by its bytes, never by its `uuid`.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create an empty store. `max_bytes` is the maximum total size of the items."""
        self._max_bytes = max_bytes
        self._items = LRUCache[bytes, _Data](max_bytes, getsizeof=_size)
        """Items by `_key`."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Total size of the items."""
        return int(self._items.currsize)

    def filled(self, messages: Sequence[Message], owner: bytes, salt: str) -> list[Message]:
        """Return messages with the data of the items that have only a `uuid`, as far as their data are kept.

        `require_sources` refuses the others, when their plans have been looked up.

        Args:
            messages: Messages of a chat.
            owner: Digest of the API key.
            salt: The request's `cache_salt`.

        """

        def with_data(media: Media) -> Media:
            if media.source is not None or not self._max_bytes:
                return media
            return msgspec.structs.replace(media, source=self._items.get(_key(media, owner, salt)))

        return messages_with_media(messages, with_data)

    def require_sources(self, media: Sequence[Media], known: Sequence[object | None]) -> None:
        """Raise InputError if an item of a prompt has neither data nor an entry in `known`."""
        counts = Counter[str]()
        for index, (item, one) in enumerate(zip(media, known, strict=True)):
            if item.source is None and one is None:
                with naming(f"media item {index} ({item.kind})"):
                    raise self._unknown(item, counts[item.kind])
            counts[item.kind] += 1

    async def keep(self, media: Sequence[Media], paths: Sequence[Paths], owner: bytes, salt: str) -> None:
        """Keep the items that have a `uuid`. `paths` has the files of each item.

        `owner` and `salt` have the same meaning as in `filled`. An item larger than `max_bytes` is not kept, but
        the earlier item with the same `uuid` is removed. Items whose data `filled` has added are kept already.
        """
        for item, files in zip(media, paths, strict=True):
            if item.uuid is None or not self._max_bytes or _is_data(item.source):
                continue
            data = await in_thread(partial(_read, files, self._max_bytes))
            self._put(_key(item, owner, salt), data)

    def _unknown(self, media: Media, index_in_kind: int) -> InputError:
        assert media.uuid is not None, "an item without data has a uuid"
        if not self._max_bytes:
            return InputError("media are not kept by uuid (--media-uuid-bytes is 0), so send the data each time")
        shown = media.uuid[:_MAX_SHOWN]
        return InputError(  # begins with vLLM's words, by which clients recognize that they must send the data again
            f"Cache miss for {media.kind} at index {index_in_kind} but data is not provided: no data are kept for "
            f"the uuid {shown!r}; send the data again, with the same uuid"
        )

    def _put(self, key: bytes, data: _Data | None) -> None:
        self._items.pop(key, None)
        if data is None:
            return
        self._items[key] = data
        if len(self._items) > MAX_ENTRIES:
            self._items.popitem()


def _key(media: Media, owner: bytes, salt: str) -> bytes:
    """Return the key of an item. None of its parts can contain the separator, because a `uuid` is printable."""
    assert media.uuid is not None
    parts = [owner.hex(), "embeddings" if media.is_embeddings else "", media.kind, media.uuid]
    return salted(salt).update("\0".join(parts).encode()).digest()


def _is_data(source: Any) -> bool:
    """Return whether the source of an item is kept data: it is bytes, which no JSON of a client contains."""
    return isinstance(source[0] if isinstance(source, tuple) else source, bytes)


def _size(data: _Data) -> int:
    return len(data) if isinstance(data, bytes) else sum(map(len, data))


def _read(files: Paths, max_bytes: int) -> _Data | None:
    """Return the content of an item's files, or None if it has more than `max_bytes`."""
    paths = [files] if isinstance(files, Path) else files
    if sum(path.stat().st_size for path in paths) > max_bytes:
        return None
    return files.read_bytes() if isinstance(files, Path) else tuple(path.read_bytes() for path in paths)
