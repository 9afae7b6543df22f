"""Tests for decoder processes that die or hang, and many requests that share the decoders."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import struct
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from mindie_mm.decode import Decoders, Group
from mindie_mm.decode.decoder_messages import DecoderSetup, Written
from mindie_mm.errors import MediaError, NoProcess, ProcessDied
from mindie_mm.inputs import Media
from mindie_mm.settings.config import MediaCaps
from tests.decode.conftest import Bench, busy, packed, same, stopped, until
from tests.media_samples import encoded, photograph

pytestmark = pytest.mark.usefixtures("copied_workers")

SMALL = Media("image", encoded(photograph("chelsea.png", (150, 120))))


def framed(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


async def kill_and_wait(bench: Bench, number: int, *pids: int) -> None:
    """Send signal `number` to decoders, and wait until new decoders have replaced them."""
    for pid in pids:
        os.kill(pid, number)
    await until(lambda: not set(pids) & set(bench.decoders.pids))
    await bench.whole()


async def test_an_item_is_planned_again_when_its_decoder_is_killed_while_planning(bench: Bench) -> None:
    before = await bench.whole()
    with stopped(*before):
        task = asyncio.create_task(bench.arrays(SMALL))
        await until(lambda: busy(bench.decoders))
        (pid,) = busy(bench.decoders)
        os.kill(pid, signal.SIGKILL)
    assert same(await task, bench.arrays_in_process(SMALL))
    assert pid not in await bench.whole()


async def test_an_item_is_written_again_when_its_decoder_is_killed_while_writing(bench: Bench) -> None:
    before = await bench.whole()
    with packed(SMALL) as parcel:
        plan = await bench.decoders.plan(Group(), parcel)
        with bench.block(plan) as block, stopped(*before):
            task = asyncio.create_task(bench.write(parcel, plan, block))
            await until(lambda: busy(bench.decoders))
            (pid,) = busy(bench.decoders)
            os.kill(pid, signal.SIGKILL)
            for other in set(before) - {pid}:
                os.kill(other, signal.SIGCONT)
            await task
            assert same(dict(block), bench.arrays_in_process(SMALL))


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, ProcessDied, "two decoders died while decoding the item; the second died with status -9"),
        (signal.SIGSEGV, MediaError, "the item crashed two decoders; the second died with SIGSEGV"),
        (signal.SIGABRT, MediaError, "the item crashed two decoders; the second died with SIGABRT"),
    ],
)
async def test_an_item_that_kills_two_decoders_fails_alone(
    bench: Bench, number: int, error: type[Exception], message: str
) -> None:
    before = await bench.whole()
    with stopped(*before):
        task = asyncio.create_task(bench.plan(SMALL))
        for _ in range(2):
            await until(lambda: set(busy(bench.decoders)) & set(before))
            (pid,) = set(busy(bench.decoders)) & set(before)
            os.kill(pid, number)
            with suppress(ProcessLookupError):  # the process does not exist any more if the signal was SIGKILL
                os.kill(pid, signal.SIGCONT)  # a stopped process handles no other signal
            await until(lambda pid=pid: pid not in bench.decoders.pids)
        other = asyncio.create_task(bench.arrays(SMALL))
        with pytest.raises(error, match=message):
            await task
    assert same(await other, bench.arrays_in_process(SMALL))


async def test_an_idle_decoder_that_dies_is_replaced_and_fails_no_item(bench: Bench) -> None:
    for _ in range(2):
        await kill_and_wait(bench, signal.SIGKILL, *await bench.whole())
        assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


async def test_a_decoder_that_hangs_over_a_cancelled_item_is_killed(bench: Bench) -> None:
    before = await bench.whole()
    with packed(SMALL) as parcel:
        plan = await bench.decoders.plan(Group(), parcel)
        with bench.block(plan) as block, stopped(*before):
            task = asyncio.create_task(bench.write(parcel, plan, block))
            await until(lambda: busy(bench.decoders))
            (pid,) = busy(bench.decoders)
            for other in set(before) - {pid}:
                os.kill(other, signal.SIGCONT)
            task.cancel()
            answered = asyncio.create_task(bench.arrays(SMALL))
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not psutil.pid_exists(pid))
            assert same(await answered, bench.arrays_in_process(SMALL))


async def test_a_cancelled_item_that_waits_for_a_decoder_ends_no_decoder(bench: Bench) -> None:
    before = await bench.whole()
    with stopped(*before):
        items = [asyncio.create_task(bench.plan(SMALL)) for _ in range(3)]
        await until(lambda: len(busy(bench.decoders)) == 2)
        items[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await items[2]
    await asyncio.gather(*items[:2])
    assert set(await bench.whole()) == set(before)


async def test_all_decoders_work_at_once(bench: Bench) -> None:
    with stopped(*await bench.whole()):
        items = [asyncio.create_task(bench.plan(SMALL)) for _ in range(3)]
        await until(lambda: len(busy(bench.decoders)) == 2)
    await asyncio.gather(*items)


async def test_a_request_of_many_items_delays_another_only_by_the_items_being_decoded(bench: Bench) -> None:
    """Only one decoder continues, so that items are done in the order in which they were begun."""
    many, done = Group(), list[str]()

    async def plan(name: str, group: Group) -> None:
        await bench.plan(SMALL, group)
        done.append(name)

    with stopped(*await bench.whole()):
        items = [asyncio.create_task(plan(f"item {index}", many)) for index in range(40)]
        await until(lambda: len(busy(bench.decoders)) == 2)
        alone = asyncio.create_task(plan("alone", Group()))
        await asyncio.sleep(0)
        os.kill(busy(bench.decoders)[0], signal.SIGCONT)
        await alone
        assert done.index("alone") <= 2, done
    await asyncio.gather(*items)


async def test_the_decoder_that_planned_an_item_writes_it(bench: Bench) -> None:
    """Any other decoder would have to read and plan the item again."""
    group = Group(keeps_decoder=True)
    before = await bench.whole()
    for occupies_another in (False, True):
        with packed(SMALL) as parcel:
            if occupies_another:
                with stopped(*before):
                    occupied = asyncio.create_task(bench.plan(SMALL))
                    await until(lambda: busy(bench.decoders))
                    planned = asyncio.create_task(bench.decoders.plan(group, parcel))
                    await until(lambda: len(busy(bench.decoders)) == 2)
                await occupied
                plan = await planned
            else:
                plan = await bench.decoders.plan(group, parcel)
            (pid,) = (process.pid for process in bench.decoders._processes if process.kept_for is group)
            with bench.block(plan) as block, stopped(*before):
                task = asyncio.create_task(bench.write(parcel, plan, block, group))
                await until(lambda: busy(bench.decoders))
                assert busy(bench.decoders) == [pid]
                for one in before:
                    os.kill(one, signal.SIGCONT)
                await task
                assert same(dict(block), bench.arrays_in_process(SMALL))
        bench.decoders.let_go(group)


async def test_a_reserved_decoder_serves_other_requests_after_its_release(bench: Bench) -> None:
    kept = [Group(keeps_decoder=True) for _ in range(2)]
    await asyncio.gather(*(bench.plan(SMALL, group) for group in kept))
    waiting = asyncio.create_task(bench.plan(SMALL))
    await asyncio.sleep(0.05)
    assert not busy(bench.decoders)
    bench.decoders.let_go(kept[0])
    await waiting
    bench.decoders.let_go(kept[1])


async def test_decoders_die_with_their_nursery_and_all_are_restarted(bench: Bench) -> None:
    before, nursery = await bench.whole(), bench.nursery
    with stopped(*before):
        items = [asyncio.create_task(bench.arrays(SMALL)) for _ in range(3)]
        await until(lambda: len(busy(bench.decoders)) == 2)
        nursery.kill()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in before))
    right = bench.arrays_in_process(SMALL)
    assert all(same(arrays, right) for arrays in await asyncio.gather(*items))
    assert not set(before) & set(await bench.whole())


async def test_an_item_can_be_cancelled_while_there_is_no_nursery(bench: Bench) -> None:
    before, nursery = await bench.whole(), bench.nursery
    with stopped(*before):
        items = [asyncio.create_task(bench.plan(SMALL)) for _ in range(3)]
        await until(lambda: len(busy(bench.decoders)) == 2)
        nursery.kill()
        await until(lambda: not bench.decoders._nursery._up.is_set())
        for item in items:
            item.cancel()
        results = await asyncio.gather(*items, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


async def test_a_decoder_that_dies_right_after_its_fork_is_replaced(bench: Bench) -> None:
    """The nursery process, which forks decoders, reports the fork and the death in one message."""
    for _ in range(3):
        before = await bench.whole()
        with stopped(bench.nursery.pid):
            for pid in before:
                os.kill(pid, signal.SIGKILL)
        await until(lambda before=before: not set(before) & set(bench.decoders.pids))
        await bench.whole()
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


@pytest.fixture
async def impatient(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a nursery hang after 2 s of silence. The limit applies from the next nursery on."""
    monkeypatch.setattr(bench.decoders._nursery, "silence_s", 2.0)
    before, nursery = await bench.whole(), bench.nursery
    nursery.kill()
    await until(lambda: not set(before) & set(bench.decoders.pids))
    await bench.whole()


