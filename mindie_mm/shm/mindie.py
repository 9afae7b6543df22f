"""MindIE-LLM's wire format (docs/wire-format.md, section 5). The functions have the same names as in MindIE-LLM.

segment = create_shm(array.nbytes, "request/shm_name.txt")
np.ndarray(array.shape, array.dtype, segment.buf)[...] = array
name_word, shape_word = encode_shm_name_to_int64(segment.name), encode_shape_to_int64(array.shape)

tensor = get_data_from_shm(name_word, shape_word, array.dtype, "cpu")    # another process
release_shared_memory("request/shm_name.txt")                            # any process

If something is wrong, MindIE logs a warning and returns uninitialized memory, or ignores the problem. These functions
raise an error instead.
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
from mindie_mm.shm.dev_shm import give_name
from mindie_mm.shm.format.mindie_words import (
    decode_shape_from_int64,
    decode_shm_name_from_int64,
    encode_shape_to_int64,
    encode_shm_name_to_int64,
    is_segment_name,
)
from mindie_mm.shm.format.spec import DTYPE_CODES, ITEM_SIZES
from mindie_mm.shm.path_file import recorded, release
from mindie_mm.shm.segment import (
    free_name,
    map_segment,
    opened_segment,
    require_size,
    reserved,
    unlink_segment,
)

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
    """Segment that this process created, with the attributes and methods of Python's SharedMemory."""

    name: str
    """Name of the file in /dev/shm: psm_ and 8 hex digits."""
    size: int
    """Size in bytes."""
    buf: memoryview
    """Writable memory of the whole segment."""

    def close(self) -> None:
        """Release `buf`. The memory stays mapped while an array uses it.

        Calling this method is optional and idempotent.
        """
        with suppress(BufferError):
            self.buf.release()

    def unlink(self) -> None:
        """Remove the segment's file. Processes that have mapped it keep its pages. This method is idempotent."""
        unlink_segment(self.name)


def create_shm(size: int, path: str | os.PathLike[str]) -> Segment:
    """Create a segment that is filled with zeros.

    The segment is recorded in the path file before it gets its name. If the call raises, no segment remains.

    Args:
        size: Size in bytes, 1 to 10^9.
        path: Path file of the request.

    Raises:
        InputError: The size is not an integer of at least 1, or the path file is not a regular file of this user.
        LimitExceeded: The size is more than 10^9 bytes, or the path file is full.
        SharedMemoryError: /dev/shm does not have enough space, or the path file cannot be written to or was removed
            during the call.

    """
    path_file, name = Path(path), free_name()
    with reserved(size) as descriptor:
        segment = Segment(name, size, memoryview(mmap.mmap(descriptor, size)))
        with recorded(path_file, name):
            give_name(descriptor, name)
    if not path_file.exists():  # a release that ran before the segment had its name did not find the segment
        segment.unlink()
        raise SharedMemoryError(f"path file {path_file} was removed while segment {name} was being created")
    return segment


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """Name, dtype and shape of a segment. Its two handle words encode the name and the shape, but not the dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_words(cls, name_word: SupportsIndex, shape_word: SupportsIndex, dtype: str) -> Self:
        """Decode two handle words. Raise CorruptReference if one is damaged, or if the name is not a segment name."""
        name = decode_shm_name_from_int64(name_word)
        if not is_segment_name(name):
            raise CorruptReference(
                f"word {int(name_word)} encodes the name {name}; the name of a segment must be psm_ and 8 "
                "hexadecimal digits"
            )
        return cls(name, dtype, tuple(decode_shape_from_int64(shape_word)))

    @property
    def nbytes(self) -> int:
        """Required size of the segment in bytes."""
        return prod(self.shape) * ITEM_SIZES[DTYPE_CODES[self.dtype]]


def is_segment_word(word: SupportsIndex) -> bool:
    """Return whether `word` is a valid name word for a segment name, that is, for psm_ and 8 hex digits."""
    try:
        return is_segment_name(decode_shm_name_from_int64(word))
    except CorruptReference:
        return False


def get_data_from_shm(
    name_word: SupportsIndex, shape_word: SupportsIndex, dtype: Any = "float32", device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Copy a segment's array to a tensor on `device`.

    Args:
        name_word: Name word, an int or a 0-d tensor.
        shape_word: Shape word, an int or a 0-d tensor.
        dtype: numpy dtype of the array. The handle words do not encode the dtype, so pass the dtype of the writer.
        device: Device of the tensor.

    Returns:
        A tensor with the shape in `shape_word` and the dtype `dtype`.

    Raises:
        InputError: A handle word is not an integer, or section 1.1 of docs/wire-format.md does not list the dtype.
        CorruptReference: A handle word is damaged, or the segment has more bytes than the shape and dtype require.
        LimitExceeded: The array has more than 10^9 bytes.
        SegmentMissing: The segment was removed or truncated.
        SharedMemoryError: The segment cannot be opened.

    """
    import numpy as np  # imported late, like torch, because the tools for operators need neither library
    import torch

    spec = SegmentSpec.from_words(name_word, shape_word, _dtype_name(dtype))
    with opened_segment(spec.name, spec.nbytes) as descriptor, open(descriptor, "rb", 0, closefd=False) as file:
        # Read the file instead of mapping it. If another process truncates the segment meanwhile, a read raises an
        # error, but an access to a mapping raises SIGBUS.
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
        raise InputError(f"dtype {name} is not one of {', '.join(DTYPE_CODES)}")
    return name


