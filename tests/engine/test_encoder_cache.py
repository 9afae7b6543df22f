"""Features are kept by content, up to a number of bytes that is true."""

from dataclasses import dataclass

import torch

from mindie_mm.engine.encoder_cache import EncoderCache


@dataclass(frozen=True)
class Item:
    """What the cache looks at of a media item."""

    digest: bytes | None
    ref: str = ""


def features(rows=4):
    return torch.zeros(rows, 8)  # 32 bytes a row


def test_the_least_recently_used_goes_first():
    cache = EncoderCache(3 * 128)
    items = [Item(bytes([i])) for i in range(4)]
    for item in items[:3]:
        cache.put(item, features())
    assert cache.get(items[0]) is not None
    cache.put(items[3], features())
    assert [item in cache for item in items] == [True, False, True, True]


def test_one_item_always_fits():
    cache = EncoderCache(1)
    cache.put(Item(b"a"), features())
    assert Item(b"a") in cache
    cache.put(Item(b"b"), features())
    assert Item(b"a") not in cache


def test_a_part_of_a_larger_tensor_does_not_keep_the_whole():
    cache = EncoderCache(10**6)
    whole = features(1000)
    cache.put(Item(b"a"), whole[:4])
    assert cache.get(Item(b"a")).untyped_storage().nbytes() == 128


def test_without_a_digest_the_reference_is_the_key():
    cache = EncoderCache(10**6)
    cache.put(Item(None, "one"), features())
    assert Item(None, "one") in cache
    assert Item(None, "two") not in cache
    cache.drop(Item(None, "one"))
    assert Item(None, "one") not in cache
