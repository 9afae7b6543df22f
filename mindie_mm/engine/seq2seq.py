"""The engine of encoder-decoder models. It encodes whole prompts, and each answer has its own KV cache.

Positions of an answer start at 0, and attention within a prompt is bidirectional. Requests therefore share neither KV
blocks nor prefixes. A request reserves the memory for its maximum length when it starts, so it is never preempted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mindie_mm.engine.base import BaseEngine, generator_of
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.cache.kv_cache_size import context_length, fitting_context, useful_bytes
from mindie_mm.engine.requests.engine_messages import Add, FinishReason, Progress, Ready
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.scheduler import BaseScheduler, Scheduled, TowerBudget, TowerLimits
from mindie_mm.engine.towers import Features
from mindie_mm.errors import ContextLengthExceeded, DeviceError, InputError
from mindie_mm.nn.model import Positions
from mindie_mm.nn.seq2seq import Decoding, Seq2SeqModel
from mindie_mm.nn.splice import Splice, plain_ids
from mindie_mm.processes import faults
from mindie_mm.settings.config import EngineConfig, GiB

_log = logging.getLogger(__name__)


class Seq2SeqScheduler(BaseScheduler):
    """A scheduler that runs as many requests as fit in `kv_bytes` at their maximum lengths."""

    def __init__(
        self, model: Seq2SeqModel, config: EngineConfig, encoder_cache: EncoderCache, limits: TowerLimits, kv_bytes: int
    ) -> None:
        """Create an empty scheduler. `kv_bytes` is the memory for the keys and values of all requests."""
        super().__init__(config, encoder_cache, limits)
        self.kv_bytes = kv_bytes
        self._used = 0  # bytes reserved for running requests
        self._prompt_token_bytes = model.prompt_token_bytes
        self._output_token_bytes = model.spec.kv_token_bytes

    @property
    def usage(self) -> float:
        return self._used / self.kv_bytes

    def schedule(self, unfinished: Sequence[Scheduled] = ()) -> list[Scheduled]:
        """Return a step with the next token of each running request and the whole prompts of new requests."""
        step = [Scheduled(request, request.num_tokens - 1, request.num_tokens) for request in self.running]
        tokens, tower = self._config.max_num_batched_tokens, TowerBudget(self._tower_limits)
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            num_bytes = self.num_bytes(request.num_prompt, request.max_tokens)
            # Prompts are never split, so the first prompt of a step may exceed the budgets.
            first = tokens == self._config.max_num_batched_tokens
            items = [item for item in request.items if item not in self._encoder_cache]
            fits = request.num_prompt <= tokens and tower.num_fitting(items) == len(items)
            if self._used + num_bytes > self.kv_bytes or not (first or fits):
                break
            for item in items:
                tower.take(item)
            tokens -= request.num_prompt
            self._used += num_bytes
            request.scheduled_s = time.monotonic()
            self.running.append(self.waiting.popleft())
            step.append(Scheduled(request, 0, request.num_prompt))
        return step

    def num_bytes(self, num_prompt: int, max_tokens: int) -> int:
        """Return the maximum memory in bytes that a request needs."""
        return num_prompt * self._prompt_token_bytes + max_tokens * self._output_token_bytes

    def _free(self, request: Request) -> None:
        self._used -= self.num_bytes(request.num_prompt, request.max_tokens)

    @property
    def longest_prompt(self) -> int:
        """Maximum prompt length in tokens that fits into `kv_bytes` with an answer of one token."""
        return (self.kv_bytes - self._output_token_bytes) // self._prompt_token_bytes

    def longest_output(self, num_prompt: int) -> int:
        """Return the maximum number of answer tokens for a prompt length. It is below 1 if the prompt is too long."""
        return (self.kv_bytes - num_prompt * self._prompt_token_bytes) // self._output_token_bytes


class Seq2SeqEngine(BaseEngine):
    """An engine with continuous batching of answers. Each answer is decoded alone, unaffected by other answers."""

    _scheduler: Seq2SeqScheduler

    def __init__(self, model: Seq2SeqModel, config: EngineConfig, kv_cache_bytes: int = GiB) -> None:
        """Prepare the scheduler.

        Args:
            model: Loaded model.
            config: Settings of the engine.
            kv_cache_bytes: Memory in bytes for all requests if `config.kv_cache_bytes` is not set.

        Raises:
            DeviceError: The memory is too small for `config.max_model_len` tokens, or for a single token.

        """
        super().__init__(model, config)
        self._model = model
        self._max_len = context_length(model.spec, config)
        kv_bytes = min(config.kv_cache_bytes or kv_cache_bytes, useful_bytes(model, config))
        # This assumes that prompt and answer have the same length. One can be longer if the other is shorter.
        fitting_context(model, config, kv_bytes, kv_bytes // (model.prompt_token_bytes + model.spec.kv_token_bytes))
        self._scheduler = Seq2SeqScheduler(model, config, self._encoder_cache, self._tower_limits, kv_bytes)
        self._decodings: dict[Request, Decoding] = {}
        if config.num_speculative_tokens:
            _log.warning("num_speculative_tokens has no effect for an encoder-decoder model")

    @property
    def ready(self) -> Ready:
        return Ready(
            vocab_size=self._spec.vocab_size,
            eos_token_ids=self._spec.eos_token_ids,
            max_model_len=min(self._max_len, self._scheduler.longest_prompt),
            max_output_len=self._longest_output(1),
            device=str(self._spec.device),
            dtype=str(self._spec.dtype).removeprefix("torch."),
            kv_cache_tokens=self._scheduler.kv_bytes // self._model.prompt_token_bytes,
            kv_cache_bytes=self._scheduler.kv_bytes,
            kv_block_size=1,
            encoder_cache_tokens=self._encoder_cache.capacity_bytes // self._spec.feature_bytes,
        )

    def _request(self, message: Add) -> Request:
        params = message.params.check(self._spec.vocab_size)
        if params.prompt_logprobs is not None:
            raise InputError(
                f"prompt_logprobs is {params.prompt_logprobs}, but this model is an encoder-decoder, which "
                "does not predict prompt tokens; leave prompt_logprobs out"
            )
        if params.pooling is not None:
            raise InputError(
                "this model is an encoder-decoder, whose hidden states are not pooled; embeddings and scores need a "
                "decoder-only model"
            )
        ids = np.frombuffer(message.input_ids, dtype=np.int64)
        most, wanted = self._longest_output(len(ids)), max(params.least_room, 1)
        if not 0 < len(ids) <= self._max_len or wanted > most:
            raise ContextLengthExceeded.of(
                self._max_len,
                f"the prompt has {len(ids)} tokens and the request needs {wanted} output tokens. This "
                f"encoder-decoder model generates at most {max(most, 0)} tokens for a prompt of this length. "
                "The prompt must have at least 1 token",
            )
        items = self._read(ids)
        return Request(
            request_id=message.request_id,
            params=params,
            token_ids=plain_ids(ids, items).tolist(),
            num_prompt=len(ids),
            items=items,
            prompt_positions=Positions(torch.arange(len(ids)).unsqueeze(0)),
            span_ids=None,
            max_tokens=max(params.most_tokens(most), 1),
            generator=generator_of(params),
            asked_s=message.asked_s,
            num_cached=0,
        )

    def _longest_output(self, num_prompt: int) -> int:
        limits = self._scheduler.longest_output(num_prompt), self._model.longest_output(num_prompt)
        return min(self._max_len, *limits)

    def _run(self, step: Sequence[Scheduled], progress: list[Progress]) -> None:
        features, failed = self._towers.encode(step)
        rows: dict[Request, Tensor] = {}
        for scheduled in step:
            request = scheduled.request
            if request in failed:
                continue
            try:
                rows[request] = self._next_logits(request, features)
            except Exception as error:  # noqa: BLE001 - each request runs alone, and so fails alone
                _log.exception("request %s failed with an unexpected error", request.request_id)
                failed[request] = DeviceError(f"the step failed: {type(error).__name__}")
        progress += self._take_out(failed)
        if not rows:
            return
        self._towers.fetch(self._scheduler.coming())
        draws = self._draw(torch.cat([*rows.values()]), [*rows]).wait()
        consumed = self._consume_media([scheduled for scheduled in step if scheduled.request in rows])
        for request, draw in zip(rows, draws, strict=True):
            update = self._advance(request, draw, media_consumed=request in consumed)
            progress.append(update)  # one by one, so that a later failure does not lose earlier results

    def _next_logits(self, request: Request, features: Features) -> Tensor:
        """Return the logits of the next token, float32 [1, vocabulary]."""
        if (decoding := self._decodings.get(request)) is not None:
            return self._model.decode(decoding, request.token_ids[-1:])
        splices = [Splice(item.slots, features[item.key]) for item in request.items]
        prompt = torch.from_numpy(request.ids(0, request.num_prompt))
        decoding = self._decodings[request] = self._model.encode_prompt(prompt, splices)
        faults.point("mid-prefill")
        first = self._model.beginning(decoding, request.token_ids[: request.num_prompt])
        if (
            request.params.repetition_penalty != 1
        ):  # as in transformers, it penalizes the decoder's input, not the prompt
            request.unique_prompt_ids = np.unique(np.array(first, np.int64))
        return self._model.decode(decoding, [*first, *request.output_ids])[-1:]

    def _constrain(self, logits: Tensor, requests: Sequence[Request]) -> bool:
        for row, request in zip(logits, requests, strict=True):
            last = request.num_output + 1 == request.max_tokens and self._forces_eos(request)
            prompt_ids = request.token_ids[: request.num_prompt]
            self._model.constrain(row, prompt_ids, request.output_ids, last=last)
        super()._constrain(logits, requests)
        return True

    def _finished(self, request: Request, token: int) -> tuple[FinishReason | None, int | None]:
        if request.num_output == request.max_tokens and self._forces_eos(request):
            return "length", None  # the last token was forced, so the model has not ended the answer itself
        return super()._finished(request, token)

    def _forces_eos(self, request: Request) -> bool:
        """Return whether an answer that reaches `max_tokens` must end with an end-of-sequence token."""
        params = request.params
        return bool(self._model.rules.forced_eos_token_ids) and not (
            params.ignore_eos or params.min_tokens >= request.max_tokens
        )

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._decodings.pop(request, None)
