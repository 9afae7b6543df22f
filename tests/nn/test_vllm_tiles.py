"""Tests for the items of vLLM's payloads that have normalized pixels."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.msgpack import Ext

from mindie_mm.errors import InputError
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD, Normalization
from mindie_mm.nn.vllm_tiles import DTYPES, TileLayout, dtype_of

NORMALIZATIONS = {
    "CLIP": Normalization(CLIP_MEAN, CLIP_STD, 1 / 255),
    "ImageNet": Normalization(IMAGENET_MEAN, IMAGENET_STD, 1 / 255),
    "half": Normalization(HALF, HALF, 1 / 255),
    "rescaled": Normalization((), (), 1 / 255),
    "bytes": Normalization((), (), 1.0),
}
SIDES = 4, 6
HALVES = NORMALIZATIONS["half"].table()
TILES = TileLayout(HALVES, SIDES, "float16", count="num_patches", mask="mask", constants={"image_token_id": 7})
ALONE = TileLayout(HALVES, SIDES, "float32")
SIZED = TileLayout(HALVES, SIDES, "bfloat16", size="image_sizes")
Item = dict[str, Any]


def block(num_tiles: int = 2) -> dict[str, Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (num_tiles, *SIDES, 3), np.uint8)
    return {"pixel_values": pixels}


def item_of(layout: TileLayout, num_tiles: int = 2, grid: tuple[int, ...] = ()) -> Item:
    """Return a written item as MessagePack decodes it."""
    item: Item = msgspec.msgpack.decode(layout.encoded(block(num_tiles), grid).tensors)
    return item


def written(layout: TileLayout, item: Item, num_tiles: int) -> Any:
    """Read an item, and return its block."""
    arrays = {"pixel_values": np.zeros((num_tiles, *SIDES, 3), np.uint8)}
    layout.write(layout.read(msgspec.msgpack.encode(item)), arrays)
    return arrays["pixel_values"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_every_byte_of_every_channel_has_torchs_value_and_is_read_again(name: str, dtype: str) -> None:
    normalization = NORMALIZATIONS[name]
    layout = TileLayout(normalization.table(), (256, 1), dtype, count="num_patches")
    pixels = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 256, 1, 1), (1, 256, 1, 3))
    payload = layout.encoded({"pixel_values": pixels}, ())
    stated, shape, raw = msgspec.msgpack.decode(payload.tensors)["pixel_values"]["data"]
    expected = normalization(torch.tensor(pixels)).to(getattr(torch, dtype)).contiguous()
    assert (stated, tuple(shape)) == (dtype, (1, 3, 256, 1))
    assert bytes(raw.data) == expected.view(torch.uint8).numpy().tobytes()
    read = np.zeros((1, 256, 1, 3), np.uint8)
    layout.write(layout.read(payload.tensors), {"pixel_values": read})
    values = normalization(torch.tensor(read)).to(expected.dtype)
    assert torch.equal(values, expected), "a byte with the same value is the same to the model"
    distinct = {len({*expected[0, channel].flatten().tolist()}) for channel in range(3)}
    assert (read == pixels).all() or (dtype == "bfloat16" and min(distinct) < 256)


def test_tiles_have_a_number_a_mask_and_constants() -> None:
    payload = TILES.encoded(block(), (1,))
    item = msgspec.msgpack.decode(payload.tensors)
    flat = ["flat", {"keep_on_cpu": False, "slices": [[[0, 2, None]]], "dim": 0}]
    found = {name: (one["data"][:2], one["field"]) for name, one in item.items()}
    assert found == {
        "pixel_values": (["float16", [2, 3, *SIDES]], flat),
        "mask": (["int64", [2, *SIDES]], flat),
        "num_patches": (["int64", []], ["batched", {"keep_on_cpu": True}]),
        "image_token_id": (["int64", []], ["shared", {"keep_on_cpu": True, "batch_size": 1}]),
    }
    numbers = {name: int.from_bytes(item[name]["data"][2].data, "little") for name in ("num_patches", "image_token_id")}
    assert numbers == {"num_patches": 2, "image_token_id": 7}
    assert {*item["mask"]["data"][2].data[::8]} == {1}
    assert payload.metadata is not None
    assert msgspec.msgpack.decode(payload.metadata) == {name: item[name] for name in numbers}
    assert TILES.read(payload.tensors).stated == (2,)
    assert (written(TILES, item, 2) == block()["pixel_values"]).all()
    sizes = sum(len(one["data"][2].data) for name, one in item.items() if name not in numbers)
    assert TILES.num_bytes(1, block()["pixel_values"].nbytes) == sizes


def test_an_image_of_one_size_has_no_axis_of_tiles() -> None:
    payload = ALONE.encoded(block(1), ())
    item = msgspec.msgpack.decode(payload.tensors)
    assert {name: (one["data"][:2], one["field"]) for name, one in item.items()} == {
        "pixel_values": (["float32", [3, *SIDES]], ["batched", {"keep_on_cpu": False}])
    }
    assert payload.metadata is None
    assert ALONE.read(payload.tensors).stated == (1,)
    assert (written(ALONE, item, 1) == block(1)["pixel_values"]).all()


def test_tiles_that_vllm_adds_for_other_images_are_left_out() -> None:
    item = item_of(SIZED, 2, (480, 640, 1))
    dtype, shape, raw = item["pixel_values"]["data"]
    assert SIZED.read(msgspec.msgpack.encode(item)).stated == (2, 480, 640)
    zeros = bytes(len(raw.data) // 2)
    item["pixel_values"]["data"] = [dtype, [3, *shape[1:]], Ext(3, raw.data + zeros)]
    assert (written(SIZED, item, 2) == block()["pixel_values"]).all()
    item["pixel_values"]["data"][2] = Ext(3, raw.data + zeros[:-1] + b"1")
    with pytest.raises(InputError, match="has 3 tiles; an image of this size has 2"):
        written(SIZED, item, 2)
    with pytest.raises(InputError, match="has 2 tiles; an image of this size has 3"):
        written(SIZED, item_of(SIZED, 2, (480, 640)), 3)


def _bits(item: Item, value: int) -> None:
    """Replace the last value of the pixels."""
    data = item["pixel_values"]["data"]
    data[2] = Ext(3, data[2].data[:-2] + value.to_bytes(2, "little"))


def _numbers(item: Item, name: str, shape: list[int], *numbers: int) -> None:
    item[name]["data"] = ["int64", shape, Ext(3, np.array(numbers, np.int64).tobytes())]


REFUSED: dict[str, tuple[TileLayout, Any, str]] = {
    "a value between two bytes": (TILES, lambda item: _bits(item, 0x3BFF), "at row 3, column 5 and channel 2"),
    "a value above white": (TILES, lambda item: _bits(item, 0x3C01), "no byte has after normalization in float16"),
    "not a number": (TILES, lambda item: _bits(item, 0x7E00), "no byte has after normalization"),
    "infinity": (TILES, lambda item: _bits(item, 0x7C00), "no byte has after normalization"),
    "bytes": (TILES, lambda item: item["pixel_values"]["data"].__setitem__(0, "uint8"), "float32 or bfloat16"),
    "other sides": (TILES, lambda item: item["pixel_values"]["data"].__setitem__(1, [2, 3, 6, 4]), "[tiles, 3, 4, 6]"),
    "no tiles": (TILES, lambda item: item["pixel_values"].update(data=["float16", [0, 3, 4, 6], Ext(3, b"")]), ">= 1"),
    "a mask with zeros": (
        TILES,
        lambda item: item["mask"]["data"].__setitem__(2, Ext(3, bytes(8) + item["mask"]["data"][2].data[8:])),
        "zeros at 1 pixels",
    ),
    "another mask": (TILES, lambda item: _numbers(item, "mask", [2], 1, 1), "mask has the shape"),
    "no mask": (TILES, lambda item: item.pop("mask"), "no tensor mask"),
    "another number of tiles": (TILES, lambda item: _numbers(item, "num_patches", [], 3), "num_patches is 3"),
    "no number of tiles": (TILES, lambda item: _numbers(item, "num_patches", [0]), ">= 1"),
    "two numbers of tiles": (TILES, lambda item: _numbers(item, "num_patches", [2], 2, 2), "must have 1 positive"),
    "one side": (SIZED, lambda item: _numbers(item, "image_sizes", [1], 5), "must have 2 positive numbers"),
    "a side of zero": (SIZED, lambda item: _numbers(item, "image_sizes", [2], 0, 5), "positive numbers"),
    "a huge side": (SIZED, lambda item: _numbers(item, "image_sizes", [2], 2**60, 5), "the limit of each side"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_item_that_no_image_has_is_refused(name: str) -> None:
    layout, change, message = REFUSED[name]
    item = item_of(layout, 2, (480, 640))
    change(item)
    with pytest.raises(InputError) as refused:
        written(layout, item, 2)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": "bfloat16", "text_config": {"dtype": "float16"}}, "bfloat16"),
        ({"text_config": None, "vision_config": {"torch_dtype": "float16"}}, "float16"),
    ],
)
def test_the_dtype_is_that_of_vllms_choice(config: dict[str, Any], expected: str) -> None:
    assert dtype_of(config) == expected
