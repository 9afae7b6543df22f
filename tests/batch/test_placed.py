"""Tests for rows with a chat and separate media columns, as TRL uses them.

The media replace the chat's empty media parts in order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.input.row import Row, parse
from mindie_mm.errors import InputError
from tests.batch.conftest import run_in_process, settings
from tests.media_samples import encoded, photograph

IMAGES = [encoded(photograph(size=(60, 40))), encoded(photograph(size=(40, 60)))]
AND = {"type": "text", "text": "and"}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def parsed(row: dict[str, Any]) -> Row:
    return parse(json.dumps(row).encode(), Path("/data"), "")


@pytest.mark.parametrize(
    ("places", "columns", "filled"),
    [
        ([{"type": "image"}], {"images": ["a.png"]}, [{"image": "a.png"}]),
        ([{"type": "image"}], {"image": "a.png"}, [{"image": "a.png"}]),
        (
            [{"type": "image"}, AND, {"type": "image", "index": 1, "text": None}],
            {"images": ["a.png", "b.png"]},
            [{"image": "a.png"}, AND, {"image": "b.png"}],
        ),
        (
            [{"type": "audio"}, {"type": "video"}, {"type": "image"}],
            {"images": ["a.png"], "videos": [["1.png", "2.png"]], "audios": ["c.wav"]},
            [{"audio": "c.wav"}, {"video": ["1.png", "2.png"]}, {"image": "a.png"}],
        ),
        (
            [{"image": "own.png"}, {"type": "image"}],
            {"image_url": "a.png"},
            [{"image": "own.png"}, {"image_url": "a.png"}],
        ),
    ],
)
def test_media_columns_fill_the_placeholders_of_the_chat(places: Any, columns: Any, filled: Any) -> None:
    expected = parsed({"messages": asked(*filled)})
    assert parsed({"messages": asked(*places), **columns}) == expected
    assert parsed({"messages": json.dumps(asked(*places)), **columns}) == expected


@pytest.mark.parametrize(
    ("places", "columns", "why"),
    [
        (
            [{"type": "image"}],
            {"images": ["a.png", "b.png"]},
            "has 2 items of kind image, but its messages have places for 1",
        ),
        ([{"type": "image"}] * 2, {"image": "a.png"}, "has 1 items of kind image, but its messages have places for 2"),
        ([{"type": "image"}], {}, "has 0 items of kind image, but its messages have places for 1"),
        (
            [{"type": "image"}],
            {"images": ["a.png"], "video": "b.mp4"},
            "has 1 items of kind video, but its messages have places for 0",
        ),
        ([AND], {"images": ["a.png"]}, "Choose one of them with --select-columns"),
        ([{"type": "image"}], {"images": ["a.png"], "text": "What?"}, "Choose one of them with --select-columns"),
        ([{"type": "image", "url": None}, {"type": "image", "min_pixels": 9}], {"image": "a.png"}, "exactly one of"),
        (["image"], {"images": ["a.png"]}, "Choose one of them with --select-columns"),
    ],
)
def test_placeholders_and_media_that_do_not_match_are_refused(places: Any, columns: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parsed({"messages": asked(*places), **columns})


def test_a_table_in_the_form_of_datasets_gives_the_same_prompt(tmp_path: Path) -> None:
    """In such a table, each part has the keys of all parts, and an image is a struct of `bytes` and `path`."""
    places = [
        {"type": "image", "text": None, "index": 0},
        {"type": "text", "text": "and", "index": None},
        {"type": "image", "text": None, "index": 1},
    ]
    for number, image in enumerate(IMAGES):
        (tmp_path / f"{number}.png").write_bytes(image)
    images = [{"bytes": image, "path": None} for image in IMAGES]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Two.", "index": None}]}
    messages = [{"role": "user", "content": places}, answer]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "images": images}]), tmp_path / "rows.parquet")
    plain = [*asked({"image": "0.png"}, AND, {"image": "1.png"}), {"role": "assistant", "content": "Two."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": plain}))
    for form in ("parquet", "jsonl"):
        run_in_process(settings(tmp_path / f"rows.{form}"), tmp_path / form)
    found, expected = (Dataset(tmp_path / form)[0] for form in ("parquet", "jsonl"))
    assert (found.error, expected.error, len(found.arrays)) == (None, None, 2)
    assert found.ids is not None
    assert expected.ids is not None
    assert found.ids.tolist() == expected.ids.tolist()
