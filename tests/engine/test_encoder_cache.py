"""Tests for the encoder cache, which stores features by content, up to a size in bytes."""

from types import SimpleNamespace

import numpy as np
import torch

from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.nn.splice import MediaItem
from mindie_mm.shm.format.item import MediaShape


def media(digest, ref=""):
    return MediaItem(np.arange(1), SimpleNamespace(digest=digest, ref=ref), MediaShape("image", 5, 1))


def features(rows=4):
    return torch.zeros(rows, 8)  # 32 bytes per row


def test_the_least_recently_used_item_is_evicted_first():
    cache = EncoderCache(3 * 128)
    items = [media(bytes([i])) for i in range(4)]
    for item in items[:3]:
        cache.put(item, features())
    assert cache.get(items[0]) is not None
    cache.put(items[3], features())
    assert [item in cache for item in items] == [True, False, True, True]


def test_one_item_always_fits():
    cache = EncoderCache(1)
    cache.put(media(b"a"), features())
    assert media(b"a") in cache
    cache.put(media(b"b"), features())
    assert media(b"a") not in cache


def test_a_slice_does_not_keep_the_whole_tensor_alive():
    cache = EncoderCache(10**6)
    whole = features(1000)
    cache.put(media(b"a"), whole[:4])
    assert cache.get(media(b"a")).untyped_storage().nbytes() == 128


def test_an_item_without_a_digest_is_keyed_by_its_reference():
    cache = EncoderCache(10**6)
    cache.put(media(None, "one"), features())
    assert media(None, "one") in cache
    assert media(None, "two") not in cache
    cache.free(media(None, "one"))
    assert media(None, "one") not in cache
