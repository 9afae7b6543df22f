"""Cache keys of KV blocks. Blocks with the same cache key contain the same keys and values.

The cache key of a block is a hash of the previous block's cache key and of everything that determines the block's
content: ids, positions, media features with their placeholder positions, all tokens of bidirectional spans, and the
LoRA adapter.
"""

from __future__ import annotations

import sys

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mindie_mm.engine.requests.request import Request
from mindie_mm.nn.splice import MediaItem
from mindie_mm.salt import salted

KEY_BYTES = 32


def share(request: Request) -> None:
    """Prepare a new `request` for sharing its leading blocks, up to the first media item without a digest."""
    request.root_key = salted(request.params.cache_salt, request.params.lora).digest(KEY_BYTES)
    request.num_shareable = sys.maxsize
    if (item := next((item for item in request.items if item.digest is None), None)) is not None:
        starts = (start for start, stop in request.spans if start <= item.start < stop)
        request.num_shareable = next(starts, item.start)


def extend_keys(request: Request, block_size: int, stop: int) -> None:
    """Extend `request.keys` to all full, shareable blocks of the first `stop` tokens that have arrived."""
    known = len(request.keys)
    count = min(stop, len(request.token_ids), request.num_shareable) // block_size
    if count <= known:
        return
    key = request.keys[-1] if known else request.root_key
    rows = _rows(request, known * block_size, count * block_size)
    for start in range(known * block_size, count * block_size, block_size):
        end = start + block_size
        block = blake3(key)
        block.update(rows[start - known * block_size : end - known * block_size].tobytes())
        block.update(_media(request, start, end))
        for span in request.spans_in(start, end):
            block.update(_span_key(request, span))  # tokens also attend to the part of the span after the block
        key = block.digest(KEY_BYTES)
        request.keys.append(key)


def _rows(request: Request, start: int, stop: int) -> NDArray[np.int64]:
    """Return the id, positions and span of each token in [start, stop), int64 [tokens, columns]."""
    columns = [request.ids(start, stop), *request.positions(start, stop)]
    if request.span_ids is not None:
        known = request.span_ids[start:stop].numpy()
        columns.append(np.pad(known, (0, stop - start - len(known)), constant_values=-1))
    return np.stack(columns, axis=1)


def _media(request: Request, start: int, stop: int) -> bytes:
    """Serialize the identity and positions of the features in tokens [start, stop) without ambiguity."""
    parts: list[bytes] = []
    for item in request.items_in(start, stop):
        first, last = item.features_in(start, stop)
        slots = item.slots[first:last] - start
        parts += [_identity(item), np.array([first, len(slots)], np.int64).tobytes(), slots.tobytes()]
    return b"".join(parts)


def _span_key(request: Request, span: tuple[int, int]) -> bytes:
    if span not in request.span_keys:
        content = _rows(request, *span).tobytes() + _media(request, *span)
        request.span_keys[span] = blake3(content).digest(KEY_BYTES)
    return request.span_keys[span]


def _identity(item: MediaItem) -> bytes:
    """Return a hash of KEY_BYTES bytes that identifies an item's features."""
    assert item.digest is not None
    shape = np.array(
        item.shape.values, np.int64
    ).tobytes()  # avoids wrong cache hits if the digest does not cover the shape
    return blake3(len(shape).to_bytes(8) + shape + item.digest).digest(KEY_BYTES)
