"""Attacks on /render, which reads only the headers of media. The limits are those of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.attacks import images
from tests.attacks.conftest import MAX_FURTHER_BYTES, MAX_PROCESSOR_S, Attacked, with_bytes
from tests.attacks.test_images import named

ROUTE = "/v1/chat/completions/render"
Make = Callable[[], bytes]


@named(images.BOMBS)
@pytest.mark.slow
def test_bombs_are_refused_by_their_header(attacked: Attacked, make: Make) -> None:
    body = {**with_bytes("image", make()), "mm_payload": "none"}
    assert "pixels" in attacked.refused(body, "media item 0 (image): the ", ROUTE)


@named(images.PARTS | images.INFLATED | images.OTHER_FORMATS)
@pytest.mark.slow
def test_hostile_headers_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused({**with_bytes("image", make()), "mm_payload": "none"}, "media item 0 (image): ", ROUTE)


@named(images.BROKEN | images.SCANS)
@pytest.mark.slow
def test_files_that_are_broken_behind_their_header_cost_little(attacked: Attacked, make: Make) -> None:
    body = {**with_bytes("image", make()), "mm_payload": "none"}
    answer, used_s, further = attacked.watched.during(lambda: attacked.http.post(ROUTE, json=body))
    assert answer.status_code in (200, 400), answer.text
    assert used_s < MAX_PROCESSOR_S
    assert further < MAX_FURTHER_BYTES
    attacked.is_right()


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"max_pixels": 2**70}},
        {"mm_processor_kwargs": {"max_pixels": -1}},
        {"media_io_kwargs": {"video": {"num_frames": 2**63}}},
        {"mm_processor_kwargs": {"images_kwargs": {"a" * 10_000: 1}}},
    ],
    ids=["integer", "negative", "frames", "name"],
)
def test_hostile_options_are_refused(attacked: Attacked, options: dict[str, object]) -> None:
    attacked.refused({**attacked.good, "mm_payload": "none", **options}, path=ROUTE)


@pytest.mark.parametrize("field", ['"mm_processor_kwargs": {"\\ud800": 1}', '"cache_salt": "\\ud800"'])
def test_lone_surrogates_in_options_are_refused(attacked: Attacked, field: str) -> None:
    body = json.dumps({**attacked.good, "mm_payload": "none"})[:-1] + f", {field}}}"
    answer = attacked.http.post(ROUTE, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    attacked.is_right()
