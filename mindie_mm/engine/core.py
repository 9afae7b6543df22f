"""The engine of decoder-only models, with a paged KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import Download, kind_of, upload
from mindie_mm.engine.base import BaseEngine, generator_of
from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.kv_cache_size import block_size, cache_sizes, fitting_context, useful_bytes
from mindie_mm.engine.cache.prefix import share
from mindie_mm.engine.cache.state_pool import StatePool
from mindie_mm.engine.decode_graphs import DecodeGraphs, captures_graphs
from mindie_mm.engine.draws import Draws
from mindie_mm.engine.prompt_lookup import MOST_GUESSES
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.requests.engine_messages import Add, Progress, Ready
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.runner import PROMPT_ROWS, PromptRows, Runner, StepLogits
from mindie_mm.engine.sampler import token_logprobs
from mindie_mm.engine.scheduler import Scheduled, Scheduler
from mindie_mm.errors import ContextLengthExceeded, InputError
from mindie_mm.nn.model import Model
from mindie_mm.nn.splice import plain_ids, without_prompt_embeds
from mindie_mm.processes import faults
from mindie_mm.settings.config import EngineConfig, GiB

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A step whose tokens have been drawn, but may not have arrived on the host yet."""

    step: Sequence[Scheduled]
    requests: Sequence[Request]
    """Requests that get a token."""
    draws: Draws
    pooling: Sequence[Request]
    """Requests that end with their pooled states."""
    pooled: Download
    """The pooled states, float32 [requests, hidden], if there are any."""


