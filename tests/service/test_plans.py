"""Tests for plans of media that came before: for which requests they are found, and how long."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from mindie_mm.inputs import KnownPlan, Media, MediaOptions, Text
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.tokenize.prompt import PlannedPrompt, PlannedSpan
from mindie_mm.tokenize.requests import TokenizeRequest
from service.render.answer import Hashing
from service.render.plans import Alone, KnownItem, KnownMedia

DATA = "data:image/png;base64,iVBORw0KGgo="
URL = "https://example.org/cat.png"
IMAGE = Media("image", DATA)


def request(*media: Media) -> TokenizeRequest:
    return TokenizeRequest(items=[*media, Text("What?")])


def planned(*media: Media, by_counts: bool = False) -> PlannedPrompt:
    """Return a prompt with a span of two ids for each item."""
    spans = [
        PlannedSpan(
            start=2 * index,
            stop=2 * index + 2,
            kind=item.kind,
            token=5,
            num_features=2,
            num_bytes=8,
            digest=b"digest",
            plan=b"plan",
            by_counts=by_counts,
        )
        for index, item in enumerate(media)
    ]
    return PlannedPrompt(np.full(2 * len(media), 5, np.int64), tuple(spans))


def known(shared: Alone, owner: bytes = b"key", salt: str = "", **options: Any) -> KnownMedia:
    given = {"mm_processor_kwargs": None, "media_io_kwargs": None} | options
    return KnownMedia(shared, Hashing.of("model", (255, 255, 255), **given), owner, salt)


async def keep(shared: Alone, *media: Media, by_counts: bool = False) -> None:
    view = known(shared)
    await view.find([request(*media)])
    view.keep(0, planned(*media, by_counts=by_counts), [f"hash {index}" for index in range(len(media))])


async def found(view: KnownMedia, *media: Media) -> list[str | None]:
    ((*items,),) = await view.find([request(*media)])
    assert all(one is None or one.plan == KnownPlan(b"plan", b"digest") for one in items)
    return [None if one is None else one.hash for one in items]


async def test_an_item_that_came_before_is_known() -> None:
    shared = Alone(ServiceConfig())
    frames = Media("video", (DATA, DATA + "AA"))
    await keep(shared, IMAGE, frames)
    assert await found(known(shared), IMAGE) == ["hash 0"]
    assert await found(known(shared), Media("image", DATA + "AA"), frames, IMAGE) == [None, "hash 1", "hash 0"]


@pytest.mark.parametrize(
    "view",
    [
        {"owner": b"another key"},
        {"salt": "salt"},
        {"mm_processor_kwargs": {"max_pixels": 3136}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
    ],
    ids=["key", "salt", "processor", "reading"],
)
async def test_requests_of_another_key_or_with_other_options_know_nothing(view: dict[str, Any]) -> None:
    shared = Alone(ServiceConfig())
    await keep(shared, IMAGE)
    assert await found(known(shared, **view), IMAGE) == [None]


@pytest.mark.parametrize(
    "item",
    [
        Media("video", DATA),
        Media("image", DATA, MediaOptions(max_pixels=3136)),
        Media("image", DATA, uuid="name"),
        Media("image", (DATA[:-4], DATA[-4:])),
        Media("image", DATA, is_embeddings=True),
        Media("image", bytes(len(DATA))),
        Media("image", None, uuid="unknown"),
    ],
    ids=["kind", "options", "uuid", "parts", "embeddings", "bytes", "no data"],
)
async def test_another_item_is_not_known(item: Media) -> None:
    shared = Alone(ServiceConfig())
    await keep(shared, IMAGE)
    await keep(shared, Media("image", bytes(len(DATA))), Media("image", DATA, is_embeddings=True))
    assert await found(known(shared), item) == [None]


async def test_a_plan_that_depends_on_other_items_is_found_beside_as_many() -> None:
    shared = Alone(ServiceConfig())
    await keep(shared, IMAGE, by_counts=True)
    other = Media("image", URL)
    assert await found(known(shared), IMAGE) == ["hash 0"]
    assert await found(known(shared), IMAGE, other) == [None, None]
    assert await found(known(shared), Media("video", DATA), IMAGE) == [None, None]


async def test_a_uuid_names_the_data_that_came_last() -> None:
    shared, by_name = Alone(ServiceConfig()), Media("image", None, uuid="name")
    await keep(shared, Media("image", DATA, uuid="name"))
    assert await found(known(shared), by_name) == ["hash 0"]
    view = known(shared)
    other, again = Media("image", DATA + "AA", uuid="name"), Media("image", DATA, uuid="name")
    for item, own in ((other, "hash of the other"), (again, "hash again")):
        assert await found(view, item) == [None], "the store of data must get them"
        view.keep(0, planned(item), [own])
        assert await found(known(shared), by_name) == await found(known(shared), item) == [own]
        kept_before = Media("image", b"data", uuid="name")
        assert await found(known(shared), kept_before) == [own], "another worker may have got other data since then"


@pytest.mark.parametrize(("url_s", "is_known"), [(0, False), (60, True)])
async def test_a_url_is_known_for_a_time(url_s: int, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("service.render.plans.time.monotonic", lambda: now)
    shared = Alone(ServiceConfig(plan_url_s=url_s))
    items = Media("image", URL), Media("image", "file:///media/a.png"), Media("image", "/media/a.png"), IMAGE
    await keep(shared, *items)
    expected = ["hash 0", "hash 1", "hash 2"] if is_known else [None] * 3
    assert await found(known(shared), *items) == [*expected, "hash 3"]
    now += 40
    await keep(shared, *items)
    assert await found(known(shared), *items) == [*expected, "hash 3"]
    now += 21
    assert await found(known(shared), *items) == [None, None, None, "hash 3"], "an answer does not renew it"


async def test_the_least_recently_used_plans_are_forgotten() -> None:
    value = len(msgspec.msgpack.encode(KnownItem(KnownPlan(b"plan", b"digest"), "hash 0")))
    shared = Alone(ServiceConfig(plan_cache_bytes=2 * (768 + value)))
    first, second, third = (Media("image", DATA + end) for end in ("AA", "BB", "CC"))
    await keep(shared, first)
    await keep(shared, second)
    assert await found(known(shared), first) == ["hash 0"]
    await keep(shared, third)
    assert await found(known(shared), first, second, third) == ["hash 0", None, "hash 0"]
    small = Alone(ServiceConfig(plan_cache_bytes=10))
    await keep(small, first)
    assert await found(known(small), first) == [None]
