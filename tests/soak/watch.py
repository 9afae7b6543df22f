"""Measurements of the resources that the service's processes use between requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from service.request.spool_folders import PLANS
from tools.serving import RunningService

CLI = Path(sys.executable).with_name("mindie-mm")
SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement while no request is running."""

    requests: int
    """Number of requests so far."""
    at_s: float
    blocks: int
    """Blocks in use in the service's arenas, according to the service and to `mindie-mm shm list`."""
    descriptors: int
    """Open descriptors of all processes."""
    threads: int
    memory_bytes: int
    """Memory of all processes in bytes, including /dev/shm but no files. A shared page counts once (PSS)."""
    processes: dict[str, int]
    """Memory of each process in bytes, by role and pid."""
    spooled: int
    """Number of request directories."""


def sample(service: RunningService, spool: Path, requests: int, began: float, descriptors: int | None) -> Sample:
    """Measure when no blocks, no request directories and at most `descriptors` descriptors are in use.

    It takes a moment until connections are closed and blocks are freed. After SETTLE_S, measure anyway.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = _now(service, spool, requests, began)
        held = found.blocks or found.spooled or (descriptors is not None and found.descriptors > descriptors)
        if not held or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _now(service: RunningService, spool: Path, requests: int, began: float) -> Sample:
    state = service.shm()
    blocks = state["blocks"]
    if not blocks:  # confirm this by reading the arenas in another process, which takes longer
        listed = subprocess.run([CLI, "shm", "list", "--json"], capture_output=True, check=True, timeout=60)
        own = {arena["name"] for arena in state["arenas"]}
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
        spooled=_num_spooled(spool),
    )


def _num_spooled(spool: Path) -> int:
    """Return the number of request directories, and of files in the folder for plans except its path file."""
    plans = [*spool.glob(f"{PLANS}*")]
    num_directories = len([*spool.iterdir()]) if spool.exists() else 0
    return num_directories - len(plans) + sum(len([*folder.iterdir()]) - 1 for folder in plans)


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    modules = {"engine.process": "engine", "tokenize.stage": "tokenizer", "decode.nursery": "decoder"}
    modules |= {"processes.fork_server": "fork server"}
    kind = next((role for module, role in modules.items() if f"mindie_mm.{module}" in line), "service")
    return f"{kind} {process.pid}"


def _memory_bytes(pid: int) -> int:
    """Return the memory of a process except files, because other programs change the PSS of shared libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
