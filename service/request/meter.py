"""Metrics and trace of a request's choices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from mindie_mm.engine.requests.engine_messages import Timings
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, RequestAborted
from mindie_mm.worker.deltas import Delta
from service.http.clients import Client
from service.request.admission import cause_of_end
from service.telemetry import tracing
from service.telemetry.metrics import Metrics


class Meter:
    """Counts, times and traces the choices of one request."""

    def __init__(self, metrics: Metrics, arrived: float, client: Client | None = None, lora: str | None = None) -> None:
        """Create a meter.

        Args:
            metrics: Metrics of the service.
            arrived: Time at which the request's head arrived, from `time.perf_counter`.
            client: Client whose API key the request carries, and to whose quota the tokens count.
            lora: Name of the request's LoRA adapter, or None.

        """
        self.metrics = metrics
        self._of_lora = None if lora is None else metrics.of_lora(lora)
        self.client = client
        self.arrived = arrived
        self.failed: str | None = None
        """Reason that the metrics record for the first failed choice."""
        self._choices: dict[int, ChoiceMeter] = {}
        """Meters of the choices that have begun."""
        self._num_unfinished = 0
        self._n = 1

    @contextmanager
    def counted(self, num_choices: int) -> Iterator[None]:
        """If the `with` block raises, count each choice that has not begun. The error determines the reason.

        `num_choices` is the number of all choices that the request asks for.
        """
        try:
            yield
        except BaseException as error:
            for _ in range(num_choices - len(self._choices)):
                self.count(_reason(error), 0, None)
            raise

    def asked(self, prompt_lengths: Sequence[int], params: SamplingParams, n: int) -> None:
        """Count the prompts of a request that asks for `n` choices per prompt."""
        self._n, self._num_unfinished = n, len(prompt_lengths) * n
        for length in prompt_lengths:
            self.metrics.count_prompt(length, n, params.max_tokens)
        if self._of_lora is not None:
            self._of_lora["prompt"].inc(sum(prompt_lengths))
        if self.client is not None:
            self.client.count_tokens(prompt=sum(prompt_lengths))
        if (trace := tracing.current.get()) is not None:
            trace.asked(params, n, sum(prompt_lengths))

    def choice(self, index: int) -> ChoiceMeter:
        """Return the meter of choice `index`, which begins."""
        self._choices[index] = ChoiceMeter(self, index)
        return self._choices[index]

    def count(self, reason: str, num_tokens: int, timings: Timings | None) -> None:
        """Count a choice that has ended."""
        self.metrics.count_choice(reason, num_tokens, timings)
        if self._of_lora is not None:
            self._of_lora["choices"].inc(reason in ("stop", "length"))
            self._of_lora["generation"].inc(num_tokens)
        self.metrics.e2e_s.observe(time.perf_counter() - self.arrived)

    def finish(self) -> None:
        """Record that a choice has a finish reason. After the last choice, count the longest choice of each prompt."""
        self._num_unfinished -= 1
        if not self._num_unfinished:
            lengths = [self._choices[index].num_tokens for index in range(len(self._choices))]
            for start in range(0, len(lengths), self._n):
                self.metrics.count_longest(max(lengths[start : start + self._n]))


class ChoiceMeter:
    """Records the metrics and the trace of one choice when its context exits.

    If a choice ends because another choice failed, both are counted with the same reason. The time to the first token
    is measured from the arrival of the request's head.
    """

    def __init__(self, meter: Meter, index: int) -> None:
        self._meter = meter
        self._index = index
        self._asked = time.perf_counter()
        self._first = self._last = meter.arrived
        self._num_drawn = 0
        """Number of tokens, including the tokens of an output that was started again."""
        self.num_tokens = 0
        self._reason = ""
        self._timings: Timings | None = None

    def add(self, delta: Delta) -> None:
        """Record an addition to the output."""
        now, metrics = time.perf_counter(), self._meter.metrics
        if self._num_drawn:
            for _ in delta.token_ids:
                metrics.inter_token_s.observe((now - self._last) / len(delta.token_ids))
        else:
            metrics.first_token_s.observe(now - self._last)
            self._first = now
        self._last = now
        self._num_drawn += len(delta.token_ids)
        self.num_tokens += len(delta.token_ids)
        metrics.count_tokens(len(delta.token_ids))
        if self._meter.client is not None:
            self._meter.client.count_tokens(generated=len(delta.token_ids))
        self._reason = delta.finish_reason or ""
        self._timings = delta.timings

    def restart(self) -> None:
        """Record that the output starts again."""
        self.num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        trace, reason, ended = tracing.current.get(), self._reason, bool(self._reason)
        if isinstance(error, Exception):
            reason = _reason(error)
            self._meter.failed = self._meter.failed or reason
            self._meter.metrics.count_error(error)
            if trace is not None:
                trace.error = type(error).__name__
        reason = reason or self._meter.failed or _reason(error)
        self._meter.count(reason, self.num_tokens, self._timings if ended else None)
        if ended:
            self._meter.finish()
        if trace is not None and self._timings is not None:
            trace.answered(self._index, self._asked, self._first, self._last, self.num_tokens, self._timings)


def _reason(error: BaseException | None) -> str:
    """Return the reason that the metrics record for a choice that was ended by `error`, which may be a cancellation.

    The reason is `abort` if the client disconnected, and `refused` if the request itself is at fault. In all other
    cases, such as a passed deadline, the reason is `error`.
    """
    cause = error if isinstance(error, Exception) else cause_of_end()
    if isinstance(cause, RequestAborted | None):
        return "abort"
    return "refused" if isinstance(cause, InputError) else "error"
