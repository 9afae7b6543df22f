"""Shards as arenas that live: their rows' words lead to them in whichever process mounts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mindie_mm.batch.output.shard import ShardRow
from mindie_mm.shm import Arena
from mindie_mm.tokenize.prompt import Prompt, put_words


@contextmanager
def reserved() -> Iterator[int]:
    """An arena number that no other process of this machine takes, so that a shard can be mounted under it.

    SharedMemoryError if /dev/shm has no room for the page that keeps it.
    """
    with Arena.create(1) as arena:
        yield arena.number


def renumbered(row: ShardRow, number: int) -> Prompt:
    """The row's prompt, its words leading to the arena of that number. CorruptReference."""
    assert row.prompt is not None
    refs = [replace(ref, arena=number) for ref in row.prompt.refs()]
    words = [(ref.name_word,) if ref.shape is None else ref.to_words() for ref in refs]
    return put_words(row.plain_prompt(), words)
