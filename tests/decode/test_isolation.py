"""Tests that a compromised decoder reaches nothing of other requests, and that its time is limited."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from mindie_mm.decode import Decoders, Group
from mindie_mm.decode.decoder_messages import DecoderSetup
from mindie_mm.decode.jobs import DecoderProcess
from mindie_mm.decode.scratch import Scratch
from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.inputs import Media
from mindie_mm.processes.ipc import Channel
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_items
from tests.decode.conftest import busy, packed, until
from tests.lockdown.attacker import environment, running
from tests.media_samples import encoded, photograph

PNG = encoded(photograph("chelsea.png", (150, 120)), "PNG")
SMALL = Media("image", PNG)
WRITE_NOTHING = "def attack():\n    return go_on() if isinstance(message, module.PlanItem) else module.Written()"
SPIN = "def attack():\n    while True:\n        pass"
SPIN_LATER = """
def attack():
    def spin(_):
        while True:
            pass
    module.ReceivingChannel.receive = spin
    return go_on()
"""
NOTHING = Media("image", running(PNG, WRITE_NOTHING))
CAPS = MediaCaps(max_decode_s=1.0, max_image_pixels=20_000)


@pytest.fixture(scope="module")
async def attacked(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Decoders]:
    """Yield a pool in which one decoder works at a time. Items can compromise the decoders."""
    folder = tmp_path_factory.mktemp("hook")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder).items():
            patch.setenv(name, value)
        patch.setattr("mindie_mm.decode.decoders._WATCH_S", 0.1)
        decoders = Decoders(DecoderSetup(str(random_checkpoint), None, CAPS), 2**24)
        await decoders.open(1)
        yield decoders
        await decoders.close()


async def pixels(decoders: Decoders, media: Media, domain: str) -> tuple[int, np.ndarray]:
    """Return the id of the decoder that writes an item, and the item's array."""
    with packed(media) as parcel:
        group = Group(domain)
        plan = await decoders.plan(group, parcel)
        arrays = {name: np.full(spec.shape, 7, spec.dtype) for name, spec in plan.specs.items()}
        await decoders.write(group, parcel, arrays)
    return last_used(decoders), arrays["pixel_values"]


def last_used(decoders: Decoders) -> int:
    """Return the id of the decoder that got the last item."""
    return [process.pid for process in decoders._processes if process.domain is not None][-1]


@pytest.mark.parametrize("domain", ["victim", "attacker"])
async def test_a_decoder_that_writes_nothing_shows_no_earlier_item(attacked: Decoders, domain: str) -> None:
    _, shown = await pixels(attacked, SMALL, "victim")
    assert shown.any()
    _, stolen = await pixels(attacked, NOTHING, domain)
    assert stolen.shape == shown.shape
    assert not stolen.any()


async def test_a_decoder_reads_items_of_one_domain_only(attacked: Decoders) -> None:
    compromised, _ = await pixels(attacked, NOTHING, "attacker")
    assert (await pixels(attacked, SMALL, "attacker"))[0] == compromised, "a domain may keep its decoder"
    victims, right = await pixels(attacked, SMALL, "victim")
    assert victims != compromised
    assert right.any()
    assert (await pixels(attacked, SMALL, "attacker"))[0] == compromised
    others = [(await pixels(attacked, SMALL, f"other {number}"))[0] for number in range(8)]
    assert len({*others, compromised, victims}) == 10
    await until(lambda: not psutil.pid_exists(compromised))
    await until(lambda: len(attacked.pids) == 9)
    assert others[-1] in attacked.pids


async def test_each_request_has_a_decoder_of_its_own_if_requests_are_isolated(
    attacked: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacked, "_caps", MediaCaps(isolate_requests=True))
    monkeypatch.setattr(attacked, "_max_used", 1)
    found = [(await pixels(attacked, SMALL, "victim"))[0] for _ in range(4)]
    assert len({*found}) == 4


async def test_an_idle_decoder_that_uses_processor_time_is_ended(attacked: Decoders) -> None:
    with packed(Media("image", running(PNG, SPIN_LATER))) as parcel:
        await attacked.plan(Group("attacker"), parcel)
    spinning = last_used(attacked)
    await until(lambda: not psutil.pid_exists(spinning))
    assert (await pixels(attacked, SMALL, "attacker"))[1].any()


async def test_a_decoder_that_ignores_its_limit_of_processor_time_is_ended(attacked: Decoders) -> None:
    with packed(Media("image", running(PNG, SPIN))) as parcel:
        plan = asyncio.create_task(attacked.plan(Group("attacker"), parcel))
        await until(lambda: busy(attacked))
        spinning = last_used(attacked)
        with pytest.raises(LimitExceeded, match=r"processor time than the limit of 1 s \(--max-decode-s\)"):
            await plan
    await until(lambda: not psutil.pid_exists(spinning))
    assert (await pixels(attacked, SMALL, "attacker"))[1].any()


async def test_a_decoder_ends_after_an_item_that_exceeds_a_limit(attacked: Decoders) -> None:
    kept, _ = await pixels(attacked, SMALL, "victim")
    with pytest.raises(MediaError):
        await pixels(attacked, Media("image", PNG[:60]), "victim")
    assert (await pixels(attacked, SMALL, "victim"))[0] == kept, "a damaged file ends no decoder"
    with pytest.raises(LimitExceeded, match="the limit is 20000"):
        await pixels(attacked, Media("image", encoded(photograph("chelsea.png", (160, 130)), "PNG")), "victim")
    assert (await pixels(attacked, SMALL, "victim"))[0] != kept
    await until(lambda: not psutil.pid_exists(kept))


@pytest.mark.usefixtures("copied_workers")
def test_the_domain_of_a_request_is_its_key_and_its_salt(random_checkpoint: Path, tmp_path: Path) -> None:
    items = [{"image": PNG}, {"text": "What is it?"}]
    with Tokenizer.from_pretrained(random_checkpoint, decoders=1) as tokenizer:
        pool = tokenizer.prompts.stage.decoders
        assert isinstance(pool, Decoders)

        def decoder(options: PromptOptions) -> int:
            tokenizer.answer(request_of_items(items, path_file=str(tmp_path / "shm_name.txt"), options=options))
            return last_used(pool)

        keys = [(b"key", "salt"), (b"key", "salt"), (b"another key", "salt"), (b"another key", "another salt")]
        first, same, *others = [decoder(PromptOptions(owner=owner, cache_salt=salt)) for owner, salt in keys]
        assert first == same
        assert len({first, *others}) == 3


async def test_a_decoder_whose_memory_exceeds_its_limit_is_ended() -> None:
    """RLIMIT_DATA does not count page tables. This process stands for a decoder whose page tables have grown."""
    ended = asyncio.get_running_loop().create_future()
    process = DecoderProcess(os.getpid(), cast("Channel", None), ended, cast("Scratch", None))
    caps = MediaCaps(max_decode_bytes=2**20)
    assert process.excess(caps) == ("", None)
    process.first_bytes -= 2**29
    why, error = process.excess(caps)
    assert re.fullmatch(r"uses \d+ bytes of memory", why)
    assert isinstance(error, LimitExceeded)
    assert "--max-decode-bytes" in str(error)
    assert process.excess(MediaCaps(max_decode_bytes=0))[0] == "keeps memory without a job"
