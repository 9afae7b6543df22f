"""Items of vLLM's payloads that consist of whole images or tiles, with normalized pixels.

vLLM normalizes the pixels of these families in its render server, and sends them in the data type of the model. Each
value is that of one of 256 bytes, so that a table of 256 values per channel writes and reads them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.errors import InputError
from mindie_mm.nn.vllm_items import BATCHED, Arrays, Element, Payload, decoded, element, flat, numbers, payload, tensor

PIXELS = "pixel_values"
"""Name of the pixels in a block and in vLLM."""
DTYPES: Mapping[str, str] = {"float32": "<u4", "bfloat16": "<u2", "float16": "<u2"}
"""Dtypes of the pixels in vLLM, with numpy's type of their bits."""
_SECTIONS = ("text_config", "vision_config")
_MAX_SIDE = 2**20
"""Maximum side of an original image in pixels."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """An item that was read, with its pixels as vLLM has them."""

    stated: tuple[int, ...]
    """Number of tiles, and the height and width of the original image in pixels if they are stated. Argument of
    `Processor.vllm_shape`."""
    dtype: str
    bits: NDArray[Any]
    """Bits of the normalized pixels, [tiles, 3, height, width]."""


# numpy.take is faster than an index, and with `mode`, it writes to `out` without a buffer. No index is out of bounds.


class TileLayout(msgspec.Struct, frozen=True, tag="tiles"):
    """The layout of vLLM's tensors of an image whose block contains tiles of one size, uint8 [tiles, height, width, 3].

    vLLM's tiles have the axes (channel, row, column). If `count` and `size` are empty, an item is one tile, and its
    pixels have no axis of tiles.
    """

    values: bytes
    """Normalized value of each byte, for each channel: `Normalization.table`."""
    sides: tuple[int, int]
    """Height and width of a tile in pixels."""
    dtype: str
    """Dtype in which pixels are written: that of vLLM's `--dtype auto`, unless a setting gives another one."""
    count: str = ""
    """vLLM's name of the number of tiles. vLLM concatenates the tiles of several items if it has it."""
    size: str = ""
    """vLLM's name of the height and width of the original image, which are the first numbers of `Plan.grid`."""
    mask: str = ""
    """vLLM's name of a mask that is 1 at the pixels of the image and 0 at padding. It is 1 everywhere, because tiles in
    blocks have no padding."""
    constants: Mapping[str, int] = {}
    """Numbers of the checkpoint that every item has, by their names in vLLM."""

    def num_bytes(self, num_features: int, block_bytes: int) -> int:
        """Return the size in bytes of vLLM's tensors of an item. `block_bytes` is the size of its block."""
        return block_bytes * np.dtype(DTYPES[self.dtype]).itemsize + bool(self.mask) * block_bytes // 3 * 8

    def encoded(self, arrays: Arrays, grid: tuple[int, ...]) -> Payload:
        """Return the item whose block has `arrays`. `grid` is its `Plan.grid`."""
        stored = arrays[PIXELS]
        num_tiles = len(stored)
        table, _ = _tables(self.values, self.dtype)
        bits = np.empty((num_tiles, 3, *self.sides), table.dtype)
        for place, tile in zip(bits, stored, strict=True):
            for channel, own in enumerate(table):
                np.take(own, tile[..., channel], out=place[channel], mode="wrap")
        joined = flat(num_tiles) if self.count else ["batched", {"keep_on_cpu": False}]
        has_tiles = bool(self.count or self.size)
        tensors = {PIXELS: element(bits if has_tiles else bits[0], joined, self.dtype)}
        if self.mask:
            tensors[self.mask] = element(np.ones((num_tiles, *self.sides), np.int64), joined)
        metadata = {name: element(np.array(number, np.int64), _SHARED) for name, number in self.constants.items()}
        if self.count:
            metadata[self.count] = element(np.array(num_tiles, np.int64), BATCHED)
        if self.size:
            metadata[self.size] = element(np.array(grid[:2], np.int64), BATCHED)
        return payload(tensors, metadata)

    def read(self, item: bytes) -> Tiles:
        """Read an item without copying its pixels.

        Raises:
            MediaError: The item is not valid.
            InputError: A tensor is missing, or has another dtype or shape than this layout.

        """
        elements = decoded(item)
        dtype, bits = tensor(elements, PIXELS, DTYPES)
        if not (self.count or self.size):
            bits = bits[np.newaxis]
        if bits.shape[1:] != (expected := (3, *self.sides)):
            raise InputError(
                f"{PIXELS} has the shape {bits.shape}; it must be [tiles, {', '.join(map(str, expected))}]"
            )
        if self.count and numbers(elements, self.count, 1) != (len(bits),):
            raise InputError(
                f"{self.count} is {numbers(elements, self.count, 1)[0]}, but {PIXELS} has {len(bits)} tiles"
            )
        if self.mask:
            self._require_whole(elements, len(bits))
        size = numbers(elements, self.size, 2) if self.size else ()
        if size and max(size) > _MAX_SIDE:
            raise InputError(f"{self.size} is {size}; the limit of each side is {_MAX_SIDE}")
        return Tiles((len(bits), *size), dtype, bits)

    def _require_whole(self, elements: Mapping[str, Element], num_tiles: int) -> None:
        """Raise InputError if the mask says that a pixel of a tile is padding."""
        _, mask = tensor(elements, self.mask, {"int64": "<i8"})
        if mask.shape != (expected := (num_tiles, *self.sides)):
            raise InputError(f"{self.mask} has the shape {mask.shape}; it must be {expected}, the shape of the tiles")
        if zeros := mask.size - np.count_nonzero(mask):
            raise InputError(
                f"{self.mask} has zeros at {zeros} pixels; it must be 1 everywhere, because tiles are whole"
            )

    def write(self, item: Tiles, arrays: Arrays) -> None:
        """Write an item that was read to the arrays of its block.

        vLLM pads an item with tiles of zeros to the number of tiles of another item of its prompt. They are left out.

        Raises:
            InputError: There are too few tiles, a tile that is left out is not zero, or a value is not the normalized
                value of a byte.

        """
        stored = arrays[PIXELS]
        if len(item.bits) < len(stored) or item.bits[len(stored) :].any():
            raise InputError(
                f"{PIXELS} has {len(item.bits)} tiles; an image of this size has {len(stored)}, and further tiles must "
                "contain only zeros"
            )
        table, bytes_of = _tables(self.values, item.dtype)
        found = np.empty(self.sides, np.uint8)
        for place, tile in zip(stored, item.bits, strict=False):
            for channel, bits in enumerate(tile):
                np.take(bytes_of[channel], bits >> _shift(bits.dtype), out=found, mode="wrap")
                if (wrong := np.take(table[channel], found, mode="wrap") != bits).any():
                    row, column = np.argwhere(wrong)[0].tolist()
                    raise InputError(
                        f"{PIXELS} has a value at row {row}, column {column} and channel {channel} that no byte has "
                        f"after normalization in {item.dtype}; normalize images as the checkpoint states"
                    )
                place[..., channel] = found


