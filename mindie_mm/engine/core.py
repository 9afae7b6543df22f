"""The engine's loop body: schedule, run, sample, tell. One thread, no I/O: the process around it moves messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Step

import numpy as np
import torch

from mindie_mm import faults
from mindie_mm.config import EngineConfig, GiB
from mindie_mm.engine.block_pool import BlockPool
from mindie_mm.engine.encoder_cache import EncoderCache
from mindie_mm.engine.messages import Abort, Add, Progress, Ready, Stats, Stepped, TokenLogprob
from mindie_mm.engine.prefix import share
from mindie_mm.engine.room import context_length, useful_blocks
from mindie_mm.engine.runner import PromptRows, Runner
from mindie_mm.engine.sampler import sample, token_logprobs
from mindie_mm.engine.scheduler import Scheduled, Scheduler
from mindie_mm.engine.sequence import Sequence
from mindie_mm.engine.tower_budget import TowerLimits
from mindie_mm.errors import ContextLengthExceeded, DeviceError, MindieMMError, TokenOutOfRange, WorldError, error_name
from mindie_mm.nn.model import Model
from mindie_mm.nn.splice import plain_ids

_log = logging.getLogger(__name__)


class Engine:
    """Requests in, progress out. A request that fails, fails alone."""

    def __init__(self, model: Model, config: EngineConfig, kv_cache_bytes: int = GiB) -> None:
        """`kv_cache_bytes` is the room for the KV cache where the configuration leaves it open."""
        self._model = model
        self._max_model_len = context_length(model.spec, config)
        held = (config.kv_cache_bytes or kv_cache_bytes) // (model.spec.kv_token_bytes * config.kv_block_size)
        blocks = BlockPool(max(1, min(held, useful_blocks(model.spec, config))), config.kv_block_size)
        self._capacity_tokens = blocks.num_blocks * blocks.block_size
        self._blocks = blocks
        self._prefix_caching = config.prefix_caching
        self._encoder_cache = EncoderCache(config.encoder_cache_bytes)
        limits = TowerLimits(config.max_tower_tokens, config.max_tower_bytes, model.spec.feature_bytes)
        self._scheduler = Scheduler(config, blocks, self._encoder_cache, limits)
        cache = model.allocate_cache(blocks.num_blocks, blocks.block_size)
        self._runner = Runner(model, cache, self._encoder_cache, limits)
        self._sequences: dict[str, Sequence] = {}

    @property
    def ready(self) -> Ready:
        """What the clients must know."""
        spec = self._model.spec
        return Ready(
            vocab_size=spec.vocab_size,
            max_model_len=min(self._max_model_len, self._capacity_tokens),
            device=str(spec.device),
            kv_cache_tokens=self._capacity_tokens,
        )

    @property
    def stats(self) -> Stats:
        """Gauges of this moment."""
        return Stats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_cache_usage=self._blocks.usage,
            encoder_cache_queries=self._encoder_cache.queries,
            encoder_cache_hits=self._encoder_cache.hits,
            prefix_cache_queries=self._scheduler.prefix_queries,
            prefix_cache_hits=self._scheduler.prefix_hits,
            preemptions=self._scheduler.preemptions,
        )

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def add(self, message: Add) -> Progress | None:
        """Queues a request; what is wrong with it comes back at once."""
        try:
            sequence = self._sequence(message)
        except MindieMMError as error:
            return _failure(message.request_id, error)
        except Exception as error:  # noqa: BLE001 - a request that cannot be read must not end the others
            _log.exception("request %s", message.request_id)
            return _failure(message.request_id, WorldError(f"the request failed: {type(error).__name__}"))
        self._encoder_cache.count(list(sequence.items))
        self._sequences[message.request_id] = sequence
        self._scheduler.add(sequence)
        return None

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
        except Exception as error:  # noqa: BLE001 - whatever a device or a kernel raises must not end the other requests
            _log.exception("a step of %d requests failed", len(step))
            failure = DeviceError(f"the step failed: {type(error).__name__}")
            progress += [self._fail(s.sequence, failure) for s in step if s.sequence.request_id in self._sequences]
        return Stepped(progress, self.stats)

    def _sequence(self, message: Add) -> Sequence:
        params = message.params.check(self._model.spec.vocab_size)
        ids = np.frombuffer(message.input_ids, dtype=np.int64)
        room = min(self._max_model_len, self._capacity_tokens) - len(ids)
        if room < max(params.max_tokens or 1, 1) or len(ids) == 0:
            raise ContextLengthExceeded(
                f"{len(ids)} prompt tokens and {params.max_tokens or 1} to generate, "
                f"the context holds {room + len(ids)} and a prompt at least one"
            )
        known = self._model.spec.embedding_size or self._model.spec.vocab_size
        if (top := int(ids.max())) >= known:
            raise TokenOutOfRange(f"token id {top} is not in [0, {known})")
        items = self._model.read(ids)
        faults.point("attached")
        generator = None
        if not params.greedy:
            generator = torch.Generator()
            if params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(params.seed)
        sequence = Sequence(
            request_id=message.request_id,
            params=params,
            token_ids=plain_ids(ids, items).tolist(),
            num_prompt=len(ids),
            items=items,
            prompt_positions=self._model.positions(len(ids), items),
            groups=self._model.attention_groups(len(ids), items),
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            generator=generator,
        )
        if self._prefix_caching:
            share(sequence, self._model)
        return sequence

    def _run(self, step: Step[Scheduled], progress: list[Progress]) -> None:
        """Computes a step, and adds its news to `progress`, so that none is lost should a later part fail."""
        features, failed = self._runner.encode(step)
        progress += [self._fail(sequence, error) for sequence, error in failed.items()]
        step = [scheduled for scheduled in step if scheduled.sequence not in failed]
        if not step:
            return
        logits = self._runner.forward(step, features)
        if not all(scheduled.samples for scheduled in step):
            faults.point("mid-prefill")
        for rows in logits.prompts:
            _collect_prompt_logprobs(rows)
        sampling = [scheduled.sequence for scheduled in step if scheduled.samples]
        # Sampling biases the logits in place; log-probabilities are of the model's own.
        raw = {
            i: logits.sampled[i : i + 1].clone()
            for i, sequence in enumerate(sampling)
            if sequence.params.logprobs is not None
        }
        tokens = sample(logits.sampled, sampling, self._model.spec.eos_token_ids)
        self._scheduler.computed(step)  # not before the tokens are here: a device tells late that it failed
        logprobs = {i: token_logprobs(row, [tokens[i]], sampling[i].params.logprobs or 0) for i, row in raw.items()}
        progress += [
            self._advance(sequence, token, logprobs.get(i))
            for i, (sequence, token) in enumerate(zip(sampling, tokens, strict=True))
        ]

    def _advance(self, sequence: Sequence, token: int, logprobs: list[TokenLogprob] | None) -> Progress:
        """Appends a token to a sequence and tells; a finished one is forgotten."""
        first = sequence.num_output == 0
        if first:
            sequence.first_token_s = time.monotonic()
        sequence.token_ids.append(token)
        faults.point("first-token" if first else "mid-decode")
        reason, stop_token_id = self._finished(sequence, token)
        if reason is not None:
            self._forget(sequence)
        return Progress(
            request_id=sequence.request_id,
            token_ids=[token],
            logprobs=logprobs,
            cached_tokens=sequence.num_cached if first else None,
            prompt_logprobs=sequence.prompt_logprobs if first and sequence.params.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            timings=sequence.timings() if reason is not None else None,
        )

    def _finished(self, sequence: Sequence, token: int) -> tuple[str | None, int | None]:
        params = sequence.params
        if sequence.num_output >= params.min_tokens:
            if token in params.stop_token_ids:
                return "stop", token
            if token in self._model.spec.eos_token_ids and not params.ignore_eos:
                return "stop", None
        return ("length" if sequence.num_output >= sequence.max_tokens else None), None

    def _fail(self, sequence: Sequence, error: MindieMMError) -> Progress:
        self._forget(sequence)
        return _failure(sequence.request_id, error)

    def _forget(self, sequence: Sequence) -> None:
        faults.point("forgetting")
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        for item in sequence.items:
            if item.digest is None:
                self._encoder_cache.drop(item)


def _collect_prompt_logprobs(rows: PromptRows) -> None:
    sequence, count = rows.sequence, rows.logits.shape[0]
    token_ids = sequence.token_ids[rows.start : rows.start + count]
    sequence.prompt_logprobs += token_logprobs(rows.logits, token_ids, sequence.params.prompt_logprobs or 0)


def _failure(request_id: str, error: MindieMMError) -> Progress:
    return Progress(request_id=request_id, error=(error_name(error), str(error)))
