"""Fault points at which `tools.fault_matrix` kills processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A point at which a process dies, and the event that makes the process reach it."""

    role: str
    """The process that dies: api, fork_server, tokenizer, nursery, decoder, engine, or replica (one of two engines)."""
    name: str
    """A point of `processes.faults`. At `at rest`, `at work` and `everything`, the process is killed from outside."""
    cause: str = "ask"
    """Event that makes the process reach the point:

    - `ask`: requests.
    - `preempt`: requests, and answers that preempt each other.
    - `leave`: requests, and a client that disconnects.
    - `batch`: requests, and a client that uploads and runs a batch.
    - `stop`: SIGTERM to the service.
    - `start`: a start of the service.
    - `lose engine`, `lose replica`, `lose tokenizer`, `lose nursery`, `lose fork_server`: SIGKILL to this process.
    - `kill`: SIGKILL to the process itself.

    A sandboxed decoder cannot see trigger files, so decoders are killed from outside. `at work` means that each decoder
    has items that it has not begun.
    """

    @property
    def trigger(self) -> str:
        """Name of the point's trigger file."""
        return f"{'engine' if self.role == 'replica' else self.role}.{self.name}"

    @property
    def num_engines(self) -> int:
        """Number of engines of the service."""
        return 2 if self.role == "replica" else 1

    def __str__(self) -> str:
        return f"{self.role}.{self.name}"


def _points(role: str, names: str) -> tuple[Point, ...]:
    return tuple(Point(role, name) for name in names.split())


_ENGINE_STEPS = (
    "received attached queued scheduled before-tower mid-tower after-tower mid-prefill first-token mid-decode consumed "
    "before-reply after-reply forgetting"
)

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
    Point("fork_server", "starting", "lose fork_server"),
    Point("fork_server", "forked", "lose engine"),
    Point("fork_server", "at rest", "kill"),
    Point("decoder", "at rest", "kill"),
    Point("decoder", "at work", "kill"),
    *_points("engine", _ENGINE_STEPS),
    Point("engine", "media-lost", "preempt"),
    Point("engine", "restored", "preempt"),
    Point("engine", "aborting", "leave"),
    Point("engine", "starting", "lose engine"),
    Point("engine", "loaded", "lose engine"),
    Point("engine", "stopping", "stop"),
    Point("engine", "at rest", "kill"),
    *_points("replica", _ENGINE_STEPS),
    Point("replica", "aborting", "leave"),
    Point("replica", "starting", "lose replica"),
    Point("replica", "loaded", "lose replica"),
    Point("replica", "at rest", "kill"),
    *_points(
        "api",
        "making-directory spooled tokenized sent freed-early first-delta next-delta answered before-remove hidden "
        "mid-free released removed",
    ),
    Point("api", "remade", "preempt"),
    Point("api", "added-again", "preempt"),
    *(Point("api", f"batch-{state}", "batch") for state in ("begun", "answered", "finalizing", "described", "ended")),
    Point("api", "uploading", "batch"),
    Point("api", "reclaiming", "lose tokenizer"),
    Point("api", "spawned", "start"),
    Point("api", "starting", "start"),
    Point("api", "stopping", "stop"),
    Point("api", "at rest", "kill"),
    Point("api", "everything", "kill"),
)
