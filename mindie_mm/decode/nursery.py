"""The nursery, which is the process that forks decoders.

The nursery has a single thread, and has loaded the libraries and the checkpoint's processor. A forked decoder is
therefore ready within milliseconds, whereas importing the libraries would take a second. The nursery exits when its
tokenizer process exits, and the decoders exit when the nursery exits.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from mindie_mm.decode.decoder import Decoder, serve
from mindie_mm.decode.decoder_messages import DecoderSetup, Ended, Fork, Forked, FromNursery, Ready, ToNursery
from mindie_mm.decode.scratch import Scratch
from mindie_mm.device import host_memory
from mindie_mm.errors import MindieMMError
from mindie_mm.lockdown import lock_in, support
from mindie_mm.lockdown.system_calls import PR_SET_PDEATHSIG, prctl
from mindie_mm.media.warm import warm_up
from mindie_mm.models import family_of, processor_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Processor
from mindie_mm.processes import faults
from mindie_mm.processes.ipc import ChildChannel, Failure, Lifeline
from mindie_mm.processes.receiving import ReceivingChannel
from mindie_mm.processes.title import show_title
from mindie_mm.settings.config import MiB
from mindie_mm.settings.environment import fault_folder

_log = logging.getLogger(__name__)

_KEPT_BYTES = 64 * MiB
"""Number of bytes of freed memory that a decoder keeps, so that its next item need not fault in the pages again."""
_FIRST_DESCRIPTOR = 3
"""Descriptor of a decoder's socket, after the three standard streams."""


class Nursery:
    """Server that forks and kills decoders for the tokenizer process, and reports when they exit."""

    def __init__(self, channel: ReceivingChannel, processor: Processor, setup: DecoderSetup) -> None:
        self._channel = channel
        self._processor = processor
        self._setup = setup
        self._pids: dict[int, int] = {}
        """Resident memory of each decoder in bytes when it started, by pid."""

    def serve(self) -> None:
        """Answer messages until the tokenizer process closes the channel.

        Raises:
            EOFError: The tokenizer process has closed the channel or has died.
            ConnectionError: The tokenizer process has closed the channel or has died.

        """
        requests = msgspec.msgpack.Decoder[ToNursery](ToNursery)
        wake_up, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # with any handler, Python writes to `woken`
        while True:
            readable, _, _ = select.select([self._channel.socket.fileno(), wake_up], [], [])
            if wake_up in readable:
                os.read(wake_up, 4096)
                self._reap()
            if self._channel.socket.fileno() in readable:
                message, descriptors = self._channel.receive()
                request = requests.decode(message)
                if isinstance(request, Fork):
                    self._fork(*descriptors)
                elif request.pid in self._pids:
                    os.kill(request.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill all decoders."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _fork(self, descriptor: int, scratch: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_decoder(descriptor, scratch, parent)
        os.close(descriptor)
        os.close(scratch)
        self._pids[pid] = _resident_bytes(pid)
        self._send(Forked(pid))

    def _become_decoder(self, descriptor: int, scratch: int, parent: int) -> NoReturn:
        """Run as a decoder in the forked process, until the tokenizer process closes the socket.

        `descriptor` is the decoder's socket, and `scratch` is the file of its scratch memory.
        """
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the nursery died before PR_SET_PDEATHSIG took effect
                os._exit(1)
            show_title("mindie-mm: decoder")
            memory = Scratch(scratch)
            os.dup2(descriptor, _FIRST_DESCRIPTOR)
            gc.freeze()  # keep the nursery's objects, because they own descriptors that `lock_in` closes
            with socket.socket(fileno=_FIRST_DESCRIPTOR) as sock:
                lock_in([_FIRST_DESCRIPTOR], self._setup.media.max_decode_bytes)
                serve(ReceivingChannel(sock), Decoder(self._processor, self._setup.media, memory))
        except BaseException:  # noqa: BLE001 - the process exits in any case
            _log.exception("a decoder cannot start")
            os._exit(1)
        os._exit(0)

    def _reap(self) -> None:
        for pid in list(self._pids):
            child, status, usage = os.wait4(pid, os.WNOHANG)
            if child:
                grown_bytes = max(0, 1024 * usage.ru_maxrss - self._pids.pop(pid))
                self._send(Ended(pid, os.waitstatus_to_exitcode(status), grown_bytes))

    def _send(self, message: FromNursery) -> None:
        self._channel.send(msgspec.msgpack.encode(message))


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, or 0 if the process has exited."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
    return 0


def main(channel: ChildChannel, lifeline: Lifeline, setup_json: str) -> None:
    """Load the libraries and the checkpoint's processor, report to the tokenizer process, and fork decoders."""
    lifeline.leave()  # a process that forks must not have another thread
    faults.arm("nursery", fault_folder())
    faults.point("starting")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    host_memory.keep_freed(_KEPT_BYTES)
    setup = msgspec.json.decode(setup_json, type=DecoderSetup)
    ready: Ready | Failure = Ready()
    try:
        processor = load_processor(setup)
        warm_up()
    except MindieMMError as error:
        ready = Failure.of(error)
    locks = support()
    _log.log(logging.WARNING if locks.missing else logging.DEBUG, "%s", locks)
    with suppress(ConnectionError):  # if the tokenizer process has died, `serve` notices that the channel is closed
        channel.send(msgspec.msgpack.encode(ready))
    if isinstance(ready, Failure):
        return
    with socket.socket(fileno=os.dup(channel.fileno())) as sock:
        nursery = Nursery(ReceivingChannel(sock), processor, setup)
        try:
            nursery.serve()
        except (EOFError, ConnectionError):
            nursery.close()
            os._exit(0)  # skip the libraries' exit handlers, for which the tokenizer process would wait a second


def load_processor(setup: DecoderSetup) -> Processor:
    """Return the processor of the checkpoint. Raise UnsupportedCheckpoint if no family supports the checkpoint."""
    checkpoint = Checkpoint.open(setup.model)
    return processor_of(checkpoint, family_of(checkpoint, setup.family))
