"""Binds engines, torch_npu's threads, and the tokenizer with its decoders to CPUs near each NPU.

A thread that moves between sockets launches operators late. vllm-ascend decoded 18% more tokens with such a binding
(vllm-project/vllm-ascend#6966). Nothing fails if the CPUs of an NPU cannot be determined.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindie_mm.device import programs
from mindie_mm.settings.environment import foreign, in_c_locale

_log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_OWN_BINDING = "CPU_AFFINITY_CONF"
"""Environment variable that lets torch_npu bind its threads itself."""
_INTERRUPTS = 2
"""Number of CPUs of each NPU that are left to the driver's interrupts."""
_LEAST = _INTERRUPTS + 3
"""Minimum number of CPUs of one NPU: those for interrupts, one for the engine, and one for each thread of torch_npu."""
_THREADS = ("acl_thread", "release_thread")
"""Names of torch_npu's threads that launch operators and free their arguments. Each gets a CPU of its own."""
_COMMANDS = (("npu-smi", "info", "-m"), ("npu-smi", "info", "-t", "topo"), ("lscpu", "-e=CPU,NODE"))
_MAPPED = re.compile(r"^\s*\d+\s+\d+\s+(\d+)\s")
"""Row of `npu-smi info -m`. The third column is the number that CANN uses. It is "-" for the chip of a board."""
_TOPOLOGY = re.compile(r"^\s*NPU\d+\s+(?:.*\s)?X(?:\s.*?)?(?:\s(\d[\d,-]*))?\s*$")
"""Row of `npu-smi info -t topo`, with an X for the NPU itself. The last column lists CPUs, but not on every product."""
_NODE = re.compile(r"^\s*(\d+)\s+(\d+)\s*$")
"""Row of `lscpu -e=CPU,NODE`."""


@dataclass(frozen=True, slots=True)
class Share:
    """The CPUs of one NPU."""

    main: tuple[int, ...]
    """CPUs of the engine, the tokenizer and the decoders."""
    threads: tuple[int, ...]
    """CPU of each of torch_npu's threads, in the order of `_THREADS`."""


def shares(mapping: str, topology: str, nodes: str, allowed: Collection[int]) -> list[Share]:
    """Return the CPUs of every NPU of the machine, in CANN's order.

    NPUs with the same near CPUs divide them, also if only some of these NPUs are visible to this process, because
    other services may use the others. If npu-smi does not list near CPUs, as on Atlas A3, the NPUs divide all CPUs in
    the order of the NUMA nodes.

    Args:
        mapping: Output of `npu-smi info -m`.
        topology: Output of `npu-smi info -t topo`.
        nodes: Output of `lscpu -e=CPU,NODE`.
        allowed: CPUs that this process may use.

    Raises:
        ValueError: There are no NPUs, or too few CPUs.

    """
    count = len({found[1] for line in mapping.splitlines() if (found := _MAPPED.match(f"{line} "))})
    near = [_listed(found[1] or "") & {*allowed} for line in topology.splitlines() if (found := _TOPOLOGY.match(line))]
    if not (count := count or len(near)):
        raise ValueError("npu-smi lists no NPU")
    if len(near) != count or not all(near):
        near = [{*allowed}] * count
    node = {int(found[1]): int(found[2]) for line in nodes.splitlines() if (found := _NODE.match(line))}
    sharers: dict[frozenset[int], list[int]] = defaultdict(list)
    for npu, cpus in enumerate(near):
        sharers[frozenset(cpus)].append(npu)
    found_shares = {}
    for together, npus in sharers.items():
        ordered = sorted(together, key=lambda cpu: (node.get(cpu, 0), cpu))
        for place, npu in enumerate(npus):
            own = ordered[len(ordered) * place // len(npus) : len(ordered) * (place + 1) // len(npus)]
            if len(own) < _LEAST:
                raise ValueError(f"NPU {npu} has {len(own)} CPUs, and needs {_LEAST}")
            found_shares[npu] = Share(tuple(own[_INTERRUPTS : -len(_THREADS)]), tuple(own[-len(_THREADS) :]))
    return [found_shares[npu] for npu in range(count)]


def _listed(cpus: str) -> set[int]:
    """Return the numbers in a list such as 0-23,48-71."""
    bounds = [part.partition("-") for part in cpus.split(",") if part]
    return {cpu for start, _, stop in bounds for cpu in range(int(start), int(stop or start) + 1)}


def bind_engine(index: int) -> None:
    """Bind this process and torch_npu's threads, which must run already, to CPUs near the visible NPU `index`."""

    def bind(own: Sequence[Share]) -> str:
        share, tasks = own[index], [*Path("/proc/self/task").iterdir()]
        for task in tasks:
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                name = (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
                cpus = (share.threads[_THREADS.index(name)],) if name in _THREADS else share.main
                os.sched_setaffinity(int(task.name), cpus)
        return f"the engine uses {_ranges(share.main)}, and torch_npu's threads {_ranges(share.threads)}"

    _attempt("the engine", bind)


def bind_tokenizer() -> None:
    """Bind this thread and its later children to the CPUs of all visible NPUs, except those of torch_npu's threads."""

    def bind(own: Sequence[Share]) -> str:
        cpus = sorted(cpu for share in own for cpu in share.main)
        os.sched_setaffinity(0, cpus)
        return f"the tokenizer and its decoders use {_ranges(cpus)}"

    _attempt("the tokenizer", bind)


def _attempt(who: str, bind: Callable[[Sequence[Share]], str]) -> None:
    """Call `bind` with the CPUs of the visible NPUs. Log what it has done, or why nothing was done."""
    try:
        _log.info("CPU binding: %s", bind(_visible_shares()))
    except (OSError, ValueError, IndexError) as error:
        _log.info("CPU binding: %s is not bound to CPUs: %s", who, error)


def _visible_shares() -> list[Share]:
    """Return the CPUs of each visible NPU. Raise ValueError if they cannot be determined or the user binds threads."""
    if platform.machine() != "aarch64":
        raise ValueError("only hosts with Arm processors gain from it")
    given = foreign([_VISIBLE, _OWN_BINDING])
    if _OWN_BINDING in given:
        raise ValueError(f"{_OWN_BINDING} is set")
    outputs = [_run(*command) for command in _COMMANDS]
    found = shares(outputs[0], outputs[1], outputs[2], os.sched_getaffinity(0))
    if not given.get(_VISIBLE):
        return found
    numbers = [int(number) for number in given[_VISIBLE].split(",")]
    if max(numbers) >= len(found):
        raise ValueError(f"{_VISIBLE} is {given[_VISIBLE]}, but npu-smi lists {len(found)} NPUs")
    return [found[number] for number in numbers]


def _run(*command: str) -> str:
    """Return the output of a program, whose column headings are in English. Raise ValueError if the program hangs."""
    ended = programs.run([*command], _TIMEOUT_S, in_c_locale())
    if ended is None:
        raise ValueError(f"{' '.join(command)} did not respond within {_TIMEOUT_S:g} s")
    return ended.stdout


def _ranges(cpus: Sequence[int]) -> str:
    return "CPUs " + ",".join(map(str, cpus)) if len(cpus) < 3 else f"CPUs {cpus[0]} to {cpus[-1]}"
