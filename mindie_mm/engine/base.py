"""Base class of the engines. An engine is single-threaded and does no I/O. The engine process does the I/O."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.device import require_alive, upload
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.draws import NO_TOKEN, Draw, Draws, draw
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.requests.engine_messages import (
    Abort,
    Add,
    Encode,
    FinishReason,
    KeepLoras,
    LoadLora,
    Origin,
    Progress,
    Ready,
    Stats,
    Stepped,
)
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.sampler import DRAWS_PER_TOKEN, RowSettings
from mindie_mm.engine.scheduler import BaseScheduler, Scheduled, TowerLimits
from mindie_mm.engine.sent_features import sendable
from mindie_mm.engine.towers import Towers
from mindie_mm.errors import (
    ContextLengthExceeded,
    CorruptReference,
    DeviceError,
    InputError,
    MindieMMError,
    OperationalError,
    TokenOutOfRange,
    WeightsChanged,
    without_frames,
)
from mindie_mm.nn.lora.adapter import Adapter
from mindie_mm.nn.lora.loras import Loras
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.placement import devices_of
from mindie_mm.nn.splice import MediaItem
from mindie_mm.processes import faults
from mindie_mm.processes.ipc import Failure
from mindie_mm.settings.config import EngineConfig
from mindie_mm.structured.grammar import Constraint, Grammars
from mindie_mm.structured.outputs import StructuredOutputs

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BaseEngine(ABC):
    """An engine that runs requests in steps. A request that fails does not affect other requests."""

    _scheduler: BaseScheduler

    def __init__(self, model: MediaModel, config: EngineConfig, ranks: Ranks = ALONE) -> None:
        """Prepare the caches and the towers.

        Args:
            model: Loaded model.
            config: Settings of the engine.
            ranks: Processes that run the same steps. Each process has a share of the weights.

        """
        self._media_model = model
        self._spec = model.spec
        self._devices = devices_of(model)
        self._ranks = ranks
        self._encoder_cache = EncoderCache(config.encoder_cache_bytes)
        self._tower_limits = TowerLimits(config.max_tower_tokens, config.max_tower_bytes, model.spec.feature_bytes)
        by_item = config.tower_parallel == "items"
        self._towers = Towers(model, self._encoder_cache, self._tower_limits, ranks, by_item=by_item)
        self._requests: dict[str, Request] = {}
        self.grammars: Grammars | None = None
        """Compiler of structured outputs. If it is None, requests for structured outputs are refused."""
        self.weights = b""
        """See `Origin.weights`."""
        self.lora_keys: dict[str, str] = {}
        """See `Ready.lora_keys`."""

    @property
    @abstractmethod
    def ready(self) -> Ready:
        """Message that tells the client the limits of the model."""

    @property
    def stats(self) -> Stats:
        """Current gauges."""
        scheduler, encoder_cache = self._scheduler, self._encoder_cache
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.usage,
            encoder_cache_queries=encoder_cache.queries,
            encoder_cache_hits=encoder_cache.hits,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            drafts=scheduler.drafts,
            draft_tokens=scheduler.draft_tokens,
            accepted_tokens=scheduler.accepted_tokens,
        )

    @abstractmethod
    def _request(self, message: Add) -> Request:
        """Create a request from its message. Raise a MindieMMError if the request is invalid."""

    @abstractmethod
    def _run(self, step: Sequence[Scheduled], progress: list[Progress]) -> None:
        """Compute a step. Append each result to `progress` immediately, so that a later failure does not lose it."""

    @property
    def _unfinished(self) -> Sequence[Scheduled]:
        """The previous step, if its results have not arrived yet."""
        return ()

    def _lost(self) -> Sequence[Scheduled]:
        """Return the previous step if its results have not arrived, and drop these results."""
        return ()

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def add(self, message: Add) -> Progress | None:
        """Queue a request. Return an error if the request is invalid, else None."""
        request = self._try_on_all(message.request_id, lambda: self._new(message))
        if isinstance(request, MindieMMError):
            return _failure(message.request_id, request)
        self._encoder_cache.count(list(request.items))
        self._requests[message.request_id] = request
        self._scheduler.add(request)
        return None

    def encode(self, message: Encode) -> Progress:
        """Return the features of the next media items of a prompt, as many as one call to the tower takes."""
        request_id = message.request_id
        ids = np.frombuffer(message.input_ids, dtype=np.int64)
        items = self._try_on_all(request_id, lambda: self._read(ids)[message.start :])
        if isinstance(items, MindieMMError):
            return _failure(request_id, items)
        encoded = self._towers.encode_some(items)
        if isinstance(encoded, MindieMMError):
            return _failure(request_id, encoded)
        sent = self._try_on_all(request_id, lambda: sendable(items, encoded))
        if isinstance(sent, MindieMMError):
            return _failure(request_id, sent)
        return Progress(request_id=request_id, features=sent, finish_reason="stop" if len(sent) == len(items) else None)

    def load_lora(self, message: LoadLora) -> Progress:
        """Read a LoRA adapter, so that requests may use it, and return its key."""

        def on_all(work: Callable[[], T]) -> T:
            result = self._try_on_all(message.request_id, work)
            if isinstance(result, MindieMMError):
                raise result
            return result

        try:
            loras = on_all(self._loras)
            adapter = loras.read(Path(message.folder), message.key, on_all)
            on_all(lambda: loras.require_fitting(adapter))
        except MindieMMError as error:
            _log.warning("the LoRA adapter in %s was not loaded: %s", message.folder, error)
            return _failure(message.request_id, without_frames(error))
        loras.known.setdefault(adapter.key, adapter)
        return Progress(request_id=message.request_id, lora_key=adapter.key, finish_reason="stop")

    def keep_loras(self, message: KeepLoras) -> None:
        """Forget all other LoRA adapters. The client waits until no request uses them."""
        if self._media_model.loras is not None:
            self._media_model.loras.keep(message.keys)

    def _loras(self) -> Loras:
        if (loras := self._media_model.loras) is None:
            raise InputError("LoRA adapters are not enabled; start with --lora NAME=FOLDER or --lora-dir FOLDER")
        return loras

    def _adapter_of(self, params: SamplingParams) -> Adapter | None:
        """Return the adapter whose key `params` contain, or None."""
        if params.lora is None:
            return None
        if (adapter := self._loras().known.get(params.lora)) is None:
            raise OperationalError(
                "the LoRA adapter of the request could not be read again after a restart, because its files have "
                "changed; unload it, and load it again"
            )
        return adapter

    def _try_on_all(self, request_id: str, work: Callable[[], T]) -> T | MindieMMError:
        """Return the result of `work`. If one rank fails, return its error on all ranks."""
        failure: MindieMMError | None = None
        try:
            result = work()
        except MindieMMError as error:
            failure = without_frames(error)
        except Exception as error:  # noqa: BLE001 - an unreadable request must not end the others
            _log.exception("request %s failed with an unexpected error", request_id)
            failure = OperationalError(f"the request failed: {type(error).__name__}")
        # Only some ranks may fail: a block may be freed after one rank has read it and before another rank reads it.
        failure = self._ranks.all_reduce_error(failure)
        return result if failure is None else failure

    def _new(self, message: Add) -> Request:
        if message.params.bad_words:
            raise InputError(
                "bad_words is set, but the engine accepts only token ids; give bad_token_ids instead", param="bad_words"
            )
        request = self._request(message)
        if (wanted := request.params.structure) is not None:
            request.constraint = self._constraint(wanted)
        adapter = b"" if request.adapter is None else request.adapter.key.encode()
        request.origin = Origin(request.content_digest(), self.weights + adapter)
        if message.origin is not None:
            _require_same(message.origin, request.origin, begun=bool(message.drawn_ids))
        if message.drawn_ids:
            self._restore(request, message.drawn_ids)
        return request

    def _restore(self, request: Request, drawn_ids: Sequence[int]) -> None:
        """Make a new request continue an earlier one, as if it had drawn the tokens `drawn_ids` itself."""
        if len(drawn_ids) >= request.max_tokens:  # another engine may have a shorter context
            detail = f"the request has {request.num_prompt} prompt tokens and {len(drawn_ids)} output tokens"
            raise ContextLengthExceeded.of(request.num_prompt + request.max_tokens, detail)
        for token in drawn_ids:
            request.append(token)
            if request.constraint is not None:
                request.constraint.accept(token)
        if request.generator is not None:
            torch.rand(len(drawn_ids), DRAWS_PER_TOKEN, generator=request.generator)
        faults.point("restored")

    def _constraint(self, wanted: StructuredOutputs) -> Constraint:
        if self.grammars is None:
            raise InputError("this model does not support structured outputs")
        return self.grammars.constraint(wanted)

    def must_compile(self, message: Add) -> bool:
        """Return whether a structured output must be compiled. Compiling may take as long as several steps."""
        wanted = message.params.structure
        return wanted is not None and self.grammars is not None and wanted not in self.grammars

    def abort(self, message: Abort) -> None:
        """Remove a request. Do nothing if the request has ended."""
        if request := self._requests.get(message.request_id):
            self._forget(request)

    def step(self) -> Stepped:
        """Compute one step. An error that cannot be assigned to a single request fails all requests of the step."""
        step = self._scheduler.schedule(self._unfinished)
        faults.point("scheduled")
        progress: list[Progress] = []
        try:
            self._run(step, progress)
        except Exception as error:
            if self._ranks.count > 1:
                raise  # other ranks may wait for this rank inside a collective operation, so no rank can continue
            # A device or kernel error must not end requests outside this step, unless the device is lost for good.
            _log.exception("a step of %d requests failed", len(step))
            failure = DeviceError(f"the step failed: {type(error).__name__}")
            hit = {scheduled.request for scheduled in (*step, *self._lost())}
            left = [one for one in self._requests.values() if one in hit or one.awaits_token]
            progress += self._take_out(dict.fromkeys(left, failure))
        return Stepped(progress, self.stats)

    def _read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        """Return the media of a prompt.

        Raise TokenOutOfRange if an id is outside the model's vocabulary, and CorruptReference if the placeholder id in
        a block is. Either id would fail the whole step, or the device.
        """
        known = self._spec.embedding_size or self._spec.vocab_size
        if (top := int(ids.max())) >= known:
            raise TokenOutOfRange(f"token id {top} is not in [0, {known})")
        items = self._media_model.read(ids)
        for item in items:
            if item.shape.token >= known:
                raise CorruptReference(
                    f"the block states the placeholder id {item.shape.token}; it must be below {known}"
                )
        faults.point("attached")
        return items

    def _draw(self, logits: Tensor, requests: Sequence[Request], settings: RowSettings | None = None) -> Draws:
        """Draw the next token of each request from logits float32 [requests, vocabulary], changed in place."""
        return draw(logits, requests, self._constrain, self._spec.eos_token_ids, self._ranks, settings)

    def _constrain(self, logits: Tensor, requests: Sequence[Request]) -> bool:
        """Set the logits of forbidden tokens to minus infinity. Return whether any request has such tokens.

        `logits` are float32 [requests, vocabulary].
        """
        constraints = {row: one.constraint for row, one in enumerate(requests) if one.constraint is not None}
        if not constraints:
            return False
        assert self.grammars is not None, "every constraint comes from `grammars`"
        refused = upload(self.grammars.refused([*constraints.values()], logits.shape[1]), logits.device)
        rows = upload(np.array([*constraints], np.int64), logits.device)
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(refused, -torch.inf))
        return True

    def _advance(self, request: Request, draw: Draw | None, *, media_consumed: bool) -> Progress:
        """Append a token to a request and return its progress. Remove the request if it has finished.

        If `draw` is None, the request fails.
        """
        if draw is None:
            return self._fail_non_finite(request)
        token, logprobs = draw
        if token == NO_TOKEN:
            return self._fail(
                request,
                InputError(
                    "allowed_token_ids, bad_words and the request's other constraints exclude every token; allow at "
                    "least one"
                ),
            )
        if (constraint := request.constraint) is not None:
            # Only rank 0 computes which tokens may follow, so only rank 0 detects that a grammar exceeds a limit.
            error = self._ranks.broadcast(str, lambda: constraint.accept(token))
            if error:
                return self._fail(
                    request, InputError(f"the output can no longer match the requested structure: {error}")
                )
        first = request.num_output == 0
        if first:
            request.first_token_s = time.monotonic()
        request.append(token)
        faults.point("first-token" if first else "mid-decode")
        alone = request.params.max_tokens == 0  # the request only scores its prompt, so the drawn token is dropped
        reason, stop_token_id = ("length", None) if alone else self._finished(request, token)
        if reason is not None:
            self._forget(request)
        return Progress(
            request_id=request.request_id,
            token_ids=[] if alone else [token],
            logprobs=None if alone else logprobs,
            cached_tokens=request.num_cached if first else None,
            origin=request.origin if first or media_consumed else None,
            prompt_logprobs=request.prompt_logprobs if first and request.params.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            media_consumed=media_consumed,
            timings=request.timings(),
        )

    def _finished(self, request: Request, token: int) -> tuple[FinishReason | None, int | None]:
        params = request.params
        if request.num_output >= params.min_tokens:
            if token in params.stop_token_ids:
                return "stop", token
            if token in self._spec.eos_token_ids and not params.ignore_eos:
                return "stop", None
        return ("length" if request.num_output >= request.max_tokens else None), None

    def _consume_media(self, step: Sequence[Scheduled]) -> set[Request]:
        """Release the media whose last placeholder the step has computed. Return the requests of these media."""
        consumed = set()
        for scheduled in step:
            request = scheduled.request
            if request.media_consumed or not request.items or scheduled.stop < request.media_stop:
                continue
            self._drop_without_digest(request)
            request.consume_media()
            consumed.add(request)
        if consumed:
            faults.point("consumed")
        return consumed

    def _drop_without_digest(self, request: Request) -> None:
        """Drop features of items without a digest.

        Their cache key is a block of shared memory, which other media may use later.
        """
        for item in request.items:
            if item.digest is None:
                self._encoder_cache.free(item)

    def _take_out(self, failed: Mapping[Request, MindieMMError]) -> list[Progress]:
        """Fail requests. If a device is lost for good, raise its error before any request changes.

        A preempted request may need blocks that were freed after use. Its client then adds the request again, and
        the output continues.
        """
        if any(isinstance(error, DeviceError) for error in failed.values()):
            for device in self._devices:
                require_alive(device)
        if any(request.media_consumed for request in failed):
            faults.point("media-lost")
        return [self._fail(request, error) for request, error in failed.items()]

    def _fail_non_finite(self, request: Request) -> Progress:
        for item in request.items:  # the features may be the cause, so other requests must not reuse them
            self._encoder_cache.free(item)
        return self._fail(request, OperationalError("the model returned non-finite logits for this request"))

    def _fail(self, request: Request, error: MindieMMError) -> Progress:
        self._forget(request)
        return _failure(request.request_id, error)

    def _forget(self, request: Request) -> None:
        faults.point("forgetting")
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        self._drop_without_digest(request)


def generator_of(params: SamplingParams) -> torch.Generator | None:
    """Return the random generator of a request, or None if the request is greedy."""
    if params.greedy:
        return None
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def _require_same(expected: Origin, found: Origin, *, begun: bool) -> None:
    """Raise an error if the output of a request would continue with another prompt or with other weights."""
    if found.prompt != expected.prompt:
        raise OperationalError("the request's media have changed since its output began; send the request again")
    if begun and found.weights != expected.weights:
        raise WeightsChanged("the checkpoint's weights were replaced after the output began; send the request again")


def _failure(request_id: str, error: MindieMMError) -> Progress:
    return Progress(request_id=request_id, error=Failure.of(error))
