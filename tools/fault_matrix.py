"""Kill processes of a service at every named point, and check that the service recovers and leaves nothing.

    python -m tools.fault_matrix [--repeats 10] [--out build/fault_matrix.jsonl] [--role engine] [--point mid-decode]

Each run keeps requests in flight and lets one process kill itself with SIGKILL at one point
(`mindie_mm.processes.faults`). Requests in flight must be answered correctly or fail with the documented error. The
next request must be answered correctly. Within five seconds, everything that the dead process left in /dev/shm must be
gone.

Each run is appended to the file when it ends. Runs that the file already contains are not repeated. The exit status is
0 if all runs pass.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from mindie_mm.shm import survey
from tools.fault_points import POINTS, Point
from tools.fault_rig import DEADLINE_S, Rig, wait_until

CLEAN_S = 5.0
"""Maximum time that remains of a dead process may stay in /dev/shm."""


@dataclass(slots=True)
class Run:
    """The results of one kill."""

    point: str
    outcomes: list[str] = field(default_factory=list)
    """Outcome of each request in flight: `right`, `failed` (with the documented error), `lost` (with the service),
    `left` (by its client), or a description of the fault."""
    answered_s: float | None = None
    """Seconds from the death to the next correct answer. Includes the start of a new service if the service died."""
    clean_s: float | None = None
    """Seconds from the death until /dev/shm contained nothing of the dead processes."""
    troubles: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.troubles


@contextmanager
def flying(works: Sequence[Callable[[], str]]) -> Iterator[list[Future[str]]]:
    """Run `works` concurrently, and wait for all of them at exit."""
    with ThreadPoolExecutor(len(works)) as pool:
        yield [pool.submit(work) for work in works]


def run(rig: Rig, point: Point) -> Run:
    """Kill once at `point`, and check the consequences."""
    run_result = Run(str(point))
    rig.require(point.num_engines)
    if point.cause == "start":
        rig.close()
        _die_at_the_start(rig, point, run_result)
        return run_result
    try:
        before = rig.whole()
    except (TimeoutError, RuntimeError) as error:
        run_result.troubles.append(f"before the kill: {error}")
        return run_result
    works: list[Callable[[], str]] = [lambda: rig.ask(stream=True), rig.ask, rig.ask]
    further = {"leave": rig.leave, "batch": rig.batch}
    if point.cause in further:
        works.append(further[point.cause])
    if point.cause == "preempt":
        if (said := rig.preempt()) != "right":
            run_result.troubles.append(f"a long answer before the kill: {said}")
        works += [rig.preempt, rig.preempt]
    trigger = rig.trigger(point)
    if point.cause != "kill":
        trigger.touch()
    with _stopped(before["decoder"] if point.name == "at work" else []), flying(works) as futures:
        if point.name == "at work":
            rig.wait_for_items()
        _bring_about(point, before, rig)
        seen = _wait_for_death(trigger, before, rig, run_result)
        died = time.monotonic()
        all_die = point.role == "api" or point.cause == "stop"
        gone = [process for role, process in seen if all_die or role in _DYING.get(point.role, [point.role])]
        if point.role in ("replica", "fork_server"):  # the other engine, or the next fork server, lives
            gone = _dead(gone, run_result)
        _look(rig, point, gone, died, run_result)
        run_result.outcomes = [future.result() for future in futures]
    _judge(point, run_result)
    if point.role == "replica" and not {*before["replica"]} & {*rig.whole()["replica"]}:
        run_result.troubles.append("both engines were replaced")
    _look_for_the_rest(rig, run_result)
    return run_result


def _dead(processes: list[psutil.Process], run_result: Run) -> list[psutil.Process]:
    """Wait until one of `processes` has died, and return the dead ones."""
    dead: list[psutil.Process] = []

    def died() -> bool:
        dead[:] = [process for process in processes if not _lives(process)]
        return bool(dead)

    if wait_until(died, DEADLINE_S) is None:
        run_result.troubles.append("no process died")
    return dead


_DYING = {"tokenizer": ("tokenizer", "nursery", "decoder"), "nursery": ("nursery", "decoder")}
"""Roles of the processes that end with a process of the given role."""


@contextmanager
def _stopped(decoders: Sequence[psutil.Process]) -> Iterator[None]:
    """Suspend decoders, so that they keep their items until they are killed."""
    for decoder in decoders:
        decoder.suspend()
    try:
        yield
    finally:
        for decoder in decoders:
            with suppress(psutil.NoSuchProcess):
                decoder.resume()


def _wait_for_death(
    trigger: Path, before: dict[str, list[psutil.Process]], rig: Rig, run_result: Run
) -> set[tuple[str, psutil.Process]]:
    """Wait until the process has removed the trigger file. Return all processes seen so far, with their roles.

    A process that is killed from outside has no trigger file, so only the processes in `before` are returned.
    """
    seen = set(_by_role(before))

    def gone() -> bool:
        if trigger.exists():
            with suppress(psutil.NoSuchProcess):  # the service itself may die
                seen.update(_by_role(rig.processes()))
        return not trigger.exists()

    if wait_until(gone, DEADLINE_S) is None:
        run_result.troubles.append("the point was not reached")
        trigger.unlink()
    return seen


def _by_role(processes: dict[str, list[psutil.Process]]) -> Iterator[tuple[str, psutil.Process]]:
    return ((role, process) for role, several in processes.items() for process in several)


def _bring_about(point: Point, before: dict[str, list[psutil.Process]], rig: Rig) -> None:
    victims: list[psutil.Process] = []
    if point.name == "everything":
        victims = [process for _, process in _by_role(before)]
    elif point.cause == "kill":
        victims = before[point.role]
    elif point.cause.startswith("lose "):
        victims = before[point.cause.removeprefix("lose ")]
    if point.role == "replica":
        victims = victims[:1]
    for victim in victims:
        with suppress(psutil.NoSuchProcess):  # it may have ended with its parent
            victim.kill()
    if victims:
        return
    if point.cause == "stop":
        rig.service.process.send_signal(signal.SIGTERM)


def _look(rig: Rig, point: Point, gone: list[psutil.Process], died: float, run_result: Run) -> None:
    """Wait until nothing from the dead processes is left and the service answers again."""
    all_dead = point.name == "everything"  # only the next service can clean up
    if not all_dead:
        _wait_for_nothing_left(gone, died, run_result)
    if point.role == "api" or point.cause == "stop":
        status = rig.service.process.wait(DEADLINE_S)
        if point.role != "api" and status != 0:
            run_result.troubles.append(f"the service stopped with status {status}")
        rig.close()
    while (said := rig.ask()) != "right":
        if said != "failed" or time.monotonic() - died > DEADLINE_S:
            run_result.troubles.append(f"the next request: {said}")
            return
    run_result.answered_s = round(time.monotonic() - died, 3)
    if all_dead:
        _wait_for_nothing_left(gone, time.monotonic(), run_result)


def _wait_for_nothing_left(gone: list[psutil.Process], died: float, run_result: Run) -> None:
    pids = {process.pid for process in gone}

    def nothing_left() -> bool:
        return not any(map(_lives, gone)) and not any(arena.owner and arena.owner.pid in pids for arena in survey())

    if wait_until(nothing_left, 4 * CLEAN_S) is None:
        alive = [process.pid for process in gone if _lives(process)]
        run_result.troubles.append(f"left: processes {alive}, arenas {[a.file for a in survey() if not a.alive]}")
        return
    run_result.clean_s = round(time.monotonic() - died, 3)
    if run_result.clean_s > CLEAN_S:
        run_result.troubles.append(f"clean after {run_result.clean_s} s, the limit is {CLEAN_S:g}")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _judge(point: Point, run_result: Run) -> None:
    """Record a problem for each request in flight without a correct answer, unless the process's death explains it."""
    allowed = {"right", "left"}
    if point.role == "api" or point.cause == "stop":
        allowed |= {"failed", "lost"}
    for outcome in run_result.outcomes:
        stopped = point.cause == "stop" and "ServiceUnavailableError" in outcome
        if outcome not in allowed and not stopped:
            run_result.troubles.append(f"in flight: {outcome}")


