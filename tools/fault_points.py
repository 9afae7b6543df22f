"""Where `tools.fault_matrix` kills."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a process dies, and what makes it come there."""

    role: str
    """api, tokenizer, nursery, decoder or engine: who dies."""
    name: str
    """A point of `processes.faults`; or `at rest`, `at work` and `everything`, which are signals from outside."""
    cause: str = "ask"
    """`ask`: requests alone; `preempt`: answers that preempt each other, too; `leave`: a client goes; `stop`: SIGTERM
    to the service; `start`: the service is started; `lose engine`, `lose tokenizer`, `lose nursery`: that process is
    killed; `kill`: it is itself. A locked-in decoder cannot see trigger files, so decoders are killed from outside;
    `at work` all of them have items, which they have not begun."""

    def __str__(self) -> str:
        return f"{self.role}.{self.name}"


def _points(role: str, names: str) -> tuple[Point, ...]:
    return tuple(Point(role, name) for name in names.split())


POINTS = (
    *_points(
        "tokenizer",
        "received planned before-record after-record allocated mid-fill filled published before-reply after-reply",
    ),
    Point("tokenizer", "starting", "lose tokenizer"),
    Point("tokenizer", "arena-made", "lose tokenizer"),
    Point("tokenizer", "stopping", "stop"),
    Point("tokenizer", "at rest", "kill"),
    Point("nursery", "starting", "lose nursery"),
    Point("nursery", "at rest", "kill"),
    Point("nursery", "at work", "kill"),
    Point("decoder", "at rest", "kill"),
    Point("decoder", "at work", "kill"),
    *_points(
        "engine",
        "received attached queued scheduled before-tower mid-tower after-tower mid-prefill first-token mid-decode "
        "consumed before-reply after-reply forgetting",
    ),
    Point("engine", "parked", "preempt"),
    Point("engine", "refilled", "preempt"),
    Point("engine", "aborting", "leave"),
    Point("engine", "starting", "lose engine"),
    Point("engine", "loaded", "lose engine"),
    Point("engine", "stopping", "stop"),
    Point("engine", "at rest", "kill"),
    *_points(
        "api",
        "making-directory spooled tokenized sent freed-early first-delta next-delta answered before-remove hidden "
        "mid-free released removed",
    ),
    Point("api", "remade", "preempt"),
    Point("api", "reclaiming", "lose tokenizer"),
    Point("api", "spawned", "start"),
    Point("api", "starting", "start"),
    Point("api", "stopping", "stop"),
    Point("api", "at rest", "kill"),
    Point("api", "everything", "kill"),
)
