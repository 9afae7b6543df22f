"""Tests that file name extensions agree with the supported formats and with the list of the web page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from mindie_mm.media.audio import encoded_audio as audio
from mindie_mm.media.endings import ENDINGS, ending_of, kind_of
from mindie_mm.media.image import encoded_image as image
from mindie_mm.media.video import encoded_video as video

PAGE = Path(__file__).parents[2] / "service/static/items.js"


def of_kind(kind):
    return [ending for endings in ENDINGS[kind].values() for ending in endings.split()]


def test_exactly_the_supported_formats_have_endings():
    assert {*ENDINGS["image"]} == {*image.FORMATS}
    assert {*ENDINGS["video"]} == {*video.CONTAINERS}
    assert {*ENDINGS["audio"]} <= {*audio.CONTAINERS} <= {*ENDINGS["audio"], *ENDINGS["video"]}


def test_image_endings_equal_those_of_pillow():
    """Pillow does not read HEIC."""
    Image.init()
    known = {ending for ending, name in Image.registered_extensions().items() if name in image.FORMATS}
    assert known | {*ENDINGS["image"]["HEIC"].split()} == {*of_kind("image")}


@pytest.mark.parametrize("kind", ENDINGS)
def test_an_upper_case_ending_has_the_same_kind(kind):
    for ending in of_kind(kind):
        assert kind_of(f"a/b.tar{ending.upper()}") == kind


@pytest.mark.parametrize("name", ["jpg", ".jpg", "a.jpg/b", "a.jpg.txt", "a.txt", "a."])
def test_a_name_without_a_media_ending_has_no_kind(name):
    assert kind_of(name) is None


def test_ending_of_returns_the_lower_case_suffix():
    assert [ending_of(name) for name in ("a/b.c.JPG", "a.b/c", ".hidden")] == [".jpg", "", ""]


def test_the_web_page_has_the_same_endings():
    found = re.findall(r"(\w+): /\\\.\(([a-z0-9|]+)\)\$/i", PAGE.read_text())
    assert {kind: {f".{ending}" for ending in endings.split("|")} for kind, endings in found} == {
        kind: {*of_kind(kind)} for kind in ENDINGS
    }
