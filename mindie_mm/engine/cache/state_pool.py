"""The pool of slots for the states of recurrent layers. It records each slot's key and how many holders it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class StatePool:
    """A pool of slots. Each slot stores the state of a sequence after some number of its tokens.

    A snapshot is the state at the end of a full KV block, under the key of that block. Other requests that share the
    block continue from the snapshot. A snapshot without a holder is evicted when a slot is needed, the least recently
    used first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._holders = [0] * num_slots
        self._free = [*reversed(range(num_slots))]
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Slot of each key, the least recently used first."""
        self._keys: dict[int, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the `keys`, from the first, lead to the last one that has a snapshot.

        Return 0 if none has one.
        """
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self), 0)

    def use(self, key: bytes) -> int:
        """Return the slot of a snapshot, which becomes the most recently used."""
        self._slots.move_to_end(key)
        return self._slots[key]

    def can_continue(self, slot: int) -> bool:
        """Return whether a request can continue from `slot`.

        It writes to another slot, or to this one if no other request holds it.
        """
        return not self._holders[slot] or bool(self._free) or self._evictable is not None

    def allocate(self) -> int | None:
        """Return a slot with one holder, or None if all slots are held."""
        if not self._free:
            if (evicted := self._evictable) is None:
                return None
            self.forget([evicted])
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Add a holder."""
        self._holders[slot] += 1

    def free(self, slot: int) -> None:
        """Remove a holder. The slot becomes free if it has no other holder and no key."""
        self._holders[slot] -= 1
        assert self._holders[slot] >= 0, slot
        self._reuse(slot)

    def keep(self, slot: int, key: bytes) -> None:
        """Assign a key to a held slot, unless another slot has this key already."""
        if key not in self._slots:
            self._slots[key] = slot
            self._keys[slot] = key

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove snapshots. Requests that hold their slots keep them."""
        for key in keys:
            if (slot := self._slots.pop(key, None)) is not None:
                del self._keys[slot]
                self._reuse(slot)

    def key_of(self, slot: int) -> bytes | None:
        """Return the key of a slot, or None if it has none."""
        return self._keys.get(slot)

    @property
    def _evictable(self) -> bytes | None:
        """Key of the least recently used snapshot without a holder."""
        return next((key for key, slot in self._slots.items() if not self._holders[slot]), None)

    def _reuse(self, slot: int) -> None:
        if not self._holders[slot] and slot not in self._keys:
            self._free.append(slot)
