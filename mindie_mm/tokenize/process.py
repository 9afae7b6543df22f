"""A tokenizer process: `python -m mindie_mm.tokenize.process FD CHECKPOINT ARENA_BYTES`, started by the pool.

It answers one request after another and exits when its channel closes: the pool closed it, or died.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import msgspec
import torch

from mindie_mm.errors import InputError, MindieMMError, WorldError
from mindie_mm.inputs import Message, Text, parse_inputs, parse_messages
from mindie_mm.ipc import ChildChannel
from mindie_mm.shm import Arena
from mindie_mm.tokenize.messages import Failed, Ready, Reply, Request, Tokenized, TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def answer(tokenizer: Tokenizer, request: TokenizeRequest) -> Prompt:
    """The prompt of `request`."""
    given = [name for name in ("messages", "items", "text") if getattr(request, name) is not None]
    if len(given) != 1:
        raise InputError(f"a request has exactly one of messages, items and text; found {given or 'none'}")
    path_file = Path(request.path_file) if request.path_file else None
    messages: list[Message] = []
    if request.messages is not None:
        messages = parse_messages(request.messages)
    else:
        items = [Text(request.text)] if request.text is not None else parse_inputs(request.items or [])
        if request.items is None or not request.chat or not tokenizer.has_template:
            return tokenizer.prompt_from_items(
                items, path_file, max_tokens=request.max_tokens, truncating=request.truncate
            )
        messages = [Message("user", tuple(items))]
    return tokenizer.prompt_from_messages(
        messages,
        path_file,
        request.add_generation_prompt,
        request.chat_template_kwargs,
        max_tokens=request.max_tokens,
        truncating=request.truncate,
    )


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
