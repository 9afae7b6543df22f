"""The fork server, which is the process that forks the tokenizer and the engines.

The fork server has a single thread, and has imported the modules of these processes. A forked process is therefore
ready within milliseconds, whereas importing the modules would take seconds, and the processes share the memory of the
modules. The forked processes are children of the fork server's parent. The fork server computes nothing, opens no
device and maps no arena. It exits when its parent exits.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from mindie_mm.errors import OperationalError
from mindie_mm.processes import faults
from mindie_mm.processes.forking import Fork, become, fork_sibling
from mindie_mm.processes.ipc import ChildChannel, Failure, Lifeline
from mindie_mm.processes.receiving import ReceivingChannel
from mindie_mm.settings.environment import changed_since, environment_now, fault_folder

THREAD_END_S = 2.0
"""Maximum time in seconds for the kernel to remove a thread that has ended."""

_imported: dict[str, str] = {}
"""Environment variables that imported modules have set. A fork server that was forked inherits them."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First message of the fork server. It has imported the modules."""

    devices: list[str]
    """Values of the setting `device` that allow an engine to be forked."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Answer to a `Fork`."""

    pid: int


def main(channel: ChildChannel, lifeline: Lifeline, module: str, *arguments: str) -> None:
    """Call `module.prepare(*arguments)`, which imports the workers' modules, and fork workers until the channel closes.

    `prepare` returns `Ready.devices`.
    """
    faults.arm("fork_server", fault_folder())
    faults.point("starting")
    before = environment_now()
    gc.disable()  # looking for garbage during the imports would take 0.1 s each time
    devices = importlib.import_module(module).prepare(*arguments)
    _imported.update(changed_since(before))
    lifeline.leave()
    if (num_threads := _num_threads()) > 1:
        error = OperationalError(f"the fork server has {num_threads} threads, but must have one")
        channel.send(msgspec.msgpack.encode(Failure.of(error)))
        return
    gc.enable()
    gc.freeze()  # else a garbage collection in a worker would write to all shared pages
    with suppress(EOFError, ConnectionError), socket.socket(fileno=os.dup(channel.fileno())) as sock:
        channel.send(msgspec.msgpack.encode(Ready(devices)))
        fork, descriptors = _serve(ReceivingChannel(sock))
        sock.close()
        channel.__exit__()  # a worker that kept these open would hide the end of the fork server from the parent
        become(fork, descriptors, _imported)


def _num_threads() -> int:
    """Return the number of threads of this process. The kernel may list a thread for some time after it has ended."""
    deadline = time.monotonic() + THREAD_END_S
    while (number := len([*Path("/proc/self/task").iterdir()])) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    return number


def _serve(channel: ReceivingChannel) -> tuple[Fork, list[int]]:
    """Handle requests. Return only in a copy, with the request of its worker.

    The copy itself answers, so that the parent learns its process id even if the fork server dies after the fork.

    Raises:
        EOFError: The parent has closed the channel or has died.
        ConnectionError: The parent has closed the channel or has died.

    """
    while True:
        message, descriptors = channel.receive()
        fork = msgspec.msgpack.decode(message, type=Fork)
        try:
            if fork_sibling() == 0:
                channel.send(msgspec.msgpack.encode(Forked(os.getpid())))
                return fork, descriptors
        except OSError as error:
            channel.send(msgspec.msgpack.encode(Failure.of(OperationalError(f"the fork server cannot fork: {error}"))))
        faults.point("forked")
        for descriptor in descriptors:
            os.close(descriptor)
