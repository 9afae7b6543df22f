"""Imports of torch_npu beside a build of torch for CUDA, the only build for x86-64 on PyPI."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_KEYS = "_ZZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11EvE4keys"
"""Symbol of the keys of the allocators' configurations in libc10.so, a std::unordered_set of std::string."""
_OF_ALL = frozenset(
    {
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "expandable_segments",
        "pinned_use_background_threads",
        "large_segment_size_mb",
    }
)
"""Keys of every device. CUDA has added the others, some of which torch_npu adds, too, and then aborts."""


class _Node(ctypes.Structure):
    _fields_ = (("next", ctypes.c_void_p), ("key", ctypes.c_void_p), ("size", ctypes.c_size_t))


@contextmanager
def hidden() -> Iterator[None]:
    """Hide that torch is built for CUDA, because torch_npu refuses such a build."""
    reported = torch._C._get_accelerator
    if torch.version.cuda is not None:
        torch._C._get_accelerator = lambda *_: torch.device("cpu")
        _rename_keys()
    try:
        yield
    finally:
        torch._C._get_accelerator = reported


def _rename_keys() -> None:
    """Replace the first character of CUDA's keys."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    try:
        words = (ctypes.c_void_p * 3).in_dll(library, _KEYS)
    except ValueError:  # this release has no such keys
        return
    address = words[2]  # the first node, after the buckets and their number
    while address:
        node = _Node.from_address(address)
        if ctypes.string_at(node.key, node.size).decode() not in _OF_ALL:
            ctypes.memset(node.key, ord("-"), 1)
        address = node.next
