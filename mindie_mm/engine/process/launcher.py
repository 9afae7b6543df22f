"""The engine process of several ranks: starts them by torchrun, and ends with them.

torchrun hands no descriptors on, so each rank connects to a socket here and is given the channel to the parent. The
first one speaks over it. That all hold it makes its end the end of all: the parent hears of it when the last one is
gone. The connection is each rank's second lifeline, should this process be killed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import sys
from contextlib import suppress
from datetime import timedelta
from threading import Thread

import msgspec
import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there, and documented
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mindie_mm import logs
from mindie_mm.device import default_num_threads
from mindie_mm.processes.ipc import ChildChannel, Lifeline

_log = logging.getLogger(__name__)

PATIENCE_S = 1.5
"""How long the ranks may take to end by themselves; less than the parent's patience with this process."""

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT = timedelta(minutes=10)
_PEER = struct.Struct("3i")


def main(channel: ChildChannel, lifeline: Lifeline, num_ranks: str, device: str) -> None:
    """Runs the ranks until they end, and ends this process with status 1 if one of them failed."""
    door = _Door(channel)
    lifeline.before_end(door.close)
    rendezvous_handler_registry.register(_Loopback.NAME, _Loopback)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        run_id=door.name,
        rdzv_backend=_Loopback.NAME,
        local_addr=_LOOPBACK,
        max_restarts=0,  # the parent starts a dead engine again, by its own rules
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGTERM",  # and none from the terminal: the parent decides when to stop
        shutdown_timeout=2,
    )
    log_settings = msgspec.json.encode(logs.current()).decode()
    num_threads = max(1, default_num_threads() // int(num_ranks))
    run = elastic_launch(config, sys.executable)
    try:
        run("-P", "-m", "mindie_mm.engine.process.rank", door.name, log_settings, "${local_rank}", device, num_threads)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _log.error("rank %d, process %d, ended with status %d", rank, failure.pid, failure.exitcode)
        os._exit(1)  # at once: an interpreter with torch in it takes seconds to end, and requests wait to hear of it


class _Door:
    """Where the ranks get the channel."""

    def __init__(self, channel: ChildChannel) -> None:
        self.name = f"mindie_mm.{secrets.token_hex(16)}"
        self._channel = channel
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")  # a name without a file: nothing of it can be left
        self._listener.listen()
        self._ranks: list[tuple[psutil.Process, socket.socket]] = []
        Thread(target=self._answer, name="door", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                _log.exception("the ranks cannot get the channel")
                os._exit(1)
            pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.geteuid():
                connection.close()
                continue
            with suppress(psutil.NoSuchProcess, BrokenPipeError):  # it has ended already
                self._ranks.append((psutil.Process(pid), connection))
                socket.send_fds(connection, [b"\0"], [self._channel.fileno()])

    def close(self) -> None:
        """Ends the ranks, by their lifelines or by force, so that none outlives this process."""
        for _, connection in self._ranks:
            connection.shutdown(socket.SHUT_RDWR)
        _, left = psutil.wait_procs([process for process, _ in self._ranks], PATIENCE_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)


class _Loopback(RendezvousHandler):
    """Where the ranks find each other: torchrun's own listens on every interface, and asks nobody who he is."""

    NAME = "mindie_mm"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self.NAME

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_START_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
