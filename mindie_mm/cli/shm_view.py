"""Text output of `mindie-mm shm`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mindie_mm.cli.console import table_lines
from mindie_mm.shm.arena_info import ArenaInfo, BlockInfo
from mindie_mm.shm.dev_shm import ShmSpace
from mindie_mm.shm.format.layout import SHM_DIRECTORY, block_name
from mindie_mm.shm.unrecorded import SegmentInfo


def arena_rows(arenas: Sequence[ArenaInfo]) -> list[str]:
    """Return a heading and one line per arena. Rich is not used, because it takes seconds for thousands of rows."""
    rows = [("arena", "owner", "age", "capacity", "used", "populated", "blocks", "oldest request")]
    for arena in arenas:
        pid = "header damaged" if arena.owner is None else f"pid {arena.owner.pid}"
        requests = [block for block in arena.blocks if block.request]
        oldest = max(requests, key=lambda block: block.age_s, default=None)
        rows.append(
            (
                arena.name,
                f"{'alive' if arena.alive else 'DEAD'}, {pid}",
                age(arena.age_s),
                size(arena.capacity_bytes or arena.file_bytes),
                size(arena.used_bytes),
                f"{arena.populated_fraction:.0%}",
                states(arena),
                "" if oldest is None else f"{age(oldest.age_s)}: {printable(oldest.request)}",
            )
        )
    return table_lines(rows, right=(2, 3, 4, 5))


def block_rows(arenas: Sequence[ArenaInfo]) -> list[str]:
    """Return a heading and one line per block."""
    rows = [("block", "state", "size", "age", "arrays", "request")]
    rows += [
        (
            block_name(arena.number, block.block),
            block.state,
            size(block.num_bytes),
            age(block.age_s),
            printable(", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in block.arrays.items())),
            printable(block.request),
        )
        for arena in arenas
        for block in arena.blocks
    ]
    return table_lines(rows, right=(2, 3, 4))


def segment_rows(segments: Sequence[SegmentInfo]) -> list[str]:
    """Return a heading and one line per segment."""
    rows = [("unrecorded segment", "owner", "age", "size", "mapped")]
    rows += [
        (printable(one.name), f"uid {one.uid}", age(one.age_s), size(one.num_bytes), mapped(one)) for one in segments
    ]
    return table_lines(rows, right=(2, 3))


def mapped(segment: SegmentInfo) -> str:
    """Return the ids of the processes that map a segment, or `no` if none does.

    Return `unknown` if this user may not see them.
    """
    if segment.mapped is None:
        return "unknown"
    return f"pid {', '.join(map(str, segment.pids))}" if segment.pids else "no"


def footer(arenas: Sequence[ArenaInfo], space: ShmSpace) -> str:
    """Return a line that says how full /dev/shm is, and how much of it these arenas use."""
    ours = sum(arena.file_bytes for arena in arenas)
    total, others = "no size limit", ""
    if space.total_bytes is not None and space.used_bytes is not None and space.free_bytes is not None:
        total = f"{size(space.total_bytes)}, {size(space.free_bytes)} free"
        others = f", {size(max(0, space.used_bytes - ours))} in other files"
    message = (
        f"{SHM_DIRECTORY}: {total}; {size(ours)} in {len(arenas)} {'arena' if len(arenas) == 1 else 'arenas'}{others}"
    )
    return f"{message}; {why}" if (why := space.why_no_file()) else message


def line(arenas: Sequence[ArenaInfo], space: ShmSpace) -> str:
    """Return a one-line summary of all arenas, for a log."""
    blocks: list[BlockInfo] = [block for arena in arenas for block in arena.blocks]
    oldest = max((block.age_s for block in blocks), default=0.0)
    return (
        f"arenas {len(arenas)} dead {sum(not arena.alive for arena in arenas)} blocks {len(blocks)} "
        f"used_bytes {sum(arena.used_bytes for arena in arenas)} "
        f"capacity_bytes {sum(arena.capacity_bytes for arena in arenas)} oldest_s {oldest:.0f} "
        f"dev_shm_free_bytes {_or_unlimited(space.free_bytes)} dev_shm_bytes {_or_unlimited(space.total_bytes)}"
    )


def _or_unlimited(num_bytes: int | None) -> int | str:
    return "unlimited" if num_bytes is None else num_bytes


def states(arena: ArenaInfo) -> str:
    """Return the number of blocks by state, such as `3 published, 1 filling`."""
    counts = Counter(block.state for block in arena.blocks)
    return ", ".join(f"{number} {state}" for state, number in sorted(counts.items(), reverse=True)) or "none"


def size(num_bytes: int) -> str:
    """Format `num_bytes` in the largest binary unit in which the value is at least 1."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def age(seconds: float) -> str:
    """Format `seconds` in the largest unit in which the value is at least 2."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str) -> str:
    """Escape unprintable characters, because a path may contain any byte, including terminal control codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
