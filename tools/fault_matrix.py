"""Kill -9 at every named point of every process, again and again: does the service come back, and is nothing left?

    python -m tools.fault_matrix [--repeats 10] [--out build/fault_matrix.jsonl] [--role engine] [--point mid-decode]

Each run keeps requests in flight, lets one process kill itself at one point (`mindie_mm.faults`), and then looks:
requests in flight are answered right or fail with the documented error; the next request is answered right; within
five seconds /dev/shm holds nothing of the dead. Runs are appended to the file as they end; those that are in it
already are not repeated. Exits 0 if all went well.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil
from PIL import Image, PngImagePlugin

from mindie_mm.shm import survey
from tools.demo import picture
from tools.serving import RunningService, running_service

CLEAN_S = 5.0
"""How long anything of the dead may stay in /dev/shm."""
DEADLINE_S = 240.0
"""After which a request hangs, or a process does not come back."""
SETTINGS: dict[str, object] = {
    "arena_bytes": 32 << 20,
    "kv_cache_bytes": 32 << 20,
    "grace_s": 0.2,
    "max_num_batched_tokens": 48,  # prompts are prefilled in chunks
    "request_timeout_s": DEADLINE_S,
}
MODULES = {"tokenizer": "mindie_mm.tokenize.process", "engine": "mindie_mm.engine.process"}


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a process dies, and what makes it come there."""

    role: str
    """api, tokenizer or engine: who dies."""
    name: str
    """A point of `mindie_mm.faults`; or `at rest` and `everything`, which are signals from outside."""
    cause: str = "ask"
    """`ask`: requests alone; `leave`: a client goes; `stop`: SIGTERM to the service; `start`: the service is started;
    `lose engine`, `lose tokenizer`: that process is killed; `kill`: it is itself."""

    def __str__(self) -> str:
        return f"{self.role}.{self.name}"


def _points(role: str, names: str) -> tuple[Point, ...]:
    return tuple(Point(role, name) for name in names.split())


POINTS = (
    *_points(
        "tokenizer",
        "received planned before-ledger after-ledger allocated mid-fill filled published before-reply after-reply",
    ),
    Point("tokenizer", "starting", "lose tokenizer"),
    Point("tokenizer", "arena-made", "lose tokenizer"),
    Point("tokenizer", "stopping", "stop"),
    Point("tokenizer", "at rest", "kill"),
    *_points(
        "engine",
        "received attached queued scheduled before-tower mid-tower after-tower mid-prefill first-token mid-decode "
        "before-reply after-reply forgetting",
    ),
    Point("engine", "aborting", "leave"),
    Point("engine", "starting", "lose engine"),
    Point("engine", "loaded", "lose engine"),
    Point("engine", "stopping", "stop"),
    Point("engine", "at rest", "kill"),
    *_points(
        "api",
        "making-directory spooled tokenized sent first-delta next-delta answered before-remove hidden mid-free "
        "released removed",
    ),
    Point("api", "reclaiming", "lose tokenizer"),
    Point("api", "spawned", "start"),
    Point("api", "starting", "start"),
    Point("api", "stopping", "stop"),
    Point("api", "at rest", "kill"),
    Point("api", "everything", "kill"),
)


@dataclass(slots=True)
class Run:
    """What came of one kill."""

    point: str
    outcomes: list[str] = field(default_factory=list)
    """One for each request in flight: `right`, `failed` (with the documented error), `lost` (with the service), `left`
    (by its client), or what is wrong."""
    answered_s: float | None = None
    """From the death until a new request was answered right; for a dead service, its start included."""
    clean_s: float | None = None
    """From the death until /dev/shm held nothing of the dead."""
    troubles: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.troubles


