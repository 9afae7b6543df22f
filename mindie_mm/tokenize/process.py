"""A tokenizer process, started by the pool with CHECKPOINT, ARENA_BYTES, REQUEST_BYTES ("": half) and FAMILY
("": the one that the checkpoint names).

It answers one request after another and exits when its channel closes: the pool closed it, or died.
"""

from __future__ import annotations

import logging
import signal
import sys

import msgspec
import torch

from mindie_mm import faults
from mindie_mm.config import fault_folder
from mindie_mm.errors import MindieMMError, WorldError
from mindie_mm.ipc import ChildChannel, Lifeline
from mindie_mm.shm import Arena, collect
from mindie_mm.tokenize.answer import answer
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Request, Tokenized
from mindie_mm.tokenize.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def serve(channel: ChildChannel, tokenizer: Tokenizer, arena: Arena) -> None:
    """Answers requests until the channel closes, or the arena is lost: the next process makes another."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Request)
    while True:
        try:
            message = channel.recv()
        except EOFError:
            return
        faults.point("received")
        request = decoder.decode(message)
        reply: Reply
        try:
            reply = Tokenized.of(request.id, answer(tokenizer, request.request))
        except MindieMMError as error:
            if arena.lost:
                _log.error("request %d: %s", request.id, error)
                return
            reply = Failed.of(request.id, error)
        except Exception as error:  # noqa: BLE001 - one request fails, not all that wait behind it
            _log.exception("request %d", request.id)
            reply = Failed.of(request.id, WorldError(f"the tokenizer failed: {type(error).__name__}"))
        faults.point("before-reply")
        channel.send(encoder.encode(reply))
        faults.point("after-reply")


def main(
    channel: ChildChannel, lifeline: Lifeline, path: str, arena_bytes: str, request_bytes: str, family: str
) -> None:
    """Reads the checkpoint, makes the arena, says so, and serves."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s tokenizer: %(message)s")
    faults.arm("tokenizer", fault_folder())
    faults.point("starting")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds, so that the arena is removed
    torch.set_num_threads(1)
    try:
        quota_bytes = int(request_bytes) if request_bytes else None
        arena = lifeline.hold(lambda: Arena.create(int(arena_bytes), quota_bytes=quota_bytes), Arena.close)
    except MindieMMError as error:
        channel.send(msgspec.msgpack.encode(Failed.of(-1, error)))
        return
    lifeline.before_end(collect)  # of another tokenizer that died before the parent, which nobody else would remove
    with arena:
        faults.point("arena-made")
        try:
            tokenizer = Tokenizer.from_pretrained(path, arena=arena, family=family or None)
        except MindieMMError as error:
            channel.send(msgspec.msgpack.encode(Failed.of(-1, error)))
            return
        channel.send(msgspec.msgpack.encode(Ready(tokenizer.shown_tokens)))
        serve(channel, tokenizer, arena)
