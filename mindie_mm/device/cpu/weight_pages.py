"""Pages of weight files that are in memory although no tensor needs them any more.

safetensors maps a whole weight file until the last of its tensors is freed. Where layers are joined or quantized,
their old weights would therefore stay resident beside the new ones.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor, nn

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .*\.safetensors\n")
"""First line of a mapped weight file in /proc/PID/smaps: start, end, and further columns that end in the path."""
_MADV_POPULATE_READ = 22  # from <linux/mman.h>, since Linux 5.14. The mmap module does not define it.


@dataclass(slots=True)
class _Mapping:
    """Addresses of a mapped weight file."""

    start: int
    stop: int
    anonymous_kib: int = 0
    """Size of the pages that were written and so differ from the file."""


def drop_unused_pages(module: nn.Module) -> None:
    """Return to the kernel the pages of weight files that hold no parameter or buffer of `module`.

    A tensor outside of `module` stays valid: its next reader faults in the pages again. A file with written pages is
    left alone, because the kernel would replace these pages by the content of the file.
    """
    with suppress(OSError, AttributeError):  # without /proc or madvise, the pages stay
        advise = ctypes.CDLL(None).madvise
        for mapping in [one for one in _mappings() if not one.anonymous_kib]:
            _advise(advise, mapping.start, mapping.stop, mmap.MADV_DONTNEED)
            for tensor in chain(module.parameters(), module.buffers()):
                start, stop = _addresses(tensor)
                if mapping.start <= start < stop <= mapping.stop:
                    _advise(advise, start, stop, _MADV_POPULATE_READ)


def _mappings() -> Iterator[_Mapping]:
    mapping = None
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if not line[0].isupper():  # the first line of a mapping; all others begin with the name of a count
                if mapping is not None:
                    yield mapping
                match = _MAPPING.fullmatch(line)
                mapping = _Mapping(int(match[1], 16), int(match[2], 16)) if match else None
            elif mapping is not None and line.startswith("Anonymous:"):
                mapping.anonymous_kib = int(line.split()[1])
    if mapping is not None:
        yield mapping


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of the storage of `tensor` and the first address after it. Return zeros if unknown."""
    if tensor.device.type != "cpu":
        return 0, 0
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except RuntimeError:  # packed weights, for example, do not tell their address
        return 0, 0


def _advise(advise: ctypes._NamedFuncPointer, start: int, stop: int, advice: int) -> None:
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), advice)