class Rig:
    """A service with fault points armed, started again whenever it is gone. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spool = folder / "spool"
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self._stack = ExitStack()
        self._service: RunningService | None = None
        self._starts = 0
        self._pictures = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    @property
    def service(self) -> RunningService:
        if self._service is None:
            self._starts += 1
            log = self.folder / f"log-{self._starts}"
            settings = SETTINGS | {"spool": self.spool}
            environment = {"MINDIE_MM_FAULTS": str(self.faults)}
            self._service = self._stack.enter_context(running_service(settings, log, environment=environment))
        return self._service

    def drop(self) -> None:
        """Forgets the service, which is stopped if it runs."""
        self._stack.close()
        self._service = None

    def processes(self) -> dict[str, psutil.Process]:
        """The service's processes by role."""
        api = psutil.Process(self.service.process.pid)
        found = {"api": api}
        for child in api.children():
            with suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                found |= {role: child for role, module in MODULES.items() if module in command}
        return found

    def whole(self) -> dict[str, psutil.Process]:
        """The same, once all three are there and /health says so."""
        url = f"{self.service.url}/health"
        well = wait_until(lambda: httpx2.get(url).status_code == 200 and len(self.processes()) == 3, DEADLINE_S)
        if well is None:
            raise TimeoutError("a process does not come back")
        return self.processes()

    def picture(self, colour: str, rgb: tuple[int, int, int], shape: str) -> dict[str, Any]:
        """An image part. Each has other bytes, so that the towers run, but the same pixels."""
        self._pictures += 1
        note = PngImagePlugin.PngInfo()
        note.add_text("number", str(self._pictures))
        return image_part(picture(colour, rgb, shape, x=0.4), note)

    def ask(self, *, stream: bool = False) -> str:
        """Asks about a picture, or streams the answer about two; the outcome."""
        red = self.picture("red", (220, 40, 40), "square")
        if not stream:
            return outcome(self.service.url, [red], "What is in the image?", "red square")
        green = self.picture("green", (40, 160, 60), "star")
        question = "Do both pictures show the same colour?"
        return outcome(self.service.url, [red, green], question, "red and green, so no", stream=True)

    def leave(self) -> str:
        """Goes away after the first piece of a long answer."""
        body = chat([self.picture("red", (220, 40, 40), "square")], "What is in the image?", stream=True)
        body |= {"ignore_eos": True, "max_tokens": 1000}
        with (
            suppress(httpx2.HTTPError),
            httpx2.stream("POST", self.service.url + CHAT, json=body, timeout=60) as answer,
        ):
            next(answer.iter_raw())
        return "left"

    def left_in_spool(self) -> list[str]:
        """What is there, but for an empty directory, which is collected once it is a minute old."""
        return [str(path.relative_to(self.spool)) for path in self.spool.rglob("*") if path.parent != self.spool]

    def trigger(self, point: Point) -> Path:
        return self.faults / f"{point.role}.{point.name}"


CHAT = "/v1/chat/completions"


def image_part(drawn: Image.Image, note: PngImagePlugin.PngInfo) -> dict[str, Any]:
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG", pnginfo=note)
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(media: Sequence[dict[str, Any]], text: str, *, stream: bool = False) -> dict[str, Any]:
    content = [*media, {"type": "text", "text": text}]
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": stream,
    }


def outcome(url: str, media: Sequence[dict[str, Any]], text: str, right: str, *, stream: bool = False) -> str:
    """Asks, and judges what comes back."""
    try:
        with httpx2.stream("POST", url + CHAT, json=chat(media, text, stream=stream), timeout=DEADLINE_S) as answer:
            body = b"".join(answer.iter_raw())
    except httpx2.TimeoutException:
        return "hangs"
    except httpx2.HTTPError:
        return "lost"
    events = body.split(b"\n\n") if stream and answer.status_code == 200 else [b"data: " + body]
    said = ""
    for event in events:
        data = event.removeprefix(b"data: ")
        if data in (b"", b"[DONE]"):
            continue
        parsed = json.loads(data)
        if error := parsed.get("error"):
            died = error["code"] == 503 and ("process" in error["message"] or "tokenizer" in error["message"])
            return "failed" if died else f"error {error}"
        said += "".join((choice.get("delta") or choice["message"])["content"] for choice in parsed["choices"])
    return "right" if said.strip().rstrip(".").lower() == right else f"wrong: {said!r}"


@contextmanager
def flying(works: Sequence[Callable[[], str]]) -> Iterator[list[Future[str]]]:
    """Runs `works` at once; all have ended on leaving."""
    with ThreadPoolExecutor(len(works)) as pool:
        yield [pool.submit(work) for work in works]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Seconds until `condition` held; None if it did not in time."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            return None
        time.sleep(0.01)
    return time.monotonic() - start


def run(rig: Rig, point: Point) -> Run:
    """Kills once, and looks."""
    found = Run(str(point))
    if point.cause == "start":
        rig.drop()
        _die_at_the_start(rig, point, found)
        return found
    try:
        before = rig.whole()
    except (TimeoutError, RuntimeError) as error:
        found.troubles.append(f"before the kill: {error}")
        return found
    works: list[Callable[[], str]] = [lambda: rig.ask(stream=True), rig.ask, rig.ask]
    if point.cause == "leave":
        works.append(rig.leave)
    trigger = rig.trigger(point)
    if point.cause != "kill":
        trigger.touch()
    with flying(works) as futures:
        _bring_about(point, before, rig)
        seen = _wait_for_death(trigger, before, rig, found)
        died = time.monotonic()
        everybody = point.role == "api" or point.cause == "stop"
        gone = [process for role, process in seen if everybody or role == point.role]
        _look(rig, point, gone, died, found)
        found.outcomes = [future.result() for future in futures]
    _judge(point, found)
    _look_for_the_rest(rig, found)
    return found


def _wait_for_death(
    trigger: Path, before: dict[str, psutil.Process], rig: Rig, found: Run
) -> set[tuple[str, psutil.Process]]:
    """Returns once the trigger is gone, with the processes that were seen until then."""
    seen = set(before.items())

    def gone() -> bool:
        with suppress(psutil.NoSuchProcess):  # the service itself, which may be the one to die
            seen.update(rig.processes().items())
        return not trigger.exists()

    if wait_until(gone, DEADLINE_S) is None:
        found.troubles.append("the point was not reached")
        trigger.unlink()
    return seen


