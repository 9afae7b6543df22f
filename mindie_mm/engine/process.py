"""The engine process; the first message on its channel says what to serve."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import msgspec
from transformers.utils.logging import disable_progress_bar

from mindie_mm import faults
from mindie_mm.config import fault_folder
from mindie_mm.device import open_device
from mindie_mm.engine.base import BaseEngine
from mindie_mm.engine.core import Engine
from mindie_mm.engine.detokenizer import load_tokenizer
from mindie_mm.engine.grammar import Grammars
from mindie_mm.engine.messages import Abort, Add, Failed, FromEngine, Mount, Progress, Start, Stepped, ToEngine, Unmount
from mindie_mm.engine.room import kv_cache_bytes
from mindie_mm.engine.seq2seq import Seq2SeqEngine
from mindie_mm.errors import MindieMMError, error_name
from mindie_mm.ipc import ChildChannel, Lifeline
from mindie_mm.models import family_of, load_model, reading
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.placement import Placement
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.shm import collect, mount

_log = logging.getLogger(__name__)


def main(channel: ChildChannel, lifeline: Lifeline) -> None:
    """Serves until the parent closes the channel, or dies."""
    faults.arm("engine", fault_folder())
    faults.point("starting")
    lifeline.before_end(collect)  # of a tokenizer that died before its parent, too, which nobody else would remove
    disable_progress_bar()
    try:
        serve(channel)
    except (EOFError, BrokenPipeError):
        _log.debug("the parent closed the channel")


def serve(channel: ChildChannel) -> None:
    """Loads what the first message names, then steps as long as there is work, and waits when there is none."""
    start = msgspec.msgpack.decode(channel.recv(), type=Start)
    try:
        engine = _load(start)
    except MindieMMError as error:
        return _send(channel, Failed((error_name(error), str(error))))
    faults.point("loaded")
    _send(channel, engine.ready)
    decoder = msgspec.msgpack.Decoder[ToEngine](ToEngine)
    mounts: dict[int, ExitStack] = {}
    while True:
        failures: list[Progress] = []
        # At rest it waits for one message; at work it takes those that are there.
        while channel.poll(None if not (engine.has_work() or failures) else 0):
            message = decoder.decode(channel.recv())
            failures += _take(message, engine, mounts)
            if isinstance(message, Abort) and not engine.has_work():
                break
        if failures or not engine.has_work():
            _send(channel, Stepped(failures, engine.stats))
        if engine.has_work():
            stepped = engine.step()
            faults.point("before-reply")
            _send(channel, stepped)
            faults.point("after-reply")


def _take(message: ToEngine, engine: BaseEngine, mounts: dict[int, ExitStack]) -> list[Progress]:
    """Does what a message asks for; the requests that fail at once."""
    match message:
        case Add():
            faults.point("received")
            failure = engine.add(message)
            faults.point("queued")
            return [failure] if failure else []
        case Abort():
            faults.point("aborting")
            engine.abort(message)
        case Mount():
            _mount(message, mounts)
        case Unmount():
            mounts.pop(message.number).close()
    return []


def _mount(message: Mount, mounts: dict[int, ExitStack]) -> None:
    """What cannot be mounted fails the requests whose words lead there, each with an error of its own."""
    mounts[message.number] = stack = ExitStack()
    try:
        stack.enter_context(mount(Path(message.path), message.number))
    except MindieMMError:
        _log.exception("%s cannot be mounted", message.path)


def _load(start: Start) -> BaseEngine:
    config = start.config
    device = open_device(config.device)
    device.set_num_threads(config.num_threads)
    model = load_model(
        Path(start.model) if start.model else None,
        config.device,
        config.dtype,
        start.family,
        vision=Placement(config.vision_device, config.vision_bits),
        projector=Placement(config.projector_device, config.projector_bits),
    )
    checkpoint = Checkpoint.open(start.model)
    family = family_of(checkpoint, start.family)
    with reading(checkpoint, family):
        processor = family.processor(checkpoint)
    room = kv_cache_bytes(model, processor, family.kinds, device, config)
    if isinstance(model, Seq2SeqModel):
        return Seq2SeqEngine(model, config, room)
    engine = Engine(model, config, room)
    engine.grammars = Grammars(lambda: load_tokenizer(checkpoint, start.family), model.spec.eos_token_ids)
    return engine


def _send(channel: ChildChannel, message: FromEngine) -> None:
    channel.send(msgspec.msgpack.encode(message))
