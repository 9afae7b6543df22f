"""The engine of decoder-only models, with a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mindie_mm.device import kind_of
from mindie_mm.engine.base import BaseEngine, Draw, generator_of
from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.kv_cache_size import block_size, fitting_context, useful_blocks
from mindie_mm.engine.cache.prefix import share
from mindie_mm.engine.decode_graphs import DecodeGraphs, captures_graphs
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.requests.engine_messages import Add, Progress, Ready
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.runner import PROMPT_ROWS, PromptRows, Runner
from mindie_mm.engine.sampler import token_logprobs
from mindie_mm.engine.scheduler import Scheduled, Scheduler
from mindie_mm.errors import ContextLengthExceeded
from mindie_mm.nn.model import Model
from mindie_mm.nn.splice import plain_ids, without_prompt_embeds
from mindie_mm.processes import faults
from mindie_mm.settings.config import EngineConfig, GiB


class Engine(BaseEngine):
    """An engine with continuous batching. Prefills of any length and decodes share one flat batch."""

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
        held = (config.kv_cache_bytes or kv_cache_bytes) // (model.spec.kv_token_bytes * size)
        blocks = BlockPool(max(1, min(held, useful_blocks(model.spec, config))), size)
        self._capacity_tokens = blocks.num_blocks * size
        num_bytes = self._capacity_tokens * model.spec.kv_token_bytes
        self._max_model_len = fitting_context(model, config, num_bytes, self._capacity_tokens, ranks)
        self._blocks = blocks
        self._head_rows = max(config.max_num_seqs, PROMPT_ROWS)
        self._prefix_caching = config.prefix_caching
        self._scheduler = Scheduler(config, blocks, self._encoder_cache, self._tower_limits)
        cache = model.spec.allocate_cache(blocks.num_blocks, blocks.block_size)
        captured = captures_graphs(kind_of(model.spec.device), config, ranks)
        self._runner = Runner(model, cache, DecodeGraphs(model, cache, config.max_num_seqs) if captured else None)

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
            kv_cache_bytes=self._capacity_tokens * spec.kv_token_bytes,
            kv_block_size=self._blocks.block_size,
            encoder_cache_tokens=self._encoder_cache.capacity_bytes // spec.feature_bytes,
        )

    def _request(self, message: Add) -> Request:
        params = message.params.check(self._model.spec.vocab_size)
        ids = np.frombuffer(message.input_ids, dtype=np.int64)
        left_tokens = self._max_model_len - len(ids)
        if left_tokens < params.least_room or len(ids) == 0:
            detail = (
                f"the prompt has {len(ids)} tokens and the request needs {params.least_room} output tokens. "
                "Shorten the prompt, which must have at least 1 token, or lower max_tokens"
            )
            raise ContextLengthExceeded.of(left_tokens + len(ids), detail)
        items = self._read(ids)
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
            asked_s=message.asked_s,
        )
        if self._prefix_caching:
            share(request, self._model)
        return request

    def _run(self, step: Sequence[Scheduled], progress: list[Progress]) -> None:
        features, failed = self._towers.encode(step)
        progress += self._take_out(failed)
        step = [scheduled for scheduled in step if scheduled.request not in failed]
        if not step:
            return
        logits = self._runner.forward(step, features)
        self._towers.fetch(self._scheduler.coming())
        if not all(scheduled.samples for scheduled in step):
            faults.point("mid-prefill")
        for rows in logits.prompts:
            self._collect_prompt_logprobs(rows)
        sampling = [scheduled.request for scheduled in step if scheduled.samples]
        # Rank 0 draws for all ranks, because a request without a seed gets a different random seed on each rank.
        draws = self._ranks.broadcast(list[Draw | None], lambda: self._draw(logits.sampled, sampling))
        # Publish the KV blocks only after the tokens have arrived, because a device reports a failure late. Do not
        # share KV blocks that contain non-finite values with other requests.
        non_finite = {request for request, draw in zip(sampling, draws, strict=True) if draw is None}
        self._scheduler.computed([scheduled for scheduled in step if scheduled.request not in non_finite])
        for request in non_finite:  # an earlier step may have published its first KV blocks
            self._blocks.forget(request.kv_blocks)
        consumed = self._consume_media(step)
        for request in consumed.difference(sampling):
            update = Progress(request_id=request.request_id, media_consumed=True, origin=request.origin)
            progress.append(update)
        for request, draw in zip(sampling, draws, strict=True):
            update = self._advance(request, draw, media_consumed=request in consumed)
            progress.append(update)  # one by one, so that a later failure does not lose earlier results

    @torch.inference_mode()
    def _collect_prompt_logprobs(self, rows: PromptRows) -> None:
        """Compute log-probabilities of prompt rows in pieces that fit in the memory reserved at start-up."""
        request, start = rows.request, rows.start
        for states in rows.states.split(self._head_rows):
            token_ids = request.token_ids[start : start + len(states)]
            logits = self._model.head(states)
            request.prompt_logprobs += token_logprobs(logits, token_ids, request.params.prompt_logprobs or 0)
            start += len(states)
