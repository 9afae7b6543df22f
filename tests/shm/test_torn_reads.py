"""A slow reader never takes half of two contents for one: a writer, readers in other processes, constant reuse."""

from __future__ import annotations

import random

from mindie_mm.shm import Arena, ArraySpec, Ref, free

CYCLES = 3000
READERS = 3

READER = """
fresh = stale = torn = 0
while line := hear():
    name_word, shape_word, value = map(int, line.split())
    try:
        with attach(Ref.from_words(name_word, shape_word)) as view:
            copied = view["x"].copy()
            tail = view["y"].copy()
    except StaleReference:
        stale += 1
    else:
        whole = (copied == value).all() and (tail == value).all() and view.digest == bytes([value]) * 16
        fresh, torn = fresh + whole, torn + (not whole)
say(fresh, stale, torn)
"""


def test_what_verifies_is_whole(start) -> None:
    """Blocks are freed and their bytes used again while readers still copy them."""
    draw = random.Random(3)
    readers = [start(READER) for _ in range(READERS)]
    living: list[Ref] = []
    with Arena.create(1 << 20) as arena:
        for cycle in range(CYCLES):
            value = cycle % 251
            specs = {"x": ArraySpec((draw.randrange(1, 90_000),), "uint8"), "y": ArraySpec((7,), "int64")}
            while len(living) > 7 or (living and draw.random() < 0.4):
                free(living.pop(draw.randrange(len(living))))
            with arena.allocate(specs, path_file=None) as block:
                block["x"][...] = value
                block["y"][...] = value
                living.append(block.publish(bytes([value]) * 16))
            readers[cycle % READERS].say(*living[-1].to_words(), value)
        counts = []
        for reader in readers:
            reader.say()
            counts.append([int(count) for count in reader.hear().split()])
        fresh, stale, torn = map(sum, zip(*counts, strict=True))
        assert torn == 0
        assert fresh + stale == CYCLES
        assert fresh > 0
        assert stale > 0
