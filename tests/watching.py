"""Functions that read a service's metrics, find its processes, and wait for a condition."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import psutil

from tools.serving import RunningService


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition that no event announces, such as a change in another process."""
    deadline = time.monotonic() + 300
    pause = 0.001
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)  # a condition may take more processor time than the change that it waits for


def metric(service: RunningService, name: str, **labels: str) -> float:
    """Return the sum of all series of a metric that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = httpx2.get(f"{service.url}/metrics", timeout=300).text.splitlines()
    series = [line for line in lines if line.startswith((f"mindie_mm:{name}{{", f"mindie_mm:{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in series if all(label in line for label in wanted))


def process(service: RunningService, module: str) -> psutil.Process:
    """Return the child process of the service that runs a module whose name begins with `module`."""
    children = psutil.Process(service.process.pid).children()
    return next(child for child in children if any(part.startswith(module) for part in child.cmdline()))


@contextmanager
def stopped_engine(service: RunningService) -> Iterator[None]:
    """Stop the engine inside the context.

    Requests that the engine has not started then keep their shared memory.
    """
    engine = process(service, "mindie_mm.engine.")
    engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.send_signal(signal.SIGCONT)
