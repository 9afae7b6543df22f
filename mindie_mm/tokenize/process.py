"""A tokenizer process, started by the pool with a Setup as JSON.

It answers one request after another and exits when its channel closes: the pool closed it, or died.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys

import msgspec
import psutil
import torch

from mindie_mm import faults
from mindie_mm.environment import fault_folder
from mindie_mm.errors import LimitExceeded, MindieMMError, WorldError
from mindie_mm.ipc import CANCEL, ChildChannel, Failure, Lifeline
from mindie_mm.media import cancellation
from mindie_mm.shm import Arena, collect
from mindie_mm.tokenize.answer import answer
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Setup, Tokenized, TokenizeRequest
from mindie_mm.tokenize.preprocessed import Preprocessed
from mindie_mm.tokenize.tokenizer import Tokenizer
from mindie_mm.tokenize.wires import NativeWire

_log = logging.getLogger(__name__)


def serve(channel: ChildChannel, tokenizer: Tokenizer, arena: Arena) -> None:
    """Answers requests until the channel closes, or the arena is lost: the next process makes another."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(TokenizeRequest)
    while True:
        try:
            message = channel.recv()
        except EOFError:
            return
        cancellation.begin()
        faults.point("received")
        request = decoder.decode(message)
        reply: Reply
        try:
            reply = Tokenized.of(answer(tokenizer, request))
        except MindieMMError as error:
            if arena.lost:
                _log.error("a request: %s", error)
                return
            reply = Failed(Failure.of(error))
        except Exception as error:  # noqa: BLE001 - one request fails, not the process
            _log.exception("a request")
            reply = Failed(Failure.of(_error_of(error)))
        faults.point("before-reply")
        channel.send(encoder.encode(reply))
        faults.point("after-reply")


def _error_of(error: Exception) -> MindieMMError:
    """What a caller is told of an exception that nobody foresaw.

    Where memory is short, the request took it: there is one at a time.
    """
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return LimitExceeded("decoding the request's media takes more memory than the limit (--max-decode-bytes)")
    return WorldError(f"the tokenizer failed: {type(error).__name__}")


def _limit_memory(further_bytes: int) -> None:
    """Lets this process take `further_bytes` of private memory beyond what it has; the arena, shared, is none of it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + further_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main(channel: ChildChannel, lifeline: Lifeline, setup_json: str) -> None:
    """Reads the checkpoint, makes the arena, says so, and serves."""
    faults.arm("tokenizer", fault_folder())
    faults.point("starting")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds, so that the arena is removed
    signal.signal(CANCEL, lambda *_: cancellation.cancel())
    torch.set_num_threads(1)
    setup = msgspec.json.decode(setup_json, type=Setup)
    try:
        quota_bytes = setup.arena_request_bytes
        arena = lifeline.hold(lambda: Arena.create(setup.arena_bytes, quota_bytes=quota_bytes), Arena.close)
    except MindieMMError as error:
        channel.send(msgspec.msgpack.encode(Failure.of(error)))
        return
    lifeline.before_end(collect)  # of another tokenizer that died before the parent, which nobody else would remove
    with arena:
        faults.point("arena-made")
        try:
            wire = NativeWire(arena, Preprocessed(setup.preprocessed_cache_bytes))
            tokenizer = Tokenizer.from_pretrained(
                setup.model,
                wire,
                family=setup.family,
                caps=setup.media,
                content_format=setup.chat_template_content_format,
            )
        except MindieMMError as error:
            channel.send(msgspec.msgpack.encode(Failure.of(error)))
            return
        if setup.media.max_decode_bytes:
            _limit_memory(setup.media.max_decode_bytes + setup.preprocessed_cache_bytes)
        channel.send(msgspec.msgpack.encode(Ready(tokenizer.shown_tokens)))
        serve(channel, tokenizer, arena)
