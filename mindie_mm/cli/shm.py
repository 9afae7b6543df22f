"""mindie-mm shm."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.cli.shm_view import arena_rows, block_rows, footer, line, printable, segment_rows, size
from mindie_mm.errors import CorruptReference, InputError, SharedMemoryError, os_errors_as
from mindie_mm.processes.progress import progress_shown
from mindie_mm.settings.environment import default_spool
from mindie_mm.shm.arena_info import ArenaInfo, survey
from mindie_mm.shm.dev_shm import ShmSpace
from mindie_mm.shm.format.layout import SHM_DIRECTORY, file_name
from mindie_mm.shm.format.mindie_words import is_segment_name
from mindie_mm.shm.path_file import release
from mindie_mm.shm.reclaim import Collected, Reclaimed, collect, collect_path_file
from mindie_mm.shm.spool import require_spool
from mindie_mm.shm.unrecorded import remove, require_removable, unrecorded
from mindie_mm.shm.view import free_block

_BLOCK = re.compile(r"mindie_mm-([0-9a-f]{4}):([0-9]{1,5})")


_NOUNS = {
    frozenset({False}): ("block", "blocks"),
    frozenset({True}): ("segment", "segments"),
    frozenset({False, True}): ("block or segment", "blocks and segments"),
}
"""Words for what `free` frees, by whether the targets are segments."""


@click.group("shm")
def command() -> None:
    """List, free and reclaim the shared memory of mindie_mm in /dev/shm.

    These commands work whether or not a service is running, and never wait. They do not change the memory of other
    users or other programs.

    Exit status: 0 for success, 1 if something could not be freed or reclaimed, 2 for a wrong command, a missing file or
    a missing permission.
    """
    logging.getLogger("mindie_mm").addHandler(logging.NullHandler())  # the commands print errors themselves


@command.command("list", short_help="List the arenas and other segments in /dev/shm.")
@click.option("-b", "--blocks", is_flag=True, help="Also list the blocks of each arena.")
@click.option("--segments", "only_segments", is_flag=True, help="List only the segments that no path file records.")
@click.option(
    "--spool",
    type=PATH,
    help="Spool whose requests record segments.  [default: MINDIE_MM_SPOOL, or the service's default]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the arenas with all their blocks, or the segments, as JSON."
)
def list_(*, blocks: bool, only_segments: bool, spool: Path | None, as_json: bool) -> None:
    """List the arenas of this user, the segments that no path file records, and how full /dev/shm is.

    A segment is any other file in /dev/shm, such as the psm_* files of MindIE. "mapped" shows the processes in this
    container that map a segment, as far as this user may see them. Only path files in the spool are read. `mindie-mm
    shm free NAME` removes a segment. No command removes a segment unless its name is given.
    """
    if spool is not None:
        _mode(spool, "not a spool")
    segments = [] if as_json and not only_segments else unrecorded([spool or default_spool()])
    if only_segments:
        rows = segment_rows(segments) if segments else ["there are no unrecorded segments"]
        click.echo(_json(segments) if as_json else "\n".join(rows))
        return
    arenas, space = survey(), ShmSpace.now()
    if as_json:
        click.echo(_json(arenas))
        return
    rows = arena_rows(arenas) if arenas else ["this user has no arenas"]
    if blocks and any(arena.blocks for arena in arenas):
        rows += ["", *block_rows(arenas)]
    if segments:
        rows += ["", *segment_rows(segments)]
    click.echo("\n".join([*rows, "", footer(arenas, space)]))


@command.command(short_help="Free blocks, and remove segments.")
@click.argument("targets", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def free(targets: tuple[str, ...], *, as_json: bool) -> None:
    """Free blocks, and remove segments, even if a request still needs them.

    A TARGET is a block, the path file of a request, or a segment. `shm list -b` shows the names of blocks, such as
    mindie_mm-1f2a:17, and `shm list` the names of segments, such as psm_8c9d4828. A request that still needs a freed
    block or segment fails with an error that says so. Other requests continue. Blocks that are already free are not
    counted.
    """
    arenas = {arena.number: arena for arena in survey()}
    freed, failed = 0, False
    one, many = _NOUNS[frozenset(bool(_segment(target)) for target in targets)]
    for action in [_freeing(target, arenas) for target in targets]:  # if a target is invalid, nothing is freed
        try:
            freed += action()
        except (CorruptReference, SharedMemoryError) as error:
            click.echo(f"Error: {printable(str(error))}", err=True)
            failed = True
    click.echo(json.dumps({"freed": freed}) if as_json else f"freed {freed} {one if freed == 1 else many}")
    sys.exit(failed)


def _freeing(target: str, arenas: dict[int, ArenaInfo]) -> Callable[[], int]:
    """Return a function that frees a target and returns the number of blocks. Raise InputError if it is invalid."""
    if match := _BLOCK.fullmatch(target):
        number, place = int(match[1], 16), int(match[2])
        if number not in arenas:
            raise InputError(f"{target}: this user has no arena {file_name(number)}")
        refs = [arenas[number].ref(block) for block in arenas[number].blocks if block.block == place]
        return lambda: sum(map(free_block, refs))
    if (name := _segment(target)) is not None:
        require_removable(name)
        return lambda: remove(name)
    _require_file(Path(target), "neither a block or segment of `mindie-mm shm list -b` nor a path file")
    return lambda: release(Path(target))


def _segment(target: str) -> str | None:
    """Return the name of a segment, or None if the target is not a segment. A path file in this folder comes first."""
    path, here = SHM_DIRECTORY / Path(target).name, Path(target)
    is_bare = here.name == target and (not os.path.lexists(here) or here.absolute() == path)
    is_meant = is_bare or (here.parent == SHM_DIRECTORY and is_segment_name(here.name))
    return path.name if is_meant and os.path.lexists(path) else None


@command.command(short_help="Reclaim the shared memory of dead processes.")
@click.option("--dry-run", is_flag=True, help="Print what would be reclaimed, and change nothing.")
@click.option(
    "--path-file",
    "path_files",
    multiple=True,
    type=PATH,
    help="Free all blocks of this path file, whether they are still in use or not, and do nothing else. Repeatable.",
)
@click.option(
    "--spool",
    type=PATH,
    help="Spool of the service, a folder of request directories.  [default: MINDIE_MM_SPOOL, or the service's default]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gc(*, dry_run: bool, path_files: tuple[Path, ...], spool: Path | None, as_json: bool) -> None:
    """Reclaim the shared memory of dead processes: arenas, requests and blocks that no living process uses.

    Memory that a living process, another user or another program uses is not changed.
    """
    if path_files:
        for path_file in path_files:
            _require_file(path_file, "not a path file")
        collected = _joined([collect_path_file(path_file, dry_run=dry_run) for path_file in path_files])
    else:
        if spool is not None:
            _mode(spool, "not a spool")
        root = spool or default_spool()
        # An error of the default spool must not prevent reclaiming everything else.
        with nullcontext() if spool else suppress(SharedMemoryError):
            require_spool(root)
        done: list[Reclaimed] = []
        with progress_shown(lambda: f"{len(done)} objects, {size(sum(one.num_bytes for one in done))} so far"):
            collected = collect([root], dry_run=dry_run, report=done.append)
    if as_json:
        click.echo(_json(collected))
    else:
        for text in _report_lines(collected, dry_run=dry_run):
            click.echo(text)
        for failure in collected.failures:
            click.echo(f"Error: {printable(failure)}", err=True)
    sys.exit(bool(collected.failures))


def _joined(parts: list[Collected]) -> Collected:
    return Collected(
        tuple(one for part in parts for one in part.reclaimed), tuple(text for part in parts for text in part.failures)
    )


def _report_lines(collected: Collected, *, dry_run: bool) -> Iterator[str]:
    for one in collected.reclaimed:
        yield f"{printable(one.what)}  {size(one.num_bytes)}  {one.cause}"
    counts = ", ".join(f"{number} {cause}" for cause, number in collected.counts.items())
    verb = "would reclaim" if dry_run else "reclaimed"
    yield f"{verb} {size(collected.num_bytes)}: {counts}" if counts else "nothing to reclaim"


def _require_file(path: Path, what: str) -> None:
    if not stat.S_ISREG(_mode(path, what)):
        raise InputError(f"{path}: {what}: it is not a regular file")


def _mode(path: Path, what: str) -> int:
    with os_errors_as(InputError, f"{path}: {what}"):
        return path.lstat().st_mode


@command.command(short_help="Watch the arenas.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    help="Time in seconds between two samples.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N samples.  [default: at Ctrl-C]")
def watch(*, interval: float, count: int | None) -> None:
    """Show the arenas live, or print a line per sample if standard output is not a terminal. Stop with Ctrl-C."""
    try:
        _watch_live(interval, count) if sys.stdout.isatty() else _watch_lines(interval, count)
    except KeyboardInterrupt:
        return


def _watch_live(interval: float, count: int | None) -> None:
    from rich.live import Live  # imported late, because the other commands do not need rich
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        for _ in _looks(interval, count):
            arenas = survey()
            rows = [*arena_rows(arenas), "", footer(arenas, ShmSpace.now())]
            live.update(Text("\n".join(rows), no_wrap=True, overflow="ellipsis"), refresh=True)


def _watch_lines(interval: float, count: int | None) -> None:
    for _ in _looks(interval, count):
        click.echo(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line(survey(), ShmSpace.now())}")


def _looks(interval: float, count: int | None) -> Iterator[None]:
    """Yield immediately, and then every `interval` seconds."""
    left = count
    while True:
        yield
        if left is not None:
            left -= 1
            if not left:
                return
        time.sleep(interval)


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda one: {name: getattr(one, name) for name in one.__slots__})
