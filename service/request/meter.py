"""Metrics and trace of a request's choices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mindie_mm.engine.requests.engine_messages import Timings
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError, RequestAborted
from mindie_mm.worker.worker import Delta
from service.request.admission import cause_of_end
from service.telemetry import tracing
from service.telemetry.metrics import Metrics


class Meter:
    """Counts, times and traces the choices of one request."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        """Create a meter. `arrived` is the time at which the request's head arrived, from `time.perf_counter`."""
        self._metrics = metrics
        self._arrived = arrived
        self._num_tokens: dict[int, int] = {}
        """Number of tokens of each choice that has begun."""
        self._num_unfinished = 0
        self._n = 1
        self._failed: str | None = None
        """Reason that the metrics record for the first failed choice."""

    @contextmanager
    def counted(self, num_choices: int) -> Iterator[None]:
        """If the `with` block raises, count each choice that has not begun. The error determines the reason.

        `num_choices` is the number of all choices that the request asks for.
        """
        try:
            yield
        except BaseException as error:
            for _ in range(num_choices - len(self._num_tokens)):
                self._count(_reason(error if isinstance(error, Exception) else None), 0, None)
            raise

    def asked(self, prompt_lengths: Sequence[int], params: SamplingParams, n: int) -> None:
        """Count the prompts of a request that asks for `n` choices per prompt."""
        self._n, self._num_unfinished = n, len(prompt_lengths) * n
        for length in prompt_lengths:
            self._metrics.count_prompt(length, n, params.max_tokens)
        if (trace := tracing.current.get()) is not None:
            trace.asked(params, n, sum(prompt_lengths))

    @contextmanager
    def measured(self, index: int) -> Iterator[Callable[[Delta], None]]:
        """Record the metrics and the trace of choice `index`. Call the function that is yielded with each output.

        If a choice ends because another choice failed, both are counted with the same reason. The time to the first
        token is measured from the arrival of the request's head.
        """
        metrics, trace = self._metrics, tracing.current.get()
        asked = time.perf_counter()
        first = last = self._arrived
        num_drawn = 0
        reason, ended, stages = "", False, None
        self._num_tokens[index] = 0

        def measure(delta: Delta) -> None:
            nonlocal first, last, num_drawn, reason, ended, stages
            now = time.perf_counter()
            if num_drawn:
                for _ in delta.token_ids:
                    metrics.inter_token_s.observe((now - last) / len(delta.token_ids))
            else:
                metrics.first_token_s.observe(now - last)
            first, last = first if num_drawn else now, now
            num_drawn += len(delta.token_ids)
            self._num_tokens[index] += len(delta.token_ids)
            metrics.count_tokens(len(delta.token_ids))
            reason = delta.finish_reason or reason
            ended = delta.finish_reason is not None
            stages = delta.timings

        try:
            yield measure
        except Exception as error:
            reason = _reason(error)
            self._failed = self._failed or reason
            metrics.count_error(error)
            if trace is not None:
                trace.error = type(error).__name__
            raise
        finally:
            num_tokens = self._num_tokens[index]
            self._count(reason or self._failed or _reason(None), num_tokens, stages if ended else None)
            if trace is not None and stages is not None:
                trace.answered(index, asked, first, last, num_tokens, stages)
            self._num_unfinished -= ended
            if not self._num_unfinished:
                lengths = [self._num_tokens[index] for index in range(len(self._num_tokens))]
                for start in range(0, len(lengths), self._n):
                    metrics.count_longest(max(lengths[start : start + self._n]))

    def restart(self, index: int) -> None:
        """Record that the output of choice `index` starts again."""
        self._num_tokens[index] = 0

    def _count(self, reason: str, num_tokens: int, timings: Timings | None) -> None:
        self._metrics.count_choice(reason, num_tokens, timings)
        self._metrics.e2e_s.observe(time.perf_counter() - self._arrived)


def _reason(error: Exception | None) -> str:
    """Return the reason that the metrics record for a choice that was ended by `error` or by a cancellation.

    The reason is `abort` if the client disconnected, and `refused` if the request itself is at fault. In all other
    cases, such as a passed deadline, the reason is `error`.
    """
    cause = error or cause_of_end()
    if isinstance(cause, RequestAborted | None):
        return "abort"
    return "refused" if isinstance(cause, InputError) else "error"
