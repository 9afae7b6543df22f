"""Copies of media from shared memory to a device, by DMA on a separate stream.

The driver registers the pages of an arena once, when the first item in that arena is copied. Media in other places, or
in an arena that the driver cannot register, need one more copy through pinned memory. Media of a later step are fetched
while the device computes the current step.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from mindie_mm.device import kind_of
from mindie_mm.nn.splice import ItemView
from mindie_mm.shm import Ref, View
from mindie_mm.shm.mapped import MappedArena

_log = logging.getLogger(__name__)


def to_device(view: Mapping[str, NDArray[Any]], name: str, device: torch.device) -> Tensor:
    """Copy one array of an item to `device`. On the CPU, return the array without a copy.

    The device's current stream waits for the copy. The device may still be reading the source when this function
    returns, so call `settle` before verifying the view.

    Args:
        view: Arrays of the item.
        name: Name of the array.
        device: Target device.

    """
    if device.type == "cpu":
        return from_dlpack(view[name])
    return _staging(device).bring(view, name)


def fetch(views: Iterable[ItemView], device: torch.device) -> None:
    """Queue copies of the items' arrays to `device` for later calls to `to_device`. On the CPU, do nothing.

    Earlier copies for other items are dropped. `settle` also waits for the queued copies.
    """
    if device.type != "cpu":
        _staging(device).fetch(views)


def settle(device: torch.device) -> None:
    """Wait until the device has read the sources of all copies that `to_device` and `fetch` queued."""
    if device.type != "cpu":
        _staging(device).settle()


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of an array to the device, queued or complete."""

    target: Tensor
    copied: torch.Event
    """Event recorded after the copy on the copy stream."""


class Staging:
    """The copy stream of one device and the arenas registered for DMA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._registered: dict[MappedArena, mmap.mmap | None] = {}
        self._reading: list[Tensor] = []
        """Registered arrays that the device may still be reading."""
        self._names: set[str] = set()
        """Names of the arrays that towers have requested. Only the host uses the other arrays of a block."""
        self._fetched: dict[MappedArena, dict[Ref, dict[str, _Copy]]] = {}
        """Fetched copies by arena and reference. They are dropped when the arena is closed.

        In a later arena, the same handle words may refer to other content.
        """

    def bring(self, view: Mapping[str, NDArray[Any]], name: str) -> Tensor:
        """Implement `to_device`."""
        self._names.add(name)
        ahead = self._fetched.get(view.arena, {}).get(view.ref, {}) if isinstance(view, View) else {}
        copy = ahead.pop(name, None) or self._copy(view, name)
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(copy.copied)
        copy.target.record_stream(computing)
        return copy.target

    def fetch(self, views: Iterable[ItemView]) -> None:
        """Implement `fetch` for items in arenas. Items in segments are copied on demand."""
        known, self._fetched = self._fetched, {}
        for view in views:
            if isinstance(view, View) and self._hears_of(view.arena):
                copies = known.get(view.arena, {}).get(view.ref)
                if copies is None:
                    copies = {name: self._copy(view, name) for name in self._names.intersection(view)}
                self._fetched.setdefault(view.arena, {})[view.ref] = copies

    def _copy(self, view: Mapping[str, NDArray[Any]], name: str) -> _Copy:
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
        """Implement `settle`."""
        if self._reading:
            self._stream.synchronize()
            self._reading.clear()

    def _registered_memory(self, view: Mapping[str, NDArray[Any]], name: str, array: Tensor) -> Tensor | None:
        """Return `array`, named `name`, as a tensor in registered memory.

        Return None if its memory is not registered.
        """
        file_offset = view.file_offset(name) if isinstance(view, View) else None
        pages = self._pages(file_offset[0]) if file_offset is not None else None
        if file_offset is None or pages is None or not array.numel():
            return None
        flat = torch.frombuffer(pages, dtype=array.dtype, count=array.numel(), offset=file_offset[1])
        return flat.view(array.shape)

    def _hears_of(self, arena: MappedArena) -> bool:
        """Return whether this object is notified before the arena is closed."""
        self._pages(arena)
        return arena in self._registered

    def _pages(self, arena: MappedArena) -> mmap.mmap | None:
        """Return the arena's pages, registered with the driver. Return None if they cannot be registered."""
        if arena not in self._registered:
            pages = arena.writable_pages()
            if pages is None:
                return None
            if not kind_of(self._device).pin(_address(pages), len(pages)):
                _log.warning(
                    "the driver cannot register an arena; media in the arena are copied once more on the way to "
                    "the device"
                )
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
