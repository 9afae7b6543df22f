"""What the service's processes hold between requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.serving import RunningService

CLI = Path(sys.executable).with_name("mindie-mm")
SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a moment at which no request runs."""

    requests: int
    """That were made so far."""
    at_s: float
    blocks: int
    """In use in all arenas of this user, as `mindie-mm shm list` sees them."""
    descriptors: int
    """Of all processes."""
    threads: int
    memory_bytes: int
    """Of all processes, /dev/shm included and files not; PSS, so that a page that several share counts once."""
    processes: dict[str, int]
    """The same of each, by its role."""
    spooled: int
    """Request directories."""


def sample(service: RunningService, spool: Path, requests: int, began: float, descriptors: int | None) -> Sample:
    """What is held once everything has settled: no block, no request directory, no more than `descriptors`.

    Closed connections and freed blocks take a moment; after SETTLE_S it is as it is.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = _now(service, spool, requests, began)
        held = found.blocks or found.spooled or (descriptors is not None and found.descriptors > descriptors)
        if not held or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _now(service: RunningService, spool: Path, requests: int, began: float) -> Sample:
    told = service.shm()
    blocks = told["blocks"]
    if not blocks:  # the slower view from outside, of the same arenas
        listed = subprocess.run([CLI, "shm", "list", "--json"], capture_output=True, check=True, timeout=60)
        own = {arena["name"] for arena in told["arenas"]}
        blocks = sum(len(arena["blocks"]) for arena in json.loads(listed.stdout) if Path(arena["file"]).name in own)
    root = psutil.Process(service.process.pid)
    processes = {_role(process): process for process in [root, *root.children(recursive=True)]}
    memory = {role: _memory_bytes(process.pid) for role, process in processes.items()}
    return Sample(
        requests=requests,
        at_s=round(time.monotonic() - began, 1),
        blocks=blocks,
        descriptors=sum(process.num_fds() for process in processes.values()),
        threads=sum(process.num_threads() for process in processes.values()),
        memory_bytes=sum(memory.values()),
        processes=memory,
        spooled=len(list(spool.iterdir())) if spool.exists() else 0,
    )


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    modules = {"engine.process": "engine", "tokenize.stage": "tokenizer", "decode.nursery": "decoder"}
    kind = next((role for module, role in modules.items() if f"mindie_mm.{module}" in line), "service")
    return f"{kind} {process.pid}"


def _memory_bytes(pid: int) -> int:
    """A library's pages are left out: how many processes of other programs share them is nothing of the service's."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
