"""The engine process. The first message on its channel contains the checkpoint to load."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from mindie_mm.device import default_num_threads, slow_dtype
from mindie_mm.engine.base import BaseEngine
from mindie_mm.engine.core import Engine
from mindie_mm.engine.decode_graphs import captures_graphs
from mindie_mm.engine.process.largest_step import Part, Step, WorstCase
from mindie_mm.engine.process.memory_profile import Memory
from mindie_mm.engine.process.placing import num_devices, placed
from mindie_mm.engine.process.progress_collector import ProgressCollector
from mindie_mm.engine.ranks import ALONE, LOADING_PATIENCE, RankFailed, Ranks
from mindie_mm.engine.requests.default_sampling import defaults_of
from mindie_mm.engine.requests.engine_messages import (
    Abort,
    Add,
    Encode,
    KeepLoras,
    LoadLora,
    Progress,
    Ready,
    Start,
    Stepped,
    ToEngine,
)
from mindie_mm.engine.seq2seq import Seq2SeqEngine
from mindie_mm.errors import MindieMMError, OperationalError
from mindie_mm.models import family_of, load_model, prepare_model, processor_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import Model
from mindie_mm.nn.placement import Placement
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.weights.loading import loading_reported
from mindie_mm.processes import faults
from mindie_mm.processes.ipc import ChildChannel, Failure, Lifeline, Loading
from mindie_mm.processes.title import show_title
from mindie_mm.settings.environment import fault_folder
from mindie_mm.shm import collect
from mindie_mm.shm.mapped import close_removed
from mindie_mm.structured.grammar import Grammars
from mindie_mm.tokenize.text.detokenizer import load_tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

REST_S = 0.5
"""Time in seconds that an idle engine waits for a message before it unmaps removed arenas. A mapped arena uses memory
even after it was removed, so the successor of a dead tokenizer may lack memory for its own arena."""

LOADING_INTERVAL_S = 0.2
"""Minimum time in seconds between two messages about the loading of weights."""


def main(channel: ChildChannel, lifeline: Lifeline, ranks: Ranks = ALONE) -> None:
    """Handle messages until the parent closes the channel or dies. Only rank 0 receives messages.

    Rank 0 also sends the messages, except an error of a rank that rank 0 did not receive.
    """
    faults.arm("engine", fault_folder())
    faults.point("starting")

    def terminate(*_: object) -> NoReturn:
        lifeline.end()  # Ray sends SIGTERM to the children of a dead actor, which must still remove its arenas
        sys.exit(0)

    signal.signal(signal.SIGTERM, terminate)
    lifeline.before_end(collect)  # if the tokenizer has died, too, no other process removes its arena
    disable_progress_bar()
    try:
        serve(channel, ranks)
    except (EOFError, BrokenPipeError):
        _log.debug("the parent closed the channel")


def serve(channel: ChildChannel, ranks: Ranks) -> None:
    """Load the checkpoint given in the first message. Then handle messages until the channel is closed."""
    start = msgspec.msgpack.decode(ranks.broadcast(bytes, channel.recv), type=Start)
    rank = f" rank {ranks.number}" if ranks.count > 1 else ""
    show_title(f"mindie-mm: engine {start.replica.number}{rank}")

    def send(message: Ready | Failure | Loading | Stepped) -> None:
        if ranks.number == 0:
            channel.send(msgspec.msgpack.encode(message))

    try:
        visible = ranks.run_on_all(lambda: num_devices(start.config))
        start = msgspec.structs.replace(start, config=placed(start.config, start.replica, ranks))
        default_sampling = defaults_of(start.model, start.family, start.generation_config)
        with loading_reported(_rarely(lambda share: send(Loading(share)))):
            engine, step_bytes = load_engine(start, ranks)
        free_bytes = ranks.open_device(start.config.device).free_bytes()
    except MindieMMError as error:
        send(Failure.of(error))
        return
    except RankFailed as failed:
        channel.send(msgspec.msgpack.encode(Failure.of(failed.error)))  # rank 0 may wait for this rank
        raise
    faults.point("loaded")
    ready = msgspec.structs.replace(engine.ready, default_sampling=default_sampling, lora_keys=engine.lora_keys)
    send(msgspec.structs.replace(ready, step_bytes=step_bytes, free_bytes=free_bytes, num_devices=visible))
    _run_steps(channel, ranks, engine, send)


def _run_steps(channel: ChildChannel, ranks: Ranks, engine: BaseEngine, send: Callable[[Stepped], None]) -> None:
    """Run steps and send their results. Wait for messages while there is no work."""
    decoder = msgspec.msgpack.Decoder[ToEngine](ToEngine)
    collector = ProgressCollector()
    while True:
        updates: list[Progress] = []
        messages = ranks.broadcast(list[bytes], lambda: received(channel, engine, decoder))
        if messages:
            updates += collector.take()  # a new request may take longer than a step
        for message in messages:
            updates += _take(decoder.decode(message), engine)
        if updates or (messages and not engine.has_work()):
            send(Stepped(updates, engine.stats))
        if engine.has_work():
            stepped = collector.add(engine.step())
            faults.point("before-reply")
            if stepped is not None:
                send(stepped)
            faults.point("after-reply")
        close_removed(cleanups=True)


def _rarely(report: Callable[[float], None]) -> Callable[[float], None]:
    """Return a function that calls `report`, but at most once in `LOADING_INTERVAL_S` seconds."""
    last_s = time.monotonic()

    def sometimes(share: float) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= LOADING_INTERVAL_S:
            last_s = now_s
            report(share)

    return sometimes


def received(channel: ChildChannel, engine: BaseEngine, decoder: msgspec.msgpack.Decoder[ToEngine]) -> list[bytes]:
    """Return the messages that have arrived. An idle engine waits `REST_S` seconds for a message.

    Stop after a request whose structured output must be compiled, because compiling may take longer than a step.
    """
    messages: list[bytes] = []
    while channel.poll(0 if messages or engine.has_work() else REST_S):
        messages.append(channel.recv())
        message = decoder.decode(messages[-1])
        if isinstance(message, Add) and engine.must_compile(message):
            break
    return messages


def _take(message: ToEngine, engine: BaseEngine) -> list[Progress]:
    """Handle a message. Return progress that must be sent immediately."""
    match message:
        case Add():
            faults.point("received")
            failure = engine.add(message)
            faults.point("queued")
            return [failure] if failure else []
        case Abort():
            faults.point("aborting")
            engine.abort(message)
        case Encode():
            return [engine.encode(message)]
        case LoadLora():
            return [engine.load_lora(message)]
        case KeepLoras():
            engine.keep_loras(message)
    return []


def load_engine(start: Start, ranks: Ranks) -> tuple[BaseEngine, int]:
    """Load the model and allocate the caches. Return the engine and the memory of its largest step in bytes."""
    config = start.config
    # If one rank fails, the others must receive its error before they wait for it in a collective operation.
    device = ranks.run_on_all(lambda: ranks.open_device(config.device))
    ranks.run_on_all(lambda: captures_graphs(type(device), config))  # raise its error before the weights are loaded
    num_threads = ranks.num_threads()  # read before the process is bound to its share of the CPUs
    if config.cpu_binding == "auto":
        device.bind_engine()
    torch.set_num_threads(config.num_threads or min(num_threads, default_num_threads()))
    checkpoint = ranks.run_on_all(lambda: Checkpoint.open(start.model))
    weights = ranks.run_on_all(checkpoint.weights_state)  # before loading, because files may be replaced meanwhile
    model = ranks.run_on_all(
        lambda: load_model(
            Path(start.model) if start.model else None,
            config.device,
            config.dtype,
            start.family,
            weights=config.weights,
            vision=Placement(config.vision_device, config.vision_bits),
            projector=Placement(config.projector_device, config.projector_bits),
            end_token_ids=start.end_token_ids,
            prepares=False,
        ),
        LOADING_PATIENCE,
    )
    # A rank that fails in a trial of layers must not wait long for ranks that are inside a collective operation.
    ranks.run_on_all(lambda: prepare_model(model, checkpoint, device, config.weights))
    if ranks.number == 0 and (detail := slow_dtype(model.module)):
        _log.warning("%s. Use --dtype float32, or 32 bits for the part (--vision-bits, --projector-bits)", detail)
    lora_keys, lora_bytes = _enable_loras(model, start, ranks)
    processor = processor_of(checkpoint, family_of(checkpoint, start.family))
    step = Step.kept(start.step_bytes)
    if step is None:
        step = WorstCase(model, processor, device, config, ranks).step(tuple(processor.placeholders))
        if lora_bytes:
            step = Step((*step.parts, Part("LoRA adapters", lora_bytes, "max_loras or max_lora_rank")))
    num_starting = 1 if start.replica.others_started else start.replica.count
    memory = Memory(model, step, device, ranks, num_starting)
    encoder_bytes = ranks.run_on_all(lambda: memory.encoder_cache_bytes(config))
    config = replace(config, encoder_cache_bytes=ranks.all_reduce_min(encoder_bytes))
    kv_bytes = ranks.run_on_all(lambda: memory.kv_cache_bytes(config))
    engine: BaseEngine
    if isinstance(model, Seq2SeqModel):
        engine = Seq2SeqEngine(model, config, kv_bytes)
    else:
        engine = Engine(model, config, ranks.all_reduce_min(kv_bytes), ranks)
        tokenizer = load_tokenizer(checkpoint, start.family)
        engine.grammars = Grammars(tokenizer, model.spec.eos_token_ids, torch.get_num_threads())
    engine.weights, engine.lora_keys = weights, lora_keys
    return engine, step.num_bytes


def _enable_loras(model: Model | Seq2SeqModel, start: Start, ranks: Ranks) -> tuple[dict[str, str], int]:
    """Prepare a model for LoRA adapters, and read those of the first message.

    Return the keys of the adapters by folder, and the memory for adapters in bytes.
    """
    if start.loras is None:
        return {}, 0
    config = start.config
    loras = ranks.run_on_all(lambda: model.enable_loras(config.max_loras, config.max_lora_rank))
    keys: dict[str, str] = {}

    def on_all(work: Callable[[], T]) -> T:
        def checked() -> T:
            try:
                return work()
            except MindieMMError:
                raise
            except Exception as error:  # the other ranks must receive it
                raise OperationalError(f"a LoRA adapter cannot be read: {error!r}") from error

        return ranks.run_on_all(checked)

    for one in start.loras:
        try:
            adapter = loras.read(Path(one.folder), one.key, on_all)
        except MindieMMError as error:  # an adapter must not prevent a restart
            if not one.key:
                raise
            _log.error("a LoRA adapter cannot be read again, and its requests fail: %s", error)
            continue
        loras.known[adapter.key] = adapter
        keys[one.folder] = adapter.key
    return keys, loras.reserve()