_SHARED = ["shared", {"keep_on_cpu": True, "batch_size": 1}]
"""Field of a number that all items of a batch share. vLLM's `batch_size` is the number of items that it preprocessed
together, but it does not read it."""


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype that vLLM's `--dtype auto` chooses for a checkpoint with this config.json.

    It is the stated one, but bfloat16 instead of float32. If none is stated, bfloat16 is assumed.
    """
    sections = (config, *(section for name in _SECTIONS if isinstance(section := config.get(name), Mapping)))
    stated = (section.get("dtype") or section.get("torch_dtype") for section in sections)
    return "float16" if next(filter(None, stated), None) == "float16" else "bfloat16"


@lru_cache(maxsize=8)
def _tables(values: bytes, dtype: str) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the bits of the normalized value of each byte, [3, 256], and the byte of each normalized value.

    The second table, uint8 [3, keys], also has a byte for values that no byte is normalized to. Callers must therefore
    look the byte up in the first table. If two bytes have the same value in a dtype, the second table has the higher
    one, because models see no difference.
    """
    floats = np.frombuffer(values, "<f4").reshape(3, 256)
    bits = _rounded(floats, dtype)
    keys = bits >> _shift(bits.dtype)
    bytes_of = np.zeros((3, 1 << (8 * bits.dtype.itemsize - _shift(bits.dtype))), np.uint8)
    for channel in range(3):
        bytes_of[channel][keys[channel]] = np.arange(256, dtype=np.uint8)
    return bits, bytes_of


def _rounded(floats: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Round floats to a dtype and return their bits. Ties are rounded to even, as in torch."""
    if dtype == "float16":
        return floats.astype("<f2").view("<u2")
    bits = floats.view("<u4")
    if dtype == "float32":
        return bits
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")
    return rounded


def _shift(dtype: np.dtype[Any]) -> int:
    """Return how many low bits of a value its key in a table omits: those that float32 has and float16 lacks."""
    return 13 if dtype.itemsize == 4 else 0