async def test_decoders_that_die_leave_no_descriptor_open(bench: Bench) -> None:
    await bench.whole()
    gc.collect()
    gc.disable()
    try:
        before = psutil.Process().num_fds()
        for _ in range(4):
            await kill_and_wait(bench, signal.SIGKILL, *await bench.whole())
            assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))
        await bench.whole()
        await until(lambda: psutil.Process().num_fds() <= before)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_decoders_that_die_while_the_nursery_hangs_are_replaced(bench: Bench) -> None:
    before, nursery = await bench.whole(), bench.nursery
    with stopped(nursery.pid, before[0]):
        item = asyncio.create_task(bench.plan(SMALL))
        await until(lambda: busy(bench.decoders))
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert await item
    assert not set(before) & set(await bench.whole())
    assert bench.nursery != nursery


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_nursery_that_hangs_during_a_fork_is_killed_and_replaced(bench: Bench) -> None:
    before, nursery = await bench.whole(), bench.nursery
    with (
        stopped(nursery.pid),
        pytest.raises(
            ProcessDied, match=f"the process that starts the decoders {nursery.pid} made no progress for 2 s"
        ),
    ):
        await bench.decoders._nursery.fork()
    born = await bench.decoders._nursery.fork()
    assert psutil.Process(born.pid).ppid() != nursery.pid
    await born.channel.close()
    ended = await born.ended
    assert ended is not None
    assert ended.status == 0
    await until(lambda: not set(before) & set(bench.decoders.pids))
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_the_decoder_of_a_cancelled_item_ends_even_if_the_nursery_hangs(bench: Bench) -> None:
    before, nursery = await bench.whole(), bench.nursery
    with stopped(nursery.pid, *before):
        item = asyncio.create_task(bench.plan(SMALL))
        await until(lambda: busy(bench.decoders))
        (pid,) = busy(bench.decoders)
        item.cancel()
        with pytest.raises(asyncio.CancelledError):
            await item
        await until(lambda: not psutil.pid_exists(pid))
    assert not set(before) & set(await bench.whole())
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


