"""Tests for the block pool: sharing, eviction order and reference counts."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.nn.model import Positions


def request(length=64):
    positions = Positions(torch.arange(length).unsqueeze(0))
    return Request("r", SamplingParams(), [0] * length, length, (), positions, None, 1, None)


def key(number):
    return number.to_bytes(32)


def test_blocks_without_a_key_are_reused_first_and_then_the_least_recently_freed():
    pool = BlockPool(6, 4)
    first, second, plain = request(), request(), request()
    for one, tokens in ((first, 8), (second, 8), (plain, 8)):
        pool.grow(one, tokens)
    for i, block in enumerate((*first.kv_blocks, *second.kv_blocks)):
        pool.keep(block, key(i))
    for one in (second, first, plain):
        pool.free(one)
    taken = request()
    pool.grow(taken, 8)
    assert pool.find([key(0), key(1)]) == [0, 1]
    assert pool.find([key(2), key(3)]) == [2, 3]
    pool.grow(taken, 12)
    assert pool.find([key(2), key(3)]) == [2], "the end of a prefix is evicted before its beginning"
    pool.grow(taken, 16)
    assert pool.find([key(2)]) == []
    assert pool.find([key(0), key(1)]) == [0, 1]
    assert taken.kv_blocks == [4, 5, 3, 2]


def test_cached_blocks_that_a_request_will_share_do_not_count_as_free():
    pool = BlockPool(3, 4)
    first, second = request(), request()
    pool.grow(first, 8)
    for i, block in enumerate(first.kv_blocks):
        pool.keep(block, key(i))
    assert pool.can_grow(second, 12, first.kv_blocks)
    pool.free(first)
    shared = pool.find([key(0), key(1)])
    assert pool.can_grow(second, 12, shared)
    assert not pool.can_grow(second, 16, shared)
    pool.share(second, shared)
    assert pool.usage == pytest.approx(2 / 3)
    assert not pool.can_grow(request(), 8)


def test_a_key_stays_with_the_first_block_that_has_it():
    pool = BlockPool(4, 4)
    first, second = request(), request()
    pool.grow(first, 4)
    pool.grow(second, 4)
    for one in (first, second):
        pool.keep(one.kv_blocks[0], key(7))
    assert pool.find([key(7)]) == first.kv_blocks


def test_requests_have_consecutive_blocks_when_all_free_blocks_have_keys():
    pool, keys = BlockPool(64, 4), itertools.count()
    num_jumps = 0
    for _ in range(40):
        one = request()
        pool.grow(one, 20)
        for tokens in range(21, 47):  # as in decode steps. The last block is not full
            pool.grow(one, tokens)
        num_jumps += sum(after - before != 1 for before, after in itertools.pairwise(one.kv_blocks))
        for block in one.kv_blocks[:-1]:
            pool.keep(block, key(next(keys)))
        pool.free(one)
    assert num_jumps <= 40 * 12 / 64 + 1, "only where the pool ends"


def test_a_recently_freed_block_with_a_key_is_not_taken_for_being_the_next():
    pool = BlockPool(8, 4)
    recent, old, growing = request(), request(), request()
    pool.grow(growing, 4)
    pool.grow(recent, 8)
    pool.grow(old, 20)
    for i, block in enumerate((*recent.kv_blocks, *old.kv_blocks)):
        pool.keep(block, key(i))
    pool.free(old)
    pool.free(recent)
    pool.grow(growing, 8)
    assert growing.kv_blocks == [0, 7]
    assert pool.find([key(0), key(1)]) == [1, 2]


def test_random_operations_keep_the_reference_counts_right():
    generator = np.random.default_rng(0)
    pool, alive = BlockPool(24, 4), []
    for _ in range(4000):
        action = generator.integers(4)
        if action == 0 and len(alive) < 6:
            new = request()
            shared = pool.find(key(int(i)) for i in generator.integers(40, size=3))
            wanted = int(generator.integers(1, 64))
            if pool.num_needed(wanted) >= len(shared) == len(set(shared)) and pool.can_grow(new, wanted, shared):
                pool.share(new, shared)
                pool.grow(new, wanted)
                alive.append(new)
        elif action == 1 and alive:
            one = alive[generator.integers(len(alive))]
            wanted = len(one.kv_blocks) * 4 + int(generator.integers(9))
            if pool.can_grow(one, wanted):
                pool.grow(one, wanted)
        elif action == 2 and alive:
            one = alive[generator.integers(len(alive))]
            block = one.kv_blocks[generator.integers(len(one.kv_blocks))]
            if block not in pool._keys:
                pool.keep(block, key(int(generator.integers(40))))
        elif action == 3 and alive:
            pool.free(alive.pop(generator.integers(len(alive))))
        held = Counter(block for one in alive for block in one.kv_blocks)
        assert all(pool._holders[block] == held[block] for block in range(24))
        assert sorted([*pool._free, *held]) == list(range(24))
        assert {block: name for name, block in pool._blocks.items()} == pool._keys