class Engine(BaseEngine):
    """An engine with continuous batching. Prefills of any length and decodes share one flat batch.

    On an accelerator, each step is scheduled and launched before the tokens of the previous step have arrived. A
    request that turns out to have ended with these tokens is computed once more, and its result is dropped.
    """

    _scheduler: Scheduler

    def __init__(self, model: Model, config: EngineConfig, kv_cache_bytes: int = GiB, ranks: Ranks = ALONE) -> None:
        """Allocate the KV cache.

        Args:
            model: Loaded model.
            config: Settings of the engine.
            kv_cache_bytes: Size of the KV cache in bytes if `config.kv_cache_bytes` is not set.
            ranks: Processes that run the same steps. Each process has a share of the weights.

        Raises:
            DeviceError: The KV cache is too small for `config.max_model_len` tokens, or for a single token.

        """
        super().__init__(model, config, ranks)
        self._model = model
        size = block_size(model.spec, config)
        num_bytes = min(config.kv_cache_bytes or kv_cache_bytes, useful_bytes(model, config))
        num_blocks, num_slots = cache_sizes(model.spec, config, num_bytes)
        blocks = BlockPool(num_blocks, size)
        self._capacity_tokens = num_blocks * size
        # A restarted engine gets this number, and must divide it in the same way.
        self._cache_bytes = num_bytes if num_slots else self._capacity_tokens * model.spec.kv_token_bytes
        self._max_model_len = fitting_context(model, config, self._cache_bytes, self._capacity_tokens, ranks)
        if 0 < num_slots < config.max_num_seqs and ranks.number == 0:
            _log.warning(
                "the cache has room for the states of %d requests, so that at most %d run at the same time; "
                "max_num_seqs is %d. Raise memory_share or kv_cache_bytes, or lower max_num_seqs",
                num_slots,
                num_slots,
                config.max_num_seqs,
            )
        self._blocks = blocks
        self._head_rows = max(config.max_num_seqs, PROMPT_ROWS)
        self._prefix_caching = config.prefix_caching
        states = StatePool(num_slots) if num_slots else None
        cache = model.spec.allocate_cache(blocks.num_blocks, blocks.block_size, num_slots)
        device = kind_of(model.spec.device)
        captured = captures_graphs(device, config)
        overlaps = device.is_asynchronous and config.async_scheduling
        guesses = self._num_guesses(config, waits=not overlaps and not captured)
        self._scheduler = Scheduler(
            config, blocks, self._encoder_cache, self._tower_limits, states, guesses, device.cheap_rows
        )
        # The tokens that guesses depend on must have arrived on the host.
        self._is_asynchronous = overlaps and not guesses
        self._drawn: _Drawn | None = None
        self._runner = Runner(
            model, cache, DecodeGraphs(model, cache, config.max_num_seqs, ranks) if captured else None
        )

    def _num_guesses(self, config: EngineConfig, *, waits: bool) -> int:
        """Return the maximum number of guesses of a request in one step.

        `waits` is true if the engine waits for each operator of a step, as on the CPU. If it is false, the default is
        0, because guesses need the tokens of the step before on the host.
        """
        number = config.num_speculative_tokens
        if self._model.spec.state_bytes:
            if self._ranks.number == 0 and number != 0:
                level = logging.INFO if number is None else logging.WARNING
                _log.log(level, "no tokens are guessed, because states of recurrent layers cannot be undone")
            return 0
        if number is None:
            return MOST_GUESSES if waits else 0
        return number

    @property
    def ready(self) -> Ready:
        spec = self._model.spec
        return Ready(
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_model_len=self._max_model_len,
            device=str(spec.device),
            dtype=str(spec.dtype).removeprefix("torch."),
            kv_cache_tokens=self._capacity_tokens,
            kv_cache_bytes=self._cache_bytes,
            kv_block_size=self._blocks.block_size,
            encoder_cache_tokens=self._encoder_cache.capacity_bytes // spec.feature_bytes,
            hidden_size=spec.hidden_size,
            has_head=spec.has_head,
        )

    def _request(self, message: Add) -> Request:
        params = message.params.check(self._model.spec.vocab_size)
        if params.pooling is None and not self._model.spec.has_head:
            raise InputError(
                "this checkpoint has no output layer (lm_head), so it generates no text; it only computes embeddings "
                "(/v1/embeddings, LLM.embed)"
            )
        ids = np.frombuffer(message.input_ids, dtype=np.int64)
        left_tokens = self._max_model_len - len(ids)
        if left_tokens < params.least_room or len(ids) == 0:
            detail = (
                f"the prompt has {len(ids)} tokens and the request needs {params.least_room} output tokens. "
                "Shorten the prompt, which must have at least 1 token, or lower max_tokens"
            )
            raise ContextLengthExceeded.of(left_tokens + len(ids), detail)
        adapter = self._adapter_of(params)
        items = self._read(ids)
        if adapter is not None and adapter.in_tower:
            items = [replace(item, lora=adapter.key) for item in items]
        media = without_prompt_embeds(items)
        request = Request(
            request_id=message.request_id,
            params=params,
            token_ids=plain_ids(ids, items).tolist(),
            num_prompt=len(ids),
            items=items,
            prompt_positions=self._model.positions(len(ids), media),
            span_ids=self._model.bidirectional_spans(len(ids), media),
            max_tokens=params.most_tokens(left_tokens),
            generator=generator_of(params),
            adapter=adapter,
            asked_s=message.asked_s,
        )
        if self._prefix_caching:
            share(request)
        return request

    @property
    def _unfinished(self) -> Sequence[Scheduled]:
        return () if self._drawn is None else self._drawn.step

    def _lost(self) -> Sequence[Scheduled]:
        unfinished, self._drawn = self._unfinished, None
        return unfinished

    def has_work(self) -> bool:
        return self._drawn is not None or super().has_work()

    def _run(self, step: Sequence[Scheduled], progress: list[Progress]) -> None:
        # With asynchronous scheduling, the device already computes this step while the host handles the results of the
        # step before. Its tokens are drawn afterwards, because grammars and penalties depend on these results.
        try:
            step, logits = self._launch(step, progress)
        finally:
            if self._is_asynchronous:
                self._finish(progress)
        if logits is not None:
            self._drawn = self._draw_step(step, logits)
        if not self._is_asynchronous:
            self._finish(progress)
            if logits is not None:
                self._draw_guessed(step, logits.guessed, progress)

    def _launch(
        self, step: Sequence[Scheduled], progress: list[Progress]
    ) -> tuple[Sequence[Scheduled], StepLogits | None]:
        """Queue the computation of a step on the device. Return the step without the requests whose media failed."""
        features, failed = self._towers.encode(step)
        progress += self._take_out(failed)
        step = [scheduled for scheduled in step if scheduled.request not in failed]
        if not step:
            return (), None
        logits = self._runner.forward(step, features, None if self._drawn is None else self._drawn.draws)
        self._towers.fetch(self._scheduler.coming())
        if not all(scheduled.ends for scheduled in step):
            faults.point("mid-prefill")
        return step, logits

    def _draw_step(self, step: Sequence[Scheduled], logits: StepLogits) -> _Drawn:
        """Draw the next tokens of a step, without the requests that have ended since it was launched."""
        for rows in logits.prompts:
            if self._runs(rows.request):
                self._collect_prompt_logprobs(rows)
        for request, states in logits.pooled:
            request.pool(states)
        sampling = [scheduled.request for scheduled in step if scheduled.samples]
        left = [row for row, request in enumerate(sampling) if self._runs(request)]
        sampled, settings = logits.sampled, logits.settings
        if len(left) < len(sampling):
            sampled = sampled.index_select(0, upload(np.array(left, np.int64), sampled.device))
            sampling = [sampling[row] for row in left]
            settings = None if settings is None else settings.of_rows(left)
        draws = self._draw(sampled, sampling, settings)
        step = [one for one in step if self._runs(one.request)]
        pooling = [one.request for one in step if one.ends and one.request.params.pooling is not None]
        for request in (*sampling, *pooling):
            request.awaits_token = True
        return _Drawn(step, sampling, draws, pooling, self._pooled(pooling))

    def _pooled(self, requests: Sequence[Request]) -> Download:
        """Begin the download of the pooled states of requests that end."""
        if not requests:
            return Download()
        pooled = torch.stack([one.pooled / one.num_pooled for one in requests if one.pooled is not None])
        self._ranks.broadcast_tensor(pooled)  # so that all ranks agree on whether the values are finite
        return Download(pooled)

    def _draw_guessed(self, step: Sequence[Scheduled], logits: Tensor, progress: list[Progress]) -> None:
        """Draw the tokens after the guesses that were drawn. Drop the results of all other guesses.

        Each round handles one guess of each request in the same way as a step of decodes. Random numbers, grammars and
        penalties are therefore the same as without guesses.

        Args:
            step: The step, whose first tokens have been drawn.
            logits: See `StepLogits.guessed`.
            progress: See `_run`.

        """
        guessed = [scheduled for scheduled in step if scheduled.guesses]
        rows = accumulate((len(scheduled.guesses) for scheduled in guessed), initial=0)
        left = list(zip(guessed, rows, strict=False))
        number = 0
        while left := [(one, row) for one, row in left if self._is_drawn(one, number)]:
            decodes = [self._scheduler.accept(one.request) for one, _ in left]
            places = upload(np.array([row + number for _, row in left], np.int64), logits.device)
            one_each = logits.index_select(0, places)
            self._drawn = self._draw_step(decodes, StepLogits(one_each, one_each[:0], [], []))
            self._finish(progress)
            number += 1

    def _is_drawn(self, scheduled: Scheduled, number: int) -> bool:
        """Return whether a guess is the last token of a request that continues."""
        request, guesses = scheduled.request, scheduled.guesses
        return number < len(guesses) and self._runs(request) and request.token_ids[-1] == guesses[number]

    def _finish(self, progress: list[Progress]) -> None:
        """Wait for the tokens of the step that was drawn last, and advance its requests."""
        if self._drawn is None:
            return
        drawn, draws = self._drawn, dict(zip(self._drawn.requests, self._drawn.draws.wait(), strict=True))
        pooled: dict[Request, Tensor] = {}
        if drawn.pooling:
            (states,) = drawn.pooled.wait()
            pooled = dict(zip(drawn.pooling, states, strict=True))
        self._drawn = None
        # Publish the KV blocks only after the tokens have arrived, because a device reports a failure late. Do not
        # share KV blocks that contain non-finite values with other requests.
        non_finite = {request for request, draw in draws.items() if draw is None}
        non_finite |= {request for request, state in pooled.items() if not state.isfinite().all()}
        # Requests may have been aborted or preempted since the step was launched.
        step = [scheduled for scheduled in drawn.step if self._runs(scheduled.request)]
        self._scheduler.computed([scheduled for scheduled in step if scheduled.request not in non_finite])
        for request in non_finite:  # an earlier step may have published its first KV blocks
            self._scheduler.forget(request)
        draws = {request: draw for request, draw in draws.items() if self._runs(request)}
        pooled = {request: state for request, state in pooled.items() if self._runs(request)}
        # A preempted request may need its media again.
        consumed = self._consume_media([one for one in step if one.stop <= one.request.num_computed])
        for request in consumed.difference(draws, pooled):
            update = Progress(request_id=request.request_id, media_consumed=True, origin=request.origin)
            progress.append(update)
        for request, draw in draws.items():
            request.awaits_token = False
            update = self._advance(request, draw, media_consumed=request in consumed)
            progress.append(update)  # one by one, so that a later failure does not lose earlier results
        for request, state in pooled.items():
            media_consumed = request in consumed
            progress.append(self._end_pooling(request, None if request in non_finite else state, media_consumed))

    def _end_pooling(self, request: Request, state: Tensor | None, media_consumed: bool) -> Progress:
        """Remove a request whose states are pooled, and return its result. If `state` is None, the request fails."""
        request.awaits_token = False
        if state is None:
            return self._fail_non_finite(request)
        request.first_token_s = time.monotonic()
        faults.point("first-token")
        self._forget(request)
        return Progress(
            request_id=request.request_id,
            pooled=state.numpy().tobytes(),
            cached_tokens=request.num_cached,
            origin=request.origin,
            finish_reason="stop",
            media_consumed=media_consumed,
            timings=request.timings(),
        )

    def _runs(self, request: Request) -> bool:
        """Return whether a request has not ended. Another request may have taken its id."""
        return self._requests.get(request.request_id) is request

    @torch.inference_mode()
    def _collect_prompt_logprobs(self, rows: PromptRows) -> None:
        """Compute log-probabilities of prompt rows in pieces that fit in the memory reserved at start-up."""
        request, start = rows.request, rows.start
        for states in rows.states.split(self._head_rows):
            token_ids = request.token_ids[start : start + len(states)]
            with self._model.adapted([(request.adapter, len(states))]):
                logits = self._model.head(states)
            request.prompt_logprobs += token_logprobs(logits, token_ids, request.params.prompt_logprobs or 0)
            start += len(states)
