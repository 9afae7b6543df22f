"""The tokenizer's side of the nursery, which forks and kills decoders and reports when they exit."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Hashable, Iterable

import msgspec

from mindie_mm.decode.decoder_messages import DecoderSetup, Ended, Fork, FromNursery, Kill, Ready, ToNursery
from mindie_mm.decode.jobs import DecoderProcess
from mindie_mm.decode.scratch import Scratch, make_file
from mindie_mm.errors import InputError
from mindie_mm.processes.forking import start_spare
from mindie_mm.processes.ipc import Child, open_channel
from mindie_mm.processes.restarts import RESTART_WAIT_S
from mindie_mm.processes.supervised import Supervised
from mindie_mm.settings.environment import single_threaded

_DECODER = msgspec.msgpack.Decoder[FromNursery](FromNursery)


class NurseryClient(Supervised):
    """Client of a nursery process. The decoders die with the nursery."""

    silence_s = 30.0  # it normally answers within milliseconds

    def __init__(self, setup: DecoderSetup, scratch_bytes: int, on_hopeless: Callable[[str], object]) -> None:
        """Prepare the client. Call `open` to start the nursery.

        Args:
            setup: Settings of the decoders.
            scratch_bytes: Size of a decoder's scratch memory in bytes.
            on_hopeless: Function to call with the reason if the nursery cannot be restarted, or is not restarted within
                `RESTART_WAIT_S`.

        """
        super().__init__("process that starts the decoders")
        self._setup = msgspec.json.encode(setup).decode()
        self._scratch_bytes = scratch_bytes
        self._on_hopeless = on_hopeless
        self.hopeless = ""
        """Reason why no decoder can be forked. Empty while the nursery is running or is expected to run again soon."""
        self._running: dict[int, asyncio.Future[Ended | None]] = {}
        """Futures of reports that the nursery has not sent yet, by pid."""
        self._killed: set[int] = set()
        """Pids of the decoders that the nursery has been asked to kill."""

    async def fork(self) -> DecoderProcess:
        """Fork a decoder. If the nursery is not running, wait for it. Raise ProcessDied if the nursery dies."""
        while not self.up:  # the nursery may die between the event and this task's turn
            await self._up.wait()
        ours, theirs = socket.socketpair()
        file = make_file(self._scratch_bytes)
        try:
            scratch = Scratch(file)
            self._tell(Fork(), theirs.fileno(), file)
        finally:
            os.close(file)
            theirs.close()
        born = self._expect(ours)
        channel = await open_channel(ours)
        try:
            pid, ended = await born
        except BaseException:
            await channel.close()
            raise
        return DecoderProcess(pid, channel, ended, scratch)

    def kill(self, pid: int) -> None:
        """Kill a decoder if it is running. If the nursery does not answer in time, the nursery is killed, too."""
        if pid in self._running:
            self._killed.add(pid)
            self._tell(Kill(pid))

    def _tell(self, message: ToNursery, *descriptors: int) -> None:
        assert self.child is not None
        self.child.channel.send_with(msgspec.msgpack.encode(message), descriptors)

    async def _spawn(self) -> Child:
        return await start_spare("mindie_mm.decode.nursery", self._setup, environment=single_threaded())

    async def _prepare(self, child: Child) -> None:
        await child.ready(Ready, f"the {self.noun}")
        self.hopeless = ""

    def _refused(self, error: Exception) -> None:
        if isinstance(error, InputError) or not self._starter.patience_s(RESTART_WAIT_S):
            self.hopeless = f"no decoder is alive, and the last attempt to start one failed: {error}"
            self._on_hopeless(self.hopeless)

    def _fail(self, died: str) -> None:
        super()._fail(died)
        while self._running:  # the kernel kills decoders with their parent
            if not (ended := self._running.popitem()[1]).done():
                ended.set_result(None)
        self._killed.clear()

    def _waiting(self) -> Iterable[Hashable]:
        return [*self._replies, *self._killed]

    def _take(self, message: bytes) -> None:
        self._starter.proved()
        news = _DECODER.decode(message)
        if isinstance(news, Ended):
            self._killed.discard(news.pid)
            if not (ended := self._running.pop(news.pid)).done():  # done if its caller was canceled
                ended.set_result(news)
            return
        ended = self._running[news.pid] = asyncio.get_running_loop().create_future()
        born = self._replies.pop(next(iter(self._replies)))  # the nursery answers in order
        if not born.done():
            born.set_result((news.pid, ended))
