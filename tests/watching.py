"""What a service says of itself, and waiting until it is so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import psutil

from tools.serving import RunningService


def wait_until(condition: Callable[[], object]) -> None:
    """For what no event tells of, such as what happens in another process."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


def metric(service: RunningService, name: str, **labels: str) -> float:
    """The sum over a metric's series with these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = httpx2.get(f"{service.url}/metrics", timeout=300).text.splitlines()
    series = [line for line in lines if line.startswith((f"mindie_mm:{name}{{", f"mindie_mm:{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in series if all(label in line for label in wanted))


def process(service: RunningService, module: str) -> psutil.Process:
    """The service's process whose module's name begins so."""
    children = psutil.Process(service.process.pid).children()
    return next(child for child in children if any(part.startswith(module) for part in child.cmdline()))


@contextmanager
def stopped_engine(service: RunningService) -> Iterator[None]:
    """Stop the engine meanwhile. Requests that it has not begun hold their shared memory."""
    engine = process(service, "mindie_mm.engine.")
    engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.send_signal(signal.SIGCONT)
