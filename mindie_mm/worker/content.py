"""Describes the content of a request, its media and the beginning of its prompt, so that an engine can be chosen.

The ids of a prompt contain only handles. The digests of its media are in the headers of their blocks, which this
process reads from shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import MindieMMError
from mindie_mm.routing import Content
from mindie_mm.salt import salted
from mindie_mm.shm import Ref, View, is_name_word
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mapped import mapped_arena

BLOCK_TOKENS = 64
"""Number of tokens of a block at the beginning of a prompt. Shorter blocks would take more time to hash, and KV blocks
of most devices are shorter."""
_GROWTH = 32
"""The length of a block is the larger of `BLOCK_TOKENS` and 1/32 of the number of tokens before it, rounded down to a
multiple of `BLOCK_TOKENS`. Long prompts thus have few blocks. The event loop looks up each block for each engine."""

_KEY_BYTES = 16
_AT = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of one request."""

    media: list[Content]
    prefix: list[Content]
    """Blocks of the prompt. The key of a block depends on all tokens and media up to its end."""

    @property
    def first_key(self) -> bytes:
        """Key of the first item, or else of the first block, or else empty."""
        return next((content.key for content in (*self.media, *self.prefix)), b"")


def contents_of(ids: NDArray[np.int64], cache_salt: str, lora: str | None = None) -> Contents:
    """Return the content of a prompt, up to the first item without a digest.

    Args:
        ids: Prompt ids with handle words, int64 [T].
        cache_salt: Salt of the request. Requests with different salts have no content in common.
        lora: Key of the request's LoRA adapter, or None. Requests with different adapters have no prefix in common.

    """
    media: list[Content] = []
    chain, hashed, known = salted(cache_salt, lora), 0, len(ids)
    prefix: list[Content] = []
    plain = np.where(ids < 0, 0, ids)

    def extend(stop: int) -> None:
        """Hash all whole blocks of the first `stop` tokens."""
        nonlocal hashed
        while hashed + (length := _block_tokens(hashed)) <= stop:
            chain.update(plain[hashed : hashed + length].tobytes())
            hashed += length
            prefix.append(Content(chain.digest(_KEY_BYTES), length))

    for at, item in _items(ids):
        extend(at)
        if item is None:
            known = at
            break
        media.append(item)
        chain.update(_AT.pack(at) + item.key)
    extend(known)
    return Contents(media, prefix)


def _block_tokens(start: int) -> int:
    """Return the length of the block that begins at token `start`. It must depend on nothing else."""
    return BLOCK_TOKENS * max(1, start // (_GROWTH * BLOCK_TOKENS))


def _items(ids: NDArray[np.int64]) -> Iterator[tuple[int, Content | None]]:
    """Yield the index of each item's first handle word, and the item. The item is None if its digest is unknown."""
    words = np.flatnonzero(ids < 0).tolist()
    for at in words:
        name_word = int(ids[at])
        if is_name_word(name_word):
            yield at, _item(name_word)
        elif at == words[0]:  # another program's format
            yield at, None


def _item(name_word: int) -> Content | None:
    """Read the digest and the number of features of an item. Return None if its block is gone or has no digest."""
    try:
        ref = Ref.from_words(name_word, None)
        view = View(mapped_arena(ref.arena), ref)
        return None if view.digest is None else Content(view.digest, MediaShape.of(view).num_features)
    except MindieMMError:  # the engine reports the error
        return None
