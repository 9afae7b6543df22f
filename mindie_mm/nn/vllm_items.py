"""Media items of vLLM's payloads: the preprocessed tensors of one image or video, in MessagePack.

vLLM's /render returns an item for each image as base64, and its /inference/v1/generate reads them. An item is a map
from the key of a tensor to `data`, the dtype, shape and bytes of the tensor, and to `field`, how vLLM joins it with
those of other items (`vllm/v1/serial_utils.py` and `vllm/multimodal/inputs.py` in vLLM 0.32).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from mindie_mm.errors import InputError, MediaError
from mindie_mm.inputs.checks import counted

Arrays = Mapping[str, NDArray[Any]]

_RAW = 3
"""MessagePack extension type of the bytes of a tensor."""
_MAX_AXES = 8
_PICOSECONDS = 10**12
"""Picoseconds per second."""
_MAX_SECONDS = 2**20

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]  # numpy refuses some shapes without elements
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_AXES)]
_Data = tuple[str, _Shape, Ext]
"""Dtype, shape, and bytes in little-endian order."""
_Seconds = Annotated[list[Annotated[float, msgspec.Meta(ge=0, lt=_MAX_SECONDS)]], msgspec.Meta(max_length=2**16)]
T = TypeVar("T")


class Element(msgspec.Struct, frozen=True):
    """A tensor of an item that is read. Its `field` is skipped, because a hostile one may have millions of objects."""

    data: msgspec.Raw
    """`_Data` of a tensor, or a list of numbers."""


class WrittenElement(msgspec.Struct, frozen=True):
    """A tensor of an item that is written."""

    data: _Data | list[float]
    field: list[Any]
    """How vLLM joins the tensors of several items."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(dict[str, Element])
_data_decoder = msgspec.msgpack.Decoder(_Data)
_seconds_decoder = msgspec.msgpack.Decoder(_Seconds)


@dataclass(frozen=True, slots=True)
class Payload:
    """An item as vLLM's /render returns it."""

    tensors: bytes
    """All tensors of the item."""
    metadata: bytes | None
    """The tensors that vLLM keeps on the CPU, such as the grid. None if there are none."""


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """An item that was read, with its patches as vLLM has them."""

    stated: tuple[int, ...]
    """`Plan.grid` of the item, as the tensors state it. Argument of `Processor.vllm_shape`."""
    pixels: NDArray[np.uint8]
    """uint8 [t * h * w, 3, temporal, patch * patch]."""


class PatchLayout(msgspec.Struct, frozen=True, tag="patches"):
    """The tensors of an item that consists of patches. vLLM has its pixels as uint8, before they are normalized.

    A row of vLLM's pixels has the axes (channel, time, row, column), and a row of this package's block (time, row,
    column, channel). vLLM repeats the frame of an image in time.
    """

    pixels: str
    """Name of the pixels in a block and in vLLM, such as `pixel_values`."""
    grid: str
    """vLLM's name of the number of patches along time, height and width."""
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    """Side of the square of patches that becomes one feature, in patches."""
    seconds: str = ""
    """vLLM's name of the time between two patches in seconds. In `Plan.grid`, it follows the number of patches, in
    picoseconds. Empty if the grid has no time."""
    times: str = ""
    """vLLM's name of a tensor with the time of each temporal patch in seconds. In `Plan.grid`, the times follow the
    number of patches, in tenths of a second. vLLM has more digits, but writes only tenths into prompts. Empty if the
    grid has no times."""

    def num_bytes(self, num_features: int, block_bytes: int) -> int:
        """Return the size in bytes of vLLM's tensors of an item. `block_bytes` is the size of its block."""
        return num_features * self.merge_size**2 * 3 * self.temporal_patch_size * self.patch_size**2

    def encoded(self, arrays: Arrays, grid: tuple[int, ...]) -> Payload:
        """Return the item whose block has `arrays`. `grid` is its `Plan.grid`."""
        stored = arrays[self.pixels]
        frames = stored.reshape(len(stored), -1, self.patch_size**2, 3)
        planes = np.empty((len(stored), 3, self.temporal_patch_size, self.patch_size**2), np.uint8)
        planes[...] = frames.transpose(0, 3, 1, 2)
        metadata = {self.grid: element(np.array(grid[:3], np.int64), BATCHED)}
        if self.seconds:
            metadata[self.seconds] = element(np.array(grid[3] / _PICOSECONDS, np.float32), BATCHED)
        if self.times:
            metadata[self.times] = WrittenElement([tenths / 10 for tenths in grid[3:]], BATCHED)
        return payload({self.pixels: element(planes.reshape(len(stored), -1), flat(len(stored)))}, metadata)

    def read(self, item: bytes) -> Patches:
        """Read an item without copying its pixels.

        Raises:
            MediaError: The item is not valid.
            InputError: A tensor is missing, or has another dtype or shape than this layout.

        """
        elements = decoded(item)
        t, h, w = numbers(elements, self.grid, 3)
        _, pixels = tensor(elements, self.pixels, {"uint8": "u1"})
        expected = (t * h * w, 3 * self.temporal_patch_size * self.patch_size**2)
        if pixels.shape != expected:
            raise InputError(
                f"{self.pixels} has the shape {pixels.shape}, but {self.grid} is {(t, h, w)}, which needs the shape "
                f"{expected}"
            )
        planes = pixels.reshape(len(pixels), 3, self.temporal_patch_size, self.patch_size**2)
        return Patches((t, h, w, *self._interval(elements), *self._tenths(elements, t)), planes)

    def _interval(self, elements: Mapping[str, Element]) -> tuple[int, ...]:
        """Return the time between two patches in picoseconds, if the grid has one."""
        if not self.seconds:
            return ()
        _, seconds = tensor(elements, self.seconds, {"float32": "<f4"})
        if seconds.shape not in ((), (1,)) or not 0 < (number := float(seconds.reshape(-1)[0])) < _MAX_SECONDS:
            raise InputError(
                f"{self.seconds} has the shape {seconds.shape} or a value outside (0, {_MAX_SECONDS}); it must be the "
                "seconds between two patches"
            )
        return (round(number * _PICOSECONDS),)

    def _tenths(self, elements: Mapping[str, Element], count: int) -> tuple[int, ...]:
        """Return the times of the temporal patches in tenths of a second, if the grid has them."""
        if not self.times:
            return ()
        seconds = _parsed(elements, self.times, _seconds_decoder)
        if len(seconds) != count:
            raise InputError(f"{self.times} has {len(seconds)} times, but {self.grid} begins with {count}")
        # Format the time as vLLM does for the prompt, because round() may give another tenth.
        return tuple(int(f"{time:.1f}".replace(".", "")) for time in seconds)

    def write(self, item: Patches, arrays: Arrays) -> None:
        """Write an item that was read to the arrays of its block.

        Raises:
            InputError: The block stores one frame of an image, but the frames of the item differ.

        """
        stored = arrays[self.pixels].reshape(len(item.pixels), -1, self.patch_size**2, 3)
        num_stored = stored.shape[1]
        stored[...] = item.pixels.transpose(0, 2, 3, 1)[:, :num_stored]
        if any(
            (item.pixels[:, :, at] != item.pixels[:, :, 0]).any() for at in range(num_stored, self.temporal_patch_size)
        ):
            raise InputError(f"the frames of an image in {self.pixels} differ; they must be equal")