@pytest.mark.parametrize(
    "message",
    [
        framed(msgspec.msgpack.encode(Written())),
        framed(b"no msgpack"),
        struct.pack("!i", 2**31 - 1),
        struct.pack("!i", -1),
        b"",
    ],
    ids=["a reply to nothing", "no message", "a message too long", "a negative length", "a closed channel"],
)
async def test_a_decoder_that_breaks_the_protocol_is_replaced(bench: Bench, message: bytes) -> None:
    """The decoder is alive, but an attacker may control it. It is killed, and its item is planned again."""
    await bench.whole()
    with stopped(*bench.decoders.pids):
        item = asyncio.create_task(bench.plan(SMALL))
        await until(lambda: busy(bench.decoders))
        (process,) = (process for process in bench.decoders._processes if process.job is not None)
        reader = process.channel._reader
        reader.feed_data(message) if message else reader.feed_eof()
        await until(lambda: not psutil.pid_exists(process.pid))
    await item
    assert process.pid not in await bench.whole()
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


async def test_items_fail_at_once_while_decoders_cannot_be_started(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the checkpoint is missing, waiting and new items fail immediately."""
    gone = DecoderSetup(str(tmp_path / "gone"), None, MediaCaps())
    with stopped(*await bench.whole()):
        waiting = [asyncio.create_task(bench.plan(SMALL)) for _ in range(3)]
        await until(lambda: len(busy(bench.decoders)) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(bench.decoders._nursery, "_setup", msgspec.json.encode(gone).decode())
            bench.nursery.kill()
            for item in waiting:
                with pytest.raises(NoProcess, match=f"{tmp_path}/gone is not a checkpoint directory"):
                    await item
            with pytest.raises(NoProcess, match=f"{tmp_path}/gone is not a checkpoint directory"):
                await bench.plan(SMALL)
    await bench.whole()
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


@pytest.mark.slow
async def test_items_fail_soon_while_the_nursery_dies_at_every_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.whole()
    with monkeypatch.context() as patch:
        patch.setattr("mindie_mm.decode.nursery_client.RESTART_WAIT_S", 0.0)
        patch.setattr(bench.decoders._nursery, "_setup", "no JSON")
        bench.nursery.kill()
        await until(lambda: not bench.decoders.pids)
        with pytest.raises(
            NoProcess, match=r"no decoder is alive, and the last attempt to start one failed: .*before it was ready"
        ):
            await bench.plan(SMALL)
    await bench.whole()
    assert same(await bench.arrays(SMALL), bench.arrays_in_process(SMALL))


async def test_an_item_is_planned_again_when_its_decoder_hangs(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindie_mm.decode.jobs._HANG_S", 1.0)
    decoders = Decoders(DecoderSetup(str(random_checkpoint), None, MediaCaps()), 2**24)
    await decoders.open(2)
    try:
        pids = decoders.pids
        with stopped(*pids[:2]), packed(SMALL) as parcel:
            items = [decoders.plan(Group(), parcel) for _ in range(2)]
            assert [plan.num_features for plan in await asyncio.gather(*items)] == [20, 20]
        assert not set(pids[:2]) & set(decoders.pids)
    finally:
        await decoders.close()


async def test_closing_ends_all_processes_while_items_are_being_decoded(random_checkpoint: Path) -> None:
    decoders = Decoders(DecoderSetup(str(random_checkpoint), None, MediaCaps()), 2**24)
    await decoders.open(2)
    pids = [*decoders.pids, psutil.Process(decoders.pids[0]).ppid()]
    with stopped(*decoders.pids), packed(SMALL) as parcel:
        items = [asyncio.create_task(decoders.plan(Group(), parcel)) for _ in range(3)]
        await until(lambda: len(busy(decoders)) == 2)
        await decoders.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*items, return_exceptions=True)
    assert [type(result) for result in results] == [NoProcess] * 3
