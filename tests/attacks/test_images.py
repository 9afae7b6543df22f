"""Attacks with images that unpack to gigabytes, are broken, or have a format that is not accepted."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.attacks import images
from tests.attacks.conftest import CHAT, Attacked, with_bytes

Make = Callable[[], bytes]


def named(cases: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", cases.values(), ids=cases.keys())


@named(images.BOMBS)
def test_bombs_are_refused_by_their_header(attacked: Attacked, make: Make) -> None:
    message = attacked.refused(with_bytes("image", make()), "media item 0 (image): the ")
    assert "pixels" in message
    assert "178956970" in message, "the message must contain the limit"


def test_too_many_pixels_of_a_request_are_refused(attacked: Attacked) -> None:
    """Each image is within its own limit, but all together would keep a tokenizer busy for most of a minute."""
    each = [
        images.png(13_376, 13_376, images.chunk(b"tEXt", b"number\0%d" % number), depth=1, colours=0)
        for number in range(32)
    ]
    content = [with_bytes("image", data)["messages"][0]["content"][0] for data in each]
    body = {"messages": [{"role": "user", "content": content}]}
    message = attacked.refused(
        body, "media item 6 (image): the request's images and frames have at least 1252421632 pixels"
    )
    assert message.endswith("; the limit is 1073741824 (--max-request-pixels)")


@pytest.mark.parametrize(("make", "message"), images.OF_FORMATS.values(), ids=images.OF_FORMATS.keys())
def test_files_above_the_limits_of_their_format_are_refused(attacked: Attacked, make: Make, message: str) -> None:
    assert "media item 0 (image)" in attacked.refused(with_bytes("image", make()), message)


@named(images.SCANS)
def test_too_many_scans_are_refused_before_decoding(attacked: Attacked, make: Make) -> None:
    message = attacked.refused(with_bytes("image", make()), "media item 0 (image): the JPEG of ")
    assert re.search(r"has \d+ scans; the limit is \d+$", message)


@named(images.PARTS)
def test_too_many_parts_are_refused_before_decoding(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("image", make()), "the limit is 100000")


@named(images.INFLATED)
def test_metadata_are_decompressed_up_to_a_limit(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("image", make()), "have more bytes than the limit of 16777216 when they are")


@named(images.BROKEN)
def test_broken_images_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("image", make()), "media item 0 (image): the ")


@named(images.OTHER_FORMATS)
def test_other_formats_are_refused(attacked: Attacked, make: Make) -> None:
    attacked.refused(with_bytes("image", make()), "bytes cannot be read as an image")


@named(images.HARMLESS | images.PACKED)
def test_harmless_images_are_answered(attacked: Attacked, make: Make) -> None:
    answer, _, further = attacked.watched.during(lambda: attacked.http.post(CHAT, json=with_bytes("image", make())))
    assert answer.status_code == 200, answer.text
    assert further < 64 * 2**20
    attacked.is_right()