def _bring_about(point: Point, before: dict[str, psutil.Process], rig: Rig) -> None:
    if point.name == "everything":
        for process in before.values():
            process.kill()
    elif point.cause == "kill":
        before[point.role].kill()
    elif point.cause.startswith("lose "):
        before[point.cause.removeprefix("lose ")].kill()
    elif point.cause == "stop":
        rig.service.process.send_signal(signal.SIGTERM)


def _look(rig: Rig, point: Point, gone: list[psutil.Process], died: float, found: Run) -> None:
    """Waits until nothing of the processes that are gone is left, and the service answers."""
    everybody_dead = point.name == "everything"  # then nobody is left to clean up but the next service
    if not everybody_dead:
        _wait_for_nothing_left(gone, died, found)
    if point.role == "api" or point.cause == "stop":
        status = rig.service.process.wait(DEADLINE_S)
        if point.role != "api" and status != 0:
            found.troubles.append(f"the service stopped with status {status}")
        rig.drop()
    while (said := rig.ask()) != "right":
        if said != "failed" or time.monotonic() - died > DEADLINE_S:
            found.troubles.append(f"the next request: {said}")
            return
    found.answered_s = round(time.monotonic() - died, 3)
    if everybody_dead:
        _wait_for_nothing_left(gone, time.monotonic(), found)


def _wait_for_nothing_left(gone: list[psutil.Process], died: float, found: Run) -> None:
    pids = {process.pid for process in gone}

    def nothing_left() -> bool:
        return not any(map(_lives, gone)) and not any(arena.owner and arena.owner.pid in pids for arena in survey())

    if wait_until(nothing_left, 4 * CLEAN_S) is None:
        alive = [process.pid for process in gone if _lives(process)]
        found.troubles.append(f"left: processes {alive}, arenas {[a.file for a in survey() if not a.alive]}")
        return
    found.clean_s = round(time.monotonic() - died, 3)
    if found.clean_s > CLEAN_S:
        found.troubles.append(f"clean after {found.clean_s} s, the limit is {CLEAN_S:g}")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _judge(point: Point, found: Run) -> None:
    """Requests in flight are answered right, unless the death was theirs."""
    allowed = {"right", "left"}
    if point.role == "engine":
        allowed.add("failed")  # it had given output
    if point.role == "api" or point.cause == "stop":
        allowed |= {"failed", "lost"}
    for said in found.outcomes:
        stopped = point.cause == "stop" and "ServiceUnavailableError" in said
        if said not in allowed and not stopped:
            found.troubles.append(f"in flight: {said}")


def _look_for_the_rest(rig: Rig, found: Run) -> None:
    """Nothing runs any more: no block, no request directory."""
    if (held := rig.service.wait_until_free())["blocks"]:
        found.troubles.append(f"blocks are left: {held}")
    if wait_until(lambda: not rig.left_in_spool(), 10) is None:
        found.troubles.append(f"left in the spool: {rig.left_in_spool()}")


def _die_at_the_start(rig: Rig, point: Point, found: Run) -> None:
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
            found.troubles.append("the service started")
    _wait_for_nothing_left(list(seen.values()), died, found)
    said = rig.ask()
    if said != "right":
        found.troubles.append(f"the next request: {said}")
    found.answered_s = round(time.monotonic() - died, 3)
    _look_for_the_rest(rig, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing, prints the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/fault_matrix.jsonl"))
    parser.add_argument("--role", choices=("api", "tokenizer", "engine"))
    parser.add_argument("--point")
    given = parser.parse_args(arguments)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [p for p in POINTS if given.role in (None, p.role) and given.point in (None, p.name)]
    with tempfile.TemporaryDirectory(prefix="mindie_mm-faults-") as folder, Rig(Path(folder)) as rig:
        for repeat in range(given.repeats):
            done = read(given.out)
            for point in (p for p in wanted if len(done.get(str(p), [])) <= repeat):
                found = run(rig, point)
                with given.out.open("a") as file:
                    file.write(json.dumps(asdict(found)) + os.linesep)
                print(f"{point}: {'; '.join(found.troubles) or 'good'} {found}", flush=True)
                if not found.good:
                    rig.drop()
    runs = read(given.out)
    print(table(runs))
    return 0 if all(found.good for several in runs.values() for found in several) else 1


def read(path: Path) -> dict[str, list[Run]]:
    """The runs in a file, by point."""
    runs: dict[str, list[Run]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        found = Run(**json.loads(line))
        runs.setdefault(found.point, []).append(found)
    return runs


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown, a line a point."""
    lines = [
        "| who dies where | runs | all well | in flight: right, failed, lost | answers again, s | clean, s |",
        "|---|---|---|---|---|---|",
    ]
    for point in map(str, POINTS):
        several = runs.get(point, [])
        said = [one for found in several for one in found.outcomes]
        counts = ", ".join(str(said.count(kind)) for kind in ("right", "failed", "lost"))
        answered = _spread([found.answered_s for found in several if found.answered_s is not None])
        clean = _spread([found.clean_s for found in several if found.clean_s is not None])
        good = sum(found.good for found in several)
        lines.append(f"| {point} | {len(several)} | {good} | {counts} | {answered} | {clean} |")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})" if seconds else ""


if __name__ == "__main__":
    sys.exit(main())