BATCHED = ["batched", {"keep_on_cpu": True}]
"""`WrittenElement.field` of a small tensor. vLLM stacks the tensors of several items, one row per item."""


def flat(num_rows: int) -> list[Any]:
    """Return `WrittenElement.field` of a tensor whose rows vLLM concatenates with those of other items.

    vLLM's `slices` also have the rows of items that it preprocessed with this one, but it does not read them.
    """
    return ["flat", {"keep_on_cpu": False, "slices": [[[0, num_rows, None]]], "dim": 0}]


def element(array: NDArray[Any], field: list[Any], dtype: str = "") -> WrittenElement:
    """Return a tensor of an item. `dtype` is the name of a dtype that numpy lacks; `array` then has the bits."""
    return WrittenElement((dtype or str(array.dtype), array.shape, Ext(_RAW, array.data.cast("B"))), field)


def payload(tensors: Mapping[str, WrittenElement], metadata: Mapping[str, WrittenElement]) -> Payload:
    """Return an item with these tensors, and with the small tensors that vLLM keeps on the CPU."""
    return Payload(_encode({**tensors, **metadata}), _encode(metadata) if metadata else None)


def decoded(item: bytes) -> Mapping[str, Element]:
    """Return the tensors of an item. Raise MediaError if it is not valid."""
    try:
        return _decoder.decode(item)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MediaError(f"the item is not a map of tensors in MessagePack: {error}") from None


def numbers(elements: Mapping[str, Element], key: str, count: int) -> tuple[int, ...]:
    """Return the positive integers of a small tensor. Raise InputError if there are not `count` of them."""
    _, found = tensor(elements, key, {"int64": "<i8"})
    if found.size != count or found.ndim > 1 or found.min() < 1:
        raise InputError(
            f"{key} has the shape {found.shape} or numbers below 1; it must have {counted(count, 'positive number')}"
        )
    return tuple(found.reshape(-1).tolist())


def tensor(elements: Mapping[str, Element], key: str, dtypes: Mapping[str, str]) -> tuple[str, NDArray[Any]]:
    """Return the dtype of a tensor, and the tensor as an array over the item's bytes.

    Args:
        elements: Tensors of the item.
        key: Name of the tensor.
        dtypes: Dtypes that the tensor may have, with numpy's little-endian dtype for each of them.

    Raises:
        InputError: The tensor is missing, or its dtype, shape and bytes contradict each other.

    """
    stated, shape, raw = _parsed(elements, key, _data_decoder)
    if stated not in dtypes:
        advice = ". Start vLLM's render server with --mm-device-do-normalize" if "uint8" in dtypes else ""
        raise InputError(f"{key} has the dtype {stated[:40]!r}; it must be {' or '.join(dtypes)}{advice}")
    dtype, data = np.dtype(dtypes[stated]), memoryview(raw.data)
    num_bytes = math.prod(shape) * dtype.itemsize
    if raw.code != _RAW or len(data) != num_bytes:
        raise InputError(
            f"{key} has {len(data)} bytes of the extension type {raw.code}; its dtype {stated} and shape {shape} need "
            f"{num_bytes} bytes of the type {_RAW}"
        )
    array: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
    return stated, array


def _parsed(elements: Mapping[str, Element], key: str, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return the data of a tensor. Raise InputError if it is missing, or MediaError if it has another form."""
    if (found := elements.get(key)) is None:
        raise InputError(f"the item has no tensor {key}; it has {', '.join(sorted(elements))[:200] or 'no tensors'}")
    try:
        return decoder.decode(found.data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MediaError(f"{key} is not a tensor in MessagePack: {error}") from None
