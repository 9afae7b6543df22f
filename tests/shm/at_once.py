"""Allocation without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindie_mm.processes.alone import run_alone
from mindie_mm.shm import Arena, ArraySpec, Block


class _WouldWait(Exception):
    """The request would have to wait."""


def at_once(
    arena: Arena, all_specs: Sequence[Mapping[str, ArraySpec]], *, path_file: str | Path | None
) -> list[Block] | None:
    """Allocate blocks for all items of a request. Return None if the request would have to wait."""

    def refuse() -> None:
        raise _WouldWait

    allocating = arena.allocate_together(all_specs, path_file=path_file, timeout_s=0, before_wait=refuse)
    try:
        return run_alone(allocating)
    except _WouldWait:
        return None