def release_shared_memory(path: str | os.PathLike[str]) -> int:
    """Free every block and segment that a path file lists, and return how many this call freed.

    This function is idempotent.

    Raises:
        MindieMMError: In the same cases as `release`.

    """
    return release(Path(path))


@dataclass(frozen=True, slots=True, eq=False)
class SegmentsRef:
    """Reference to the segments of one item.

    References compare by identity, because a name can be reused for other content.
    """

    names: tuple[str, ...]


class SegmentsView(Mapping[str, "np.ndarray[Any, Any]"]):
    """Read-only arrays of one item in MindIE's format. Each array is a view of the pages of its segment.

    This class is the counterpart of `View`. The arrays stay readable after the segments' files are removed. `verify`
    detects a truncated segment. Segments have no generations, so `verify` cannot detect that a writer has overwritten
    a segment.
    """

    __slots__ = ("_arrays", "_segments", "digest", "ref")

    def __init__(self, segments: Mapping[str, SegmentSpec], integers: Mapping[str, Sequence[int]]) -> None:
        """Map the segments of an item.

        Args:
            segments: Segments by array name.
            integers: Values of small integer arrays, by array name. The handle words encode these values directly. The
                view contains the values as int64 arrays.

        Raises:
            MindieMMError: In the same cases as `get_data_from_shm`.

        """
        import numpy as np

        self.ref = SegmentsRef(tuple(spec.name for spec in segments.values()))
        """Reference that identifies the item."""
        self.digest = None
        """Always None, because MindIE's format has no digest. The item is therefore never cached for other requests."""
        self._segments = {name: (spec, map_segment(spec.name, spec.nbytes)) for name, spec in segments.items()}
        self._arrays: dict[str, np.ndarray[Any, Any]] = {
            name: np.ndarray(spec.shape, spec.dtype, mapping) for name, (spec, mapping) in self._segments.items()
        }
        self._arrays |= {name: np.array(values, np.int64) for name, values in integers.items()}

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        self.verify()  # a read from a truncated segment would raise SIGBUS
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def nbytes(self) -> int:
        """Total size of the arrays in bytes. Reading this property does not access the segments."""
        return sum(array.nbytes for array in self._arrays.values())

    def part(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> SegmentsView:
        """Return a view of one item, if the segments contain several items. `arrays` are the item's arrays."""
        part = object.__new__(SegmentsView)
        part.ref, part.digest = SegmentsRef(self.ref.names), None
        part._segments, part._arrays = self._segments, {**arrays}
        return part

    def verify(self) -> None:
        """Raise SegmentMissing if a segment has been truncated since it was mapped."""
        for spec, mapping in self._segments.values():
            require_size(spec.name, mapping.size(), spec.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.verify()
