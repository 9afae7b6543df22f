"""A tokenizer process: `python -m mindie_mm.tokenize.process FD CHECKPOINT ARENA_BYTES`, started by the pool.

It answers one request after another and exits when its channel closes: the pool closed it, or died.
"""

from __future__ import annotations

import logging
import signal
import sys

import msgspec
import torch

from mindie_mm.errors import MindieMMError, WorldError
from mindie_mm.ipc import ChildChannel
from mindie_mm.shm import Arena
from mindie_mm.tokenize.answer import answer
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Request, Tokenized
from mindie_mm.tokenize.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def serve(channel: ChildChannel, tokenizer: Tokenizer) -> None:
    """Answers requests until the channel closes."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Request)
    while True:
        try:
            message = channel.recv()
        except EOFError:
            return
        request = decoder.decode(message)
        reply: Reply
        try:
            reply = Tokenized.of(request.id, answer(tokenizer, request.request))
        except MindieMMError as error:
            reply = Failed.of(request.id, error)
        except Exception as error:  # noqa: BLE001 - one request fails, not all that wait behind it
            _log.exception("request %d", request.id)
            reply = Failed.of(request.id, WorldError(f"the tokenizer failed: {type(error).__name__}"))
        channel.send(encoder.encode(reply))


def main() -> None:
    """Reads the checkpoint, makes the arena, says so, and serves."""
    descriptor, path, arena_bytes = sys.argv[1:]
    # Ctrl-C reaches the whole foreground group; the parent decides when to stop, and closes the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds, so that the arena is removed
    torch.set_num_threads(1)
    with ChildChannel(int(descriptor)) as channel:
        try:
            arena = Arena.create(int(arena_bytes))
        except MindieMMError as error:
            channel.send(msgspec.msgpack.encode(Failed.of(-1, error)))
            return
        with arena:
            try:
                tokenizer = Tokenizer.from_pretrained(path, arena=arena)
            except MindieMMError as error:
                channel.send(msgspec.msgpack.encode(Failed.of(-1, error)))
                return
            channel.send(msgspec.msgpack.encode(Ready()))
            serve(channel, tokenizer)


if __name__ == "__main__":
    main()
