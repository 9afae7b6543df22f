"""Fixtures: decoder processes with a small checkpoint and an arena, and the arrays that they must compute."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mindie_mm.decode import Decoders, Group
from mindie_mm.decode.decoder_messages import DecoderSetup
from mindie_mm.decode.nursery import load_processor
from mindie_mm.decode.parcel import Parcel, pack_copy, pack_file
from mindie_mm.decode.planning import plan_item
from mindie_mm.inputs import Media
from mindie_mm.media.source import read_source
from mindie_mm.nn.family import Plan, Processor
from mindie_mm.processes.restarts import Starter
from mindie_mm.settings.config import MediaCaps
from mindie_mm.shm import Arena, Block, release

Arrays = dict[str, np.ndarray[Any, Any]]


class Bench:
    """Two decoder processes and a spare one, with methods to plan and write items."""

    def __init__(self, decoders: Decoders, arena: Arena, processor: Processor, path_file: Path) -> None:
        self.decoders = decoders
        self.arena = arena
        self.path_file = path_file
        self._processor = processor

    def arrays_in_process(self, media: Media) -> Arrays:
        """Decode an item in this process, and return its arrays."""
        plan, write = plan_item(self._processor, media, read_source(media), {media.kind: 1}, MediaCaps())
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        write(arrays)
        return arrays

    async def plan(self, media: Media, group: Group | None = None) -> Plan:
        with packed(media) as parcel:
            return await self.decoders.plan(group or Group(), parcel)

    async def arrays(self, media: Media, before_write: Callable[[], object] = lambda: None) -> Arrays:
        """Let the decoders plan and write an item, and return its arrays.

        Call `before_write` between planning and writing.
        """
        with packed(media) as parcel:
            plan = await self.decoders.plan(Group(), parcel)
            with self.block(plan) as block:
                before_write()
                await self.write(parcel, plan, block)
                return {name: np.array(array) for name, array in block.items()}

    @contextmanager
    def block(self, plan: Plan) -> Iterator[Block]:
        """Yield a block for an item. Free the block at the end."""
        with self.arena.allocate(plan.specs, path_file=self.path_file) as block:
            yield block

    async def write(self, parcel: Parcel, plan: Plan, block: Block, group: Group | None = None) -> None:
        arrays = {name: block[name] for name in plan.specs}
        await self.decoders.write(group or Group(), parcel, arrays)

    async def whole(self) -> list[int]:
        """Wait until the decoders run, and return their pids."""
        await until(lambda: len(self.decoders.pids) == 3)
        return self.decoders.pids

    @property
    def nursery(self) -> psutil.Process:
        return psutil.Process(psutil.Process(self.decoders.pids[0]).ppid())


@contextmanager
def packed(media: Media) -> Iterator[Parcel]:
    counts = {media.kind: 1}
    parcel = pack_file(media, counts) or pack_copy(media, counts)
    try:
        yield parcel
    finally:
        os.close(parcel.descriptor)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes with SIGSTOP, as if they hung. At the end, let the processes that still exist continue."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def until(condition: Callable[[], object]) -> None:
    """Poll until another process has changed something. No event announces the change."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - no event announces the change
            await asyncio.sleep(0.002)


def busy(decoders: Decoders) -> list[int]:
    """Return the pids of the decoders that are processing an item."""
    return [process.pid for process in decoders._processes if process.job is not None]


def same(arrays: Arrays, others: Arrays) -> bool:
    return arrays.keys() == others.keys() and all(np.array_equal(arrays[name], others[name]) for name in arrays)


@pytest.fixture(scope="module")
async def running(random_checkpoint: Path) -> AsyncIterator[Decoders]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindie_mm.processes.supervised.Starter", partial(Starter, first_pause_s=0.01, last_pause_s=0.1))
        patch.setattr("mindie_mm.decode.decoders._PAUSE_S", 0.01)
        decoders = Decoders(DecoderSetup(str(random_checkpoint), None, MediaCaps()), 2**24)
        await decoders.open(2)
        yield decoders
        pids = decoders.pids
        await decoders.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture
async def bench(running: Decoders, random_checkpoint: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    setup = DecoderSetup(str(random_checkpoint), None, MediaCaps())
    with Arena.create(64 * 2**20) as arena:
        bench = Bench(running, arena, load_processor(setup), tmp_path / "shm_name.txt")
        await bench.whole()
        yield bench
        assert arena.num_blocks == 0
        release(bench.path_file)
