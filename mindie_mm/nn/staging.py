"""Media from shared memory to a device: read by the device itself, on a stream of its own beside the computation.

An arena's pages are registered with the driver once, when the first item in it is taken. Where that cannot be done, and
for what lies elsewhere, the bytes go through pinned memory, one copy more. What a later step needs is fetched while the
device computes this one.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from mindie_mm.device import kind_of
from mindie_mm.nn.splice import ItemView
from mindie_mm.shm import Ref, View
from mindie_mm.shm.reader.mapped import MappedArena

_log = logging.getLogger(__name__)


def to_device(view: ItemView, name: str, device: torch.device) -> Tensor:
    """The array `name` of an item on `device`, in the order of its current stream; on the host without a copy.

    Its bytes may still be read when this returns: call `settle` before the view is verified.
    """
    if device.type == "cpu":
        return from_dlpack(view[name])
    return _staging(device).bring(view, name)


def fetch(views: Iterable[ItemView], device: torch.device) -> None:
    """Queues copies of the items' arrays to `device`, where `to_device` finds them; on the host there are none.

    What was fetched else is let go of. `settle` waits for these copies, too.
    """
    if device.type != "cpu":
        _staging(device).fetch(views)


def settle(device: torch.device) -> None:
    """Waits until all that `to_device` and `fetch` were asked for has been read."""
    if device.type != "cpu":
        _staging(device).settle()


@dataclass(frozen=True, slots=True)
class _Copy:
    """An array on its way to the device, or there."""

    target: Tensor
    copied: torch.Event
    """Behind the copy, on the stream of copies."""


class Staging:
    """Brings media to one device: over a stream for copies, and from arenas that the device reads by itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._registered: dict[MappedArena, mmap.mmap | None] = {}
        self._reading: list[Tensor] = []
        """Arrays that the device is reading by itself."""
        self._names: set[str] = set()
        """Arrays that towers have asked for: of a block's others the host makes use."""
        self._fetched: dict[MappedArena, dict[Ref, dict[str, _Copy]]] = {}
        """Only as long as the arena is mapped: the same words may lead to another content in a later one."""

    def bring(self, view: ItemView, name: str) -> Tensor:
        """As `to_device`."""
        self._names.add(name)
        ahead = self._fetched.get(view.arena, {}).get(view.ref, {}) if isinstance(view, View) else {}
        copy = ahead.pop(name, None) or self._copy(view, name)
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(copy.copied)
        copy.target.record_stream(computing)
        return copy.target

    def fetch(self, views: Iterable[ItemView]) -> None:
        """As `fetch`, of what lies in arenas; files on disk and segments are read when they are needed."""
        known, self._fetched = self._fetched, {}
        for view in views:
            if isinstance(view, View) and self._hears_of(view.arena):
                copies = known.get(view.arena, {}).get(view.ref)
                if copies is None:
                    copies = {name: self._copy(view, name) for name in self._names.intersection(view)}
                self._fetched.setdefault(view.arena, {})[view.ref] = copies

    def _copy(self, view: ItemView, name: str) -> _Copy:
        array = from_dlpack(view[name])
        registered = self._registered_memory(view, name, array)
        if registered is not None:
            self._reading.append(registered)
            target = kind_of(self._device).read(registered, self._stream)
        else:
            with self._stream:
                target = array.pin_memory().to(self._device, non_blocking=True)
        return _Copy(target, self._stream.record_event())

    def settle(self) -> None:
        """As `settle`."""
        if self._reading:
            self._stream.synchronize()
            self._reading.clear()

    def _registered_memory(self, view: ItemView, name: str, array: Tensor) -> Tensor | None:
        """The array `name`, as `array`, in memory that the driver reads by itself; None where it is in none."""
        found = view.file_offset(name) if isinstance(view, View) else None
        pages = self._pages(found[0]) if found is not None else None
        if found is None or pages is None or not array.numel():
            return None
        flat = torch.frombuffer(pages, dtype=array.dtype, count=array.numel(), offset=found[1])
        return flat.view(array.shape)

    def _hears_of(self, arena: MappedArena) -> bool:
        """Whether it is told when the arena is given up."""
        self._pages(arena)
        return arena in self._registered

    def _pages(self, arena: MappedArena) -> mmap.mmap | None:
        """The arena's file as registered memory; None where it cannot be."""
        if arena not in self._registered:
            pages = arena.writable_pages()
            if pages is None:
                return None
            if not kind_of(self._device).pin(_address(pages), len(pages)):
                _log.warning("the driver does not register an arena: media in it are copied once more on their way")
                pages = None
            self._registered[arena] = pages
            arena.before_close(partial(self._unregister, arena))
        return self._registered[arena]

    def _unregister(self, arena: MappedArena) -> None:
        pages = self._registered.pop(arena)
        self._fetched.pop(arena, None)
        self.settle()
        if pages is not None:
            kind_of(self._device).unpin(_address(pages))


_staging = cache(Staging)


def _address(pages: mmap.mmap) -> int:
    return torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
