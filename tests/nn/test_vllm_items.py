"""Tests for the items of vLLM's payloads."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from mindie_mm.errors import InputError
from mindie_mm.nn.vllm_items import PatchLayout

IMAGE = PatchLayout("pixel_values", "image_grid_thw", 14, 2, 2)
VIDEO = PatchLayout("pixel_values_videos", "video_grid_thw", 14, 2, 2, "second_per_grid_ts")
TIMED = PatchLayout("pixel_values_videos", "video_grid_thw", 14, 2, 2, times="timestamps")


@pytest.mark.parametrize(
    ("layout", "grid"),
    [(IMAGE, (1, 4, 6)), (VIDEO, (3, 2, 4, 250_000_000_000)), (TIMED, (3, 2, 4, 0, 14, 36_001))],
)
def test_what_is_written_is_read(layout: PatchLayout, grid: tuple[int, ...]) -> None:
    frames = 1 if layout is IMAGE else 2
    block = np.random.default_rng(0).integers(0, 256, (math.prod(grid[:3]), frames * 14 * 14 * 3), np.uint8)
    payload = layout.encoded({layout.pixels: block}, grid)
    item = layout.read(payload.tensors)
    assert item.stated == grid
    copy = {layout.pixels: np.zeros_like(block)}
    layout.write(item, copy)
    assert np.array_equal(copy[layout.pixels], block)
    assert payload.metadata is not None
    rest = {key: one for key, one in msgspec.msgpack.decode(payload.tensors).items() if key != layout.pixels}
    assert msgspec.msgpack.decode(payload.metadata) == rest


def test_a_row_has_the_axes_channel_time_row_and_column() -> None:
    block = np.zeros((8, 2, 14, 14, 3), np.uint8)
    block[5, 1, 2, 3, 2] = 7  # patch, time, row, column, channel
    payload = VIDEO.encoded({VIDEO.pixels: block.reshape(8, -1)}, (1, 2, 4, 1))
    raw = msgspec.msgpack.decode(payload.tensors)[VIDEO.pixels]["data"][2].data
    places = np.argwhere(np.frombuffer(raw, np.uint8).reshape(8, 3, 2, 14, 14))
    assert places.tolist() == [[5, 2, 1, 2, 3]]


@pytest.mark.parametrize(
    ("dtype", "shape", "values"),
    [
        ("float32", [], [0.0]),
        ("float32", [], [-1.0]),
        ("float32", [], [math.nan]),
        ("float32", [], [math.inf]),
        ("float32", [], [2.0**20]),
        ("float32", [2], [1.0, 1.0]),
        ("float64", [], [1.0]),
        ("float32", [0], []),
    ],
)
def test_times_that_no_video_has_are_refused(dtype: str, shape: list[int], values: list[float]) -> None:
    payload = VIDEO.encoded({VIDEO.pixels: np.zeros((8, 1176), np.uint8)}, (1, 2, 4, 1))
    item: dict[str, Any] = msgspec.msgpack.decode(payload.tensors)
    item[VIDEO.seconds]["data"] = [dtype, shape, Ext(3, np.array(values, dtype).tobytes())]
    with pytest.raises(InputError, match="second_per_grid_ts"):
        VIDEO.read(msgspec.msgpack.encode(item))


def with_times(times: Any) -> bytes:
    """Return an item of three patches along time, with other times."""
    payload = TIMED.encoded({TIMED.pixels: np.zeros((24, 1176), np.uint8)}, (3, 2, 4, 3, 14, 26))
    item: dict[str, Any] = msgspec.msgpack.decode(payload.tensors)
    item[TIMED.times]["data"] = times
    return msgspec.msgpack.encode(item)


def test_times_are_rounded_as_in_the_prompt() -> None:
    """The text of 1.45 is 1.4, and that of 0.25 is 0.2, because the last digit becomes even if it is exact."""
    times = [0.25, 1.45, 2.5999999999999996]
    assert TIMED.read(with_times(times)).stated == (3, 2, 4, 2, 14, 26)
    assert [f"{time:.1f}" for time in times] == ["0.2", "1.4", "2.6"]


@pytest.mark.parametrize(
    "times",
    [
        [0.0, 1.0],
        [-1.0, 0.0, 1.0],
        [0.0, math.nan, 1.0],
        [0.0, math.inf, 1.0],
        ["a", "b", "c"],
        ["float64", [3], Ext(3, bytes(24))],
        {},
        None,
        [0] * 10**6,
    ],
)
def test_times_that_no_video_has_in_its_prompt_are_refused(times: Any) -> None:
    item = with_times(times)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="timestamps"):
            TIMED.read(item)
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()


def test_what_is_not_needed_is_skipped_without_memory() -> None:
    """Each byte of it could become an object of 64 bytes."""
    item = {"pixels": {"data": ["uint8", [1], Ext(3, b"1")], "field": [[]] * 10**6, "more": [[]] * 10**6}}
    encoded = msgspec.msgpack.encode(item)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="no tensor image_grid_thw"):
            IMAGE.read(encoded)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10**5 < len(encoded)
