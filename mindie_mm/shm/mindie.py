"""MindIE-LLM's wire, by the names of its own functions (docs/wire-format.md, section 5).

segment = create_shm(array.nbytes, "request/shm_name.txt")
np.ndarray(array.shape, array.dtype, segment.buf)[...] = array
name_word, shape_word = encode_shm_name_to_int64(segment.name), encode_shape_to_int64(array.shape)

tensor = get_data_from_shm(name_word, shape_word, array.dtype, "cpu")    # another process
release_shared_memory("request/shm_name.txt")                            # any process

What MindIE answers with a warning and uninitialised memory, or not at all, is an error here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from mindie_mm.errors import CorruptReference, InputError, SharedMemoryError
from mindie_mm.shm.format.mindie_words import (
    decode_shape_from_int64,
    decode_shm_name_from_int64,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
    is_segment_name,
)
from mindie_mm.shm.format.spec import DTYPE_CODES, ITEM_SIZES
from mindie_mm.shm.memory.anonymous_file import give_name
from mindie_mm.shm.memory.segment import (
    free_name,
    map_segment,
    opened_segment,
    require_size,
    reserved,
    unlink_segment,
)
from mindie_mm.shm.requests.path_file import recorded, release

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "Segment",
    "SegmentSpec",
    "SegmentsRef",
    "SegmentsView",
    "create_shm",
    "decode_shape_from_int64",
    "decode_shm_name_from_int64",
    "encode_shape_to_int64",
    "encode_shm_name_to_int64",
    "get_data_from_shm",
    "is_segment_word",
    "release_shared_memory",
]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A segment that this process made, with the face of Python's SharedMemory."""

    name: str
    """psm_ and 8 hex digits: its file in /dev/shm."""
    size: int
    """Bytes."""
    buf: memoryview
    """All of it, to write into."""

    def close(self) -> None:
        """Gives up `buf`; the mapping goes with the last array over it. Idempotent, and not needed."""
        with suppress(BufferError):
            self.buf.release()

    def unlink(self) -> None:
        """Removes its file; whoever maps it keeps its pages. Idempotent."""
        unlink_segment(self.name)


def create_shm(size: int, path: str | os.PathLike[str]) -> Segment:
    """A new segment of `size` bytes, 1 to 10^9, all 0, recorded in the path file `path` before it has a name.

    InputError, LimitExceeded; SharedMemoryError where there is no room, or the path file cannot be written or was
    removed meanwhile. On any error there is no segment.
    """
    path_file, name = Path(path), free_name()
    with reserved(size) as descriptor:
        segment = Segment(name, size, memoryview(mmap.mmap(descriptor, size)))
        with recorded(path_file, name):
            give_name(descriptor, name)
    if not path_file.exists():  # released between the line and the name: nobody would free it
        segment.unlink()
        raise SharedMemoryError(f"path file {path_file} was removed while segment {name} was made")
    return segment


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """What two words say of a segment, with the dtype that they do not carry."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_words(cls, name_word: SupportsIndex, shape_word: SupportsIndex, dtype: str) -> Self:
        """CorruptReference for a damaged word, and for a name that no segment has."""
        name = decode_shm_name_from_int64(name_word)
        if not is_segment_name(name):
            raise CorruptReference(f"word {int(name_word)} names {name}, a segment is psm_ and 8 hex digits")
        return cls(name, dtype, tuple(decode_shape_from_int64(shape_word)))

    @property
    def nbytes(self) -> int:
        """Bytes that the segment must have."""
        return prod(self.shape) * ITEM_SIZES[DTYPE_CODES[self.dtype]]


def is_segment_word(word: SupportsIndex) -> bool:
    """Whether a word is, to the last bit, the name word of a segment: psm_ and 8 hex digits."""
    try:
        return is_segment_name(decode_shm_name_from_int64(word))
    except CorruptReference:
        return False


def get_data_from_shm(
    name_word: SupportsIndex, shape_word: SupportsIndex, dtype: Any = "float32", device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A copy of a segment's array, on `device`. Words are ints or 0-d tensors, `dtype` is numpy's.

    It must be the dtype that was written: no word carries it. SegmentMissing if the segment is gone or was cut short,
    CorruptReference for a damaged word or another number of bytes than words and dtype make, LimitExceeded above 10^9
    bytes, InputError for a dtype that is not of section 1.1. Never anything but the array.
    """
    import numpy as np  # late, both: the operator's tools do without
    import torch

    spec = SegmentSpec.from_words(name_word, shape_word, _dtype_name(dtype))
    with opened_segment(spec.name, spec.nbytes) as descriptor, open(descriptor, "rb", 0, closefd=False) as file:
        # Read, not mapped: a segment that is cut meanwhile is an error then, and no SIGBUS.
        array = np.empty(spec.shape, spec.dtype)
        require_size(spec.name, file.readinto(array.reshape(-1).view(np.uint8).data), spec.nbytes)
    return torch.from_numpy(array).to(device)


def _dtype_name(dtype: Any) -> str:
    import numpy as np

    try:
        name = str(np.dtype(dtype).name)
    except TypeError:
        name = repr(dtype)
    if name not in DTYPE_CODES:
        raise InputError(f"dtype {name} is none of {', '.join(DTYPE_CODES)}")
    return name


def release_shared_memory(path: str | os.PathLike[str]) -> int:
    """Frees all that the path file names; the number of what this call freed. Idempotent; errors as `release`."""
    return release(Path(path))


@dataclass(frozen=True, slots=True, eq=False)
class SegmentsRef:
    """The segments of one item. Equal to itself alone: a name says nothing of its content, and may come again."""

    names: tuple[str, ...]


class SegmentsView(Mapping[str, "np.ndarray[Any, Any]"]):
    """The arrays of one item, each over its own segment's pages, read-only; a `View` of the other wire.

    Once made, it outlives the segments' files. Nothing tells a segment's old content from a new one that its writer
    puts there, as a block's generation does; a segment that was cut short is found by `verify`.
    """

    __slots__ = ("_arrays", "_segments", "digest", "ref")

    def __init__(self, segments: Mapping[str, SegmentSpec], integers: Mapping[str, Sequence[int]]) -> None:
        """Arrays in segments by name, and, as int64, those whose few integers stood in a word. As get_data_from_shm."""
        import numpy as np

        self.ref = SegmentsRef(tuple(spec.name for spec in segments.values()))
        """Tells the item from every other."""
        self.digest = None
        """The wire carries none: such an item is never kept for another request."""
        self._segments = {name: (spec, map_segment(spec.name, spec.nbytes)) for name, spec in segments.items()}
        self._arrays: dict[str, np.ndarray[Any, Any]] = {
            name: np.ndarray(spec.shape, spec.dtype, mapping) for name, (spec, mapping) in self._segments.items()
        }
        self._arrays |= {name: np.array(values, np.int64) for name, values in integers.items()}

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        self.verify()  # reading where a segment was cut would end the process by SIGBUS
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; told without reading a segment."""
        return sum(array.nbytes for array in self._arrays.values())

    def verify(self) -> None:
        """SegmentMissing if a segment was cut short since."""
        for spec, mapping in self._segments.values():
            require_size(spec.name, mapping.size(), spec.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.verify()