def _look_for_the_rest(rig: Rig, run_result: Run) -> None:
    """Check that no block and no request directory is left after the last request."""
    if (held := rig.service.wait_until_free())["blocks"]:
        run_result.troubles.append(f"blocks are left: {held}")
    if wait_until(lambda: not rig.left_in_spool(), 10) is None:
        run_result.troubles.append(f"left in the spool: {rig.left_in_spool()}")
    if (said := rig.end_of_batches()) != "right":
        run_result.troubles.append(f"batches: {said}")


def _die_at_the_start(rig: Rig, point: Point, run_result: Run) -> None:
    rig.trigger(point).touch()
    mine = psutil.Process()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(lambda: rig.service)
        seen: dict[int, psutil.Process] = {}
        while rig.trigger(point).exists() and not starting.done():
            with suppress(psutil.NoSuchProcess):
                seen |= {process.pid: process for process in mine.children(recursive=True)}
        died = time.monotonic()
        if not isinstance(starting.exception(), RuntimeError):
            run_result.troubles.append("the service started")
    _wait_for_nothing_left(list(seen.values()), died, run_result)
    answer = rig.ask()
    if answer != "right":
        run_result.troubles.append(f"the next request: {answer}")
    run_result.answered_s = round(time.monotonic() - died, 3)
    _look_for_the_rest(rig, run_result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing repeats, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/fault_matrix.jsonl"))
    parser.add_argument(
        "--role", choices=("api", "tokenizer", "fork_server", "nursery", "decoder", "engine", "replica")
    )
    parser.add_argument("--point")
    given = parser.parse_args(arguments)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [p for p in POINTS if given.role in (None, p.role) and given.point in (None, p.name)]
    with tempfile.TemporaryDirectory(prefix="mindie_mm-faults-") as folder, Rig(Path(folder)) as rig:
        for repeat in range(given.repeats):
            done = read(given.out)
            for point in (p for p in wanted if len(done.get(str(p), [])) <= repeat):
                run_result = run(rig, point)
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(run_result)) + os.linesep)
                print(f"{point}: {'; '.join(run_result.troubles) or 'good'} {run_result}", flush=True)
                if not run_result.good:
                    rig.close()
    runs = read(given.out)
    print(table(runs))
    return 0 if all(run_result.good for several in runs.values() for run_result in several) else 1


def read(path: Path) -> dict[str, list[Run]]:
    """Return the runs in a file by point."""
    runs: dict[str, list[Run]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        run_result = Run(**json.loads(line))
        runs.setdefault(run_result.point, []).append(run_result)
    return runs


def table(runs: dict[str, list[Run]]) -> str:
    """Return a Markdown table with one row per point."""
    lines = [
        "| who dies where | runs | all well | in flight: right, failed, lost | answers again, s | clean, s |",
        "|---|---|---|---|---|---|",
    ]
    for point in map(str, POINTS):
        several = runs.get(point, [])
        outcomes = [one for run_result in several for one in run_result.outcomes]
        counts = ", ".join(str(outcomes.count(kind)) for kind in ("right", "failed", "lost"))
        answered = _spread([run_result.answered_s for run_result in several if run_result.answered_s is not None])
        clean = _spread([run_result.clean_s for run_result in several if run_result.clean_s is not None])
        good = sum(run_result.good for run_result in several)
        lines.append(f"| {point} | {len(several)} | {good} | {counts} | {answered} | {clean} |")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})" if seconds else ""


if __name__ == "__main__":
    sys.exit(main())
