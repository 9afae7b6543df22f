"""What engines have in common: requests in, progress out. One thread, no I/O: the process around it moves messages."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import download, require_alive, upload
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.requests.engine_messages import (
    Abort,
    Add,
    FinishReason,
    Progress,
    Ready,
    Refill,
    Stats,
    Stepped,
    TokenLogprob,
)
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.requests.sequence import Sequence
from mindie_mm.engine.sampler import logprobs_of, sample, score
from mindie_mm.engine.scheduler import BaseScheduler, Scheduled
from mindie_mm.engine.tower_budget import TowerLimits
from mindie_mm.engine.towers import Towers
from mindie_mm.errors import (
    DeviceError,
    InputError,
    MindieMMError,
    OperationalError,
    SegmentMissing,
    StaleReference,
    TokenOutOfRange,
)
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.placement import devices_of
from mindie_mm.nn.splice import MediaItem, plain_ids
from mindie_mm.processes import faults
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig
from mindie_mm.structured.grammar import Constraint, Grammars

_log = logging.getLogger(__name__)

T = TypeVar("T")

Draw = tuple[int, list[TokenLogprob] | None]
"""A token, and its log-probabilities where they are asked for."""


class BaseEngine(ABC):
    """Requests in, progress out. A request that fails, fails alone."""

    _scheduler: BaseScheduler

    def __init__(self, model: MediaModel, config: EngineConfig, ranks: Ranks = ALONE) -> None:
        """`ranks` are the processes that all do what this one does, each with its share of the weights."""
        self._media_model = model
        self._spec = model.spec
        self._devices = devices_of(model)
        self._ranks = ranks
        self._encoder_cache = EncoderCache(config.encoder_cache_bytes)
        self._tower_limits = TowerLimits(config.max_tower_tokens, config.max_tower_bytes, model.spec.feature_bytes)
        by_item = config.tower_parallel == "items"
        self._towers = Towers(model, self._encoder_cache, self._tower_limits, ranks, by_item=by_item)
        self._sequences: dict[str, Sequence] = {}
        self.grammars: Grammars | None = None
        """Makes what the tokens of a request with a JSON schema must fit; None: no such request is taken."""

    @property
    @abstractmethod
    def ready(self) -> Ready:
        """What the clients must know."""

    @property
    def stats(self) -> Stats:
        """Gauges of this moment."""
        scheduler, encoder_cache = self._scheduler, self._encoder_cache
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.parked),
            kv_cache_usage=scheduler.usage,
            encoder_cache_queries=encoder_cache.queries,
            encoder_cache_hits=encoder_cache.hits,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
        )

    @abstractmethod
    def _sequence(self, message: Add) -> Sequence:
        """What becomes of a request; whatever is wrong with it is raised."""

    @abstractmethod
    def _run(self, step: abc.Sequence[Scheduled], progress: list[Progress]) -> None:
        """Computes a step, and adds its news to `progress`, so that none is lost should a later part fail."""

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def add(self, message: Add) -> Progress | None:
        """Queues a request; what is wrong with it comes back at once."""
        sequence = self._try_on_all(message.request_id, lambda: self._new(message))
        if isinstance(sequence, MindieMMError):
            return _failure(message.request_id, sequence)
        self._encoder_cache.count(list(sequence.items))
        self._sequences[message.request_id] = sequence
        self._scheduler.add(sequence)
        return None

    def refill(self, message: Refill) -> Progress | None:
        """Let a parked request go on with media from other blocks.

        Returns:
            The request's error, or another demand for media if the new blocks are lost, too. None if it goes on.

        """
        sequence = self._sequences.get(message.request_id)
        if sequence is None or sequence not in self._scheduler.parked:
            return None  # aborted meanwhile
        items = self._try_on_all(message.request_id, lambda: self._items_again(sequence, message))
        faults.point("refilled")
        if isinstance(items, SegmentMissing | StaleReference):
            return Progress(request_id=message.request_id, needs_media=True)
        if isinstance(items, MindieMMError):
            return self._fail(sequence, items)
        sequence.refill(items)
        self._scheduler.resume(sequence)
        return None

    def _try_on_all(self, request_id: str, work: Callable[[], T]) -> T | MindieMMError:
        """Return the result of `work`, or on all ranks the error that one of them has."""
        failure: MindieMMError | None = None
        try:
            result = work()
        except MindieMMError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - a request that cannot be read must not end the others
            _log.exception("request %s", request_id)
            failure = OperationalError(f"the request failed: {type(error).__name__}")
        # A block may be freed between one rank's reading of it and another's.
        failure = self._ranks.all_reduce_error(failure)
        return result if failure is None else failure

    def _new(self, message: Add) -> Sequence:
        sequence = self._sequence(message)
        if (schema := sequence.params.json_schema) is not None:
            sequence.constraint = self._constraint(schema)
        return sequence

    def _items_again(self, sequence: Sequence, message: Refill) -> list[MediaItem]:
        """Read a sequence's media from other blocks. Raise OperationalError if the prompt or a digest is another."""
        ids = np.frombuffer(message.input_ids, dtype=np.int64)
        items = self._read(ids)
        same_ids = plain_ids(ids, items).tolist() == sequence.token_ids[: sequence.num_prompt]
        if not same_ids or [item.digest for item in items] != [item.digest for item in sequence.items]:
            raise OperationalError("the request's media were read again after a preemption, and have changed since")
        return items

    def _constraint(self, schema: str) -> Constraint:
        if self.grammars is None:
            raise InputError("this model takes no JSON schema")
        return self.grammars.constraint(schema)

    def must_compile(self, message: Add) -> bool:
        """Whether adding it takes as long as several steps."""
        schema = message.params.json_schema
        return schema is not None and self.grammars is not None and schema not in self.grammars

    def abort(self, message: Abort) -> None:
        """Forgets a request, if it is still here."""
        if sequence := self._sequences.get(message.request_id):
            self._forget(sequence)

    def step(self) -> Stepped:
        """Computes one step. What no request is to blame for fails the requests of the step, and no other."""
        step = self._scheduler.schedule()
        faults.point("scheduled")
        progress: list[Progress] = []
        try:
            self._run(step, progress)
        except Exception as error:
            if self._ranks.count > 1:
                raise  # the others may be waiting for this rank inside an operation: none of them can go on
            # Whatever a device or a kernel raises must not end the other requests, unless the device is gone for good.
            _log.exception("a step of %d requests failed", len(step))
            failure = DeviceError(f"the step failed: {type(error).__name__}")
            left = [s.sequence for s in step if s.sequence.request_id in self._sequences]
            progress += self._take_out(dict.fromkeys(left, failure))
        return Stepped(progress, self.stats)

    def _read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        """The media of a prompt's ids, once these are known to the model."""
        known = self._spec.embedding_size or self._spec.vocab_size
        if (top := int(ids.max())) >= known:
            raise TokenOutOfRange(f"token id {top} is not in [0, {known})")
        items = self._media_model.read(ids)
        faults.point("attached")
        return items

    @torch.inference_mode()
    def _draw(self, logits: Tensor, sequences: abc.Sequence[Sequence]) -> list[Draw | None]:
        """The next token of each sequence, from logits float32 [sequences, vocabulary], which are changed in place.

        None where the logits are no numbers: the model's dtype overflowed, or embeddings were none.
        """
        non_finite = ~(logits < torch.inf).all(dim=1)  # with a NaN, or plus infinity, which draws nothing either
        logits.masked_fill_(non_finite.unsqueeze(1), 0)  # nothing can be drawn from them, and the others go on
        # Sampling biases the logits in place; log-probabilities are of the model's own.
        asking = _asking(sequences)
        rows = [upload(np.array(group, np.int64), logits.device) for group in asking.values()]
        raw = [logits.index_select(0, group) for group in rows]
        self._constrain(logits, sequences)
        tokens = sample(logits, sequences, self._spec.eos_token_ids)
        scores = [
            score(part, tokens.index_select(0, group), num_top)
            for part, group, num_top in zip(raw, rows, asking, strict=True)
        ]
        # All of it at once: the host waits for the device here, and in a step without media and prompts'
        # log-probabilities nowhere else.
        on_host = download(non_finite, tokens, *(part for s in scores for part in (s.chosen, s.top, s.top_ids)))
        drawn: list[int] = on_host[1].tolist()
        logprobs: dict[int, list[TokenLogprob]] = {}
        for n, group in enumerate(asking.values()):
            for i, one in zip(group, logprobs_of([drawn[i] for i in group], *on_host[2 + 3 * n :][:3]), strict=True):
                logprobs[i] = [one]
        return [
            None if bad else (token, logprobs.get(i))
            for i, (token, bad) in enumerate(zip(drawn, on_host[0].tolist(), strict=True))
        ]

    def _constrain(self, logits: Tensor, sequences: abc.Sequence[Sequence]) -> None:
        """Takes out of the logits float32 [sequences, vocabulary], in place, which tokens may not be drawn."""
        constraints = {row: one.constraint for row, one in enumerate(sequences) if one.constraint is not None}
        if not constraints:
            return
        assert self.grammars is not None, "they have made the constraints"
        refused = upload(self.grammars.refused([*constraints.values()], logits.shape[1]), logits.device)
        rows = upload(np.array([*constraints], np.int64), logits.device)
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(refused, -torch.inf))

    def _advance(self, sequence: Sequence, draw: Draw | None, *, media_consumed: bool) -> Progress:
        """Appends a token to a sequence and tells; a finished one is forgotten, and one without a token fails.

        `media_consumed` is told along with it.
        """
        if draw is None:
            for item in sequence.items:  # their features may be why: they are nobody else's
                self._encoder_cache.drop(item)
            return self._fail(sequence, OperationalError("the model gives no numbers for this request"))
        token, logprobs = draw
        if (constraint := sequence.constraint) is not None:
            # Of several ranks the first one alone asks it what may follow, which may be more than it can say.
            error = self._ranks.broadcast(str, lambda: constraint.accept(token))
            if error:
                return self._fail(sequence, InputError(f"the output can no longer be kept to its JSON schema: {error}"))
        first = sequence.num_output == 0
        if first:
            sequence.first_token_s = time.monotonic()
        sequence.append(token)
        faults.point("first-token" if first else "mid-decode")
        alone = sequence.params.max_tokens == 0  # only the prompt is scored; the drawn token is dropped
        reason, stop_token_id = ("length", None) if alone else self._finished(sequence, token)
        if reason is not None:
            self._forget(sequence)
        return Progress(
            request_id=sequence.request_id,
            token_ids=[] if alone else [token],
            logprobs=None if alone else logprobs,
            cached_tokens=sequence.num_cached if first else None,
            prompt_logprobs=sequence.prompt_logprobs if first and sequence.params.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            media_consumed=media_consumed,
            timings=sequence.timings(),
        )

    def _finished(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        params = sequence.params
        if sequence.num_output >= params.min_tokens:
            if token in params.stop_token_ids:
                return "stop", token
            if token in self._spec.eos_token_ids and not params.ignore_eos:
                return "stop", None
        return ("length" if sequence.num_output >= sequence.max_tokens else None), None

    def _consume_media(self, step: abc.Sequence[Scheduled]) -> set[Sequence]:
        """Let go of the media whose last slot a step has computed, and return the sequences to tell of."""
        consumed = set()
        for scheduled in step:
            sequence = scheduled.sequence
            if sequence.media_consumed or not sequence.items or scheduled.stop < sequence.media_stop:
                continue
            self._drop_without_digest(sequence)
            sequence.consume_media()
            consumed.add(sequence)
        if consumed:
            faults.point("consumed")
        return consumed

    def _drop_without_digest(self, sequence: Sequence) -> None:
        """Drop the features of items without a digest, whose key is a block that may come to hold something else."""
        for item in sequence.items:
            if item.digest is None:
                self._encoder_cache.drop(item)

    def _take_out(self, failed: abc.Mapping[Sequence, MindieMMError]) -> list[Progress]:
        """Park the sequences of a step whose blocks were freed because they had consumed them, and fail the others.

        Raises instead, before any is forgotten, where a device is gone for good.
        """
        if any(isinstance(error, DeviceError) for error in failed.values()):
            for device in self._devices:
                require_alive(device)
        return [
            self._park(sequence)
            if sequence.media_consumed and isinstance(error, SegmentMissing | StaleReference)
            else self._fail(sequence, error)
            for sequence, error in failed.items()
        ]

    def _park(self, sequence: Sequence) -> Progress:
        self._scheduler.park(sequence)
        faults.point("parked")
        return Progress(request_id=sequence.request_id, needs_media=True)

    def _fail(self, sequence: Sequence, error: MindieMMError) -> Progress:
        self._forget(sequence)
        return _failure(sequence.request_id, error)

    def _forget(self, sequence: Sequence) -> None:
        faults.point("forgetting")
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        self._drop_without_digest(sequence)


def _asking(sequences: abc.Sequence[Sequence]) -> dict[int, list[int]]:
    """The rows that ask for log-probabilities, by how many of the likeliest tokens they ask for."""
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if (num_top := sequence.params.logprobs) is not None:
            rows.setdefault(num_top, []).append(row)
    return rows


def generator_of(params: SamplingParams) -> torch.Generator | None:
    """What draws a request's tokens; None where it is greedy."""
    if params.greedy:
        return None
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def _failure(request_id: str, error: MindieMMError) -> Progress:
    return Progress(request_id=request_id, error=Failure.of(error))
