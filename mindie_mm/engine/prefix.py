"""Keys of a sequence's blocks in the KV cache: blocks of one key hold the same keys and values.

A block's key is a hash over all that its keys and values depend on, with the key of the block before it: the ids,
which item's features stand on which slots, positions, and groups with whatever lies in them.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch

from mindie_mm.engine.sequence import Sequence
from mindie_mm.nn.model import Model
from mindie_mm.nn.splice import MediaItem

KEY_BYTES = 32


def share(sequence: Sequence, model: Model) -> None:
    """Lets other sequences share the blocks of `sequence`, a new one, as far as the model's tokens can be named."""
    sequence.num_shareable = _num_shareable(model, sequence)
    if not sequence.num_shareable:
        return
    root = hashlib.blake2b(digest_size=KEY_BYTES)
    if model.prefix_sees_length:
        root.update(sequence.num_prompt.to_bytes(8))
    if model.prefix_sees_later_media:
        for item in sequence.items:
            root.update(_identity(item))
    sequence.root_key = root.digest()


def _num_shareable(model: Model, sequence: Sequence) -> int:
    """How many of its tokens, from the first, depend on no item without a digest."""
    for item in sequence.items:
        if item.digest is None:
            first = next((start for start, stop in sequence.spans if start <= item.start < stop), item.start)
            return 0 if model.prefix_sees_later_media else first
    return sys.maxsize


def extend_keys(sequence: Sequence, block_size: int, stop: int) -> None:
    """Adds to `sequence.keys` those of the full blocks among its first `stop` tokens, as far as they can have one."""
    known = len(sequence.keys)
    count = min(stop, sequence.num_shareable) // block_size
    if count <= known:
        return
    key = sequence.keys[-1] if known else sequence.root_key
    for index in range(known, count):
        start = index * block_size
        block = hashlib.blake2b(key, digest_size=KEY_BYTES)
        block.update(_content(sequence, start, start + block_size))
        for span in sequence.spans:
            # Its tokens see those of the group behind the block, too.
            if span[0] < start + block_size and span[1] > start:
                block.update(_span_key(sequence, span))
        key = block.digest()
        sequence.keys.append(key)


def _span_key(sequence: Sequence, span: tuple[int, int]) -> bytes:
    if span not in sequence.span_keys:
        sequence.span_keys[span] = hashlib.blake2b(_content(sequence, *span), digest_size=KEY_BYTES).digest()
    return sequence.span_keys[span]


def _content(sequence: Sequence, start: int, stop: int) -> bytes:
    """What tokens [start, stop) are; every part is of a length that those before it tell."""
    parts = [
        np.array([stop - start], np.int64),
        sequence.ids(start, stop),
        sequence.positions(start, stop).contiguous().numpy(),
    ]
    if sequence.groups is not None:
        groups = torch.full((stop - start,), -1, dtype=torch.int64)
        known = sequence.groups[start:stop]
        groups[: len(known)] = known
        parts.append(groups.numpy())
    content = [part.tobytes() for part in parts]
    for item in sequence.items_in(start, stop):
        first, last = item.features_in(start, stop)
        content.append(_identity(item))
        content.append(np.array([first, last - first], np.int64).tobytes())
        content.append((item.slots[first:last] - start).tobytes())
    return b"".join(content)


def _identity(item: MediaItem) -> bytes:
    """Names an item's features; the shape goes in although the digest should tell, since wrong pictures cost more."""
    assert item.digest is not None
    shape = item.shape.to_array().tobytes()
    return hashlib.blake2b(len(shape).to_bytes(8) + shape + item.digest, digest_size=KEY_BYTES).digest()
