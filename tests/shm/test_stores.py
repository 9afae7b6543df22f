"""Tests for an arena through the functions that its users call."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mindie_mm.errors import InputError, LimitExceeded, SharedMemoryError
from mindie_mm.shm import Arena, ArraySpec, Ref, attach

SPECS = {"pixel_values": ArraySpec((37, 588), "uint8"), "grid": ArraySpec((3,), "int64")}
CAPACITY = 1 << 20


@pytest.fixture
def store() -> Iterator[Arena]:
    with Arena.create(CAPACITY) as arena:
        yield arena


def test_blocks_are_written_and_read_in_place(store: Arena) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (37, 588), np.uint8)
    refs = []
    for number in range(5):
        with store.allocate(SPECS, path_file=None) as block:
            assert list(block) == list(SPECS)
            block["pixel_values"][...] = pixels + number
            block["grid"][...] = (1, 2, number)
            refs.append(block.publish(bytes([number]) * 32))
    assert store.num_blocks == 5
    assert 5 * pixels.nbytes <= store.used_bytes <= store.capacity_bytes
    for number, ref in enumerate(refs):
        assert Ref.from_words(*ref.to_words()) == ref
        assert (ref.arena, ref.dtype, ref.shape) == (store.number, "uint8", (37, 588))
        with attach(ref) as view:
            assert np.array_equal(view["pixel_values"], pixels + number)
            assert view["grid"].tolist() == [1, 2, number]
            assert view.digest == bytes([number]) * 32
            assert not view["grid"].flags.writeable


def test_an_unpublished_block_returns_its_space(store: Arena) -> None:
    used = store.used_bytes
    with pytest.raises(ZeroDivisionError), store.allocate(SPECS, path_file=None) as block:
        block["grid"][...] = 1 // 0
    assert store.num_blocks == 0
    assert store.used_bytes == used


def test_a_block_that_does_not_fit_is_refused(store: Arena) -> None:
    with pytest.raises(LimitExceeded, match=str(CAPACITY)):
        store.allocate({"x": ArraySpec((CAPACITY + 1,), "uint8")}, path_file=None)
    with pytest.raises(LimitExceeded, match="bits of a shape word; the limits are 47"):
        store.allocate({"x": ArraySpec((1, 2**31, 2**23), "uint8")}, path_file=None)


def test_a_block_cannot_be_published_after_its_context_has_ended(store: Arena) -> None:
    with store.allocate(SPECS, path_file=None) as left:
        pass
    with store.allocate(SPECS, path_file=None) as block:
        block["grid"][...] = 7
        ref = block.publish()
    with pytest.raises(SharedMemoryError, match="after its context has ended"):
        left.publish()
    assert attach(ref)["grid"].tolist() == [7, 7, 7]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_changes_nothing(store: Arena) -> None:
    with store.allocate(SPECS, path_file=None) as block:
        child = os.fork()
        if child == 0:
            store.free(block)
            _ = store.num_blocks, store.used_bytes
            store.__exit__(None, None, None)
            store.__exit__(SystemExit, SystemExit(), None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        block["grid"][...] = 3
        ref = block.publish()
    with attach(ref) as view:
        assert view["grid"].tolist() == [3, 3, 3]


def test_many_threads_fill_blocks(store: Arena) -> None:
    refs: dict[int, Ref] = {}

    def fill(number: int) -> None:
        with store.allocate(SPECS, path_file=None) as block:
            block["pixel_values"][...] = number
            block["grid"][...] = number
            refs[number] = block.publish()

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ref in refs.items():
        with attach(ref) as view:
            assert (view["pixel_values"] == number).all()
            assert (view["grid"] == number).all()


@pytest.mark.parametrize("specs", [{5: ArraySpec((1,), "bool")}, {"x": (1, 2)}])
def test_a_spec_that_is_not_an_array_is_refused(store: Arena, specs: dict[str, ArraySpec]) -> None:
    with pytest.raises(InputError, match="must have a string as its name and an ArraySpec"):
        store.allocate(specs, path_file=None)


def test_a_closed_store_refuses_allocation(store: Arena) -> None:
    store.close()
    store.close()
    with pytest.raises(SharedMemoryError, match="closed"):
        store.allocate(SPECS, path_file=None)
