"""OpenTelemetry spans: one span per request, with a child span for each stage of the request.

The spans are created after the request has been answered, from times that are measured anyway. Spans contain numbers
and names, but no text of prompts or answers. Spans and attributes that vLLM also has use vLLM's names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Thread

from mindie_mm.engine.requests.engine_messages import Timings
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError

SPAN_NAME = "llm_request"
_CLOSE_TIMEOUT_S = 2.0
_SDK = "opentelemetry"
_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One span of a request. Times are from `time.perf_counter`."""

    name: str
    start_s: float
    stop_s: float
    within: str | None = None
    """Name of the enclosing stage of the same choice, or None."""
    choice: int | None = None
    """Index of the choice, or None for a stage of the whole request."""


@dataclass(slots=True)
class Trace:
    """Data of a request's spans, collected while the request is processed."""

    request_id: str
    arrived: float
    """Time at which the request's head arrived, from `time.perf_counter`."""
    carrier: Mapping[str, str]
    """Headers traceparent and tracestate, if the client sent them."""
    stages: list[Stage] = field(default_factory=list)
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    error: str | None = None
    """Name of the error's class if the request failed."""

    def tokenized(self, started: float, fetch_s: float, preprocess_s: float) -> None:
        """Add the stages before the engine.

        `started` is a time from `time.perf_counter`. `fetch_s` and `preprocess_s` are durations in seconds.
        """
        if fetch_s:
            self.stages.append(Stage("fetch", started, started + fetch_s))
        self.stages.append(Stage("preprocess", started + fetch_s, started + fetch_s + preprocess_s))

    def asked(self, params: SamplingParams, n: int, num_prompt_tokens: int) -> None:
        """Add the attributes of a request that asks for `n` choices."""
        self.attributes |= {
            "gen_ai.request.n": n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": num_prompt_tokens,
            "gen_ai.usage.completion_tokens": 0,
        }
        if params.max_tokens is not None:
            self.attributes["gen_ai.request.max_tokens"] = params.max_tokens

    def answered(self, choice: int, asked: float, first: float, last: float, num_tokens: int, at: Timings) -> None:
        """Add the stages of a finished choice. The tower runs at the start of the prefill.

        `asked`, `first` and `last` are times from `time.perf_counter`: when the engine was called, and when the first
        and the last output arrived.
        """
        begun = asked + at.queue_s
        self.stages += [
            Stage("queue", asked, begun, choice=choice),
            Stage("prefill", begun, begun + at.prefill_s, choice=choice),
            Stage("decode", begun + at.prefill_s, max(last, begun + at.prefill_s), choice=choice),
        ]
        if at.tower_s:
            self.stages.append(Stage("tower", begun, begun + at.tower_s, within="prefill", choice=choice))
        self._add("gen_ai.usage.completion_tokens", num_tokens)
        self._least("gen_ai.latency.time_to_first_token", first - self.arrived)
        self._most("gen_ai.latency.time_in_queue", at.queue_s)
        self._most("gen_ai.latency.time_in_model_prefill", at.prefill_s)
        self._most("gen_ai.latency.time_in_model_decode", last - first)
        self._most("gen_ai.latency.time_in_model_inference", last - begun)

    def _add(self, name: str, value: int) -> None:
        self.attributes[name] = int(self.attributes.get(name, 0)) + value

    def _most(self, name: str, value: float) -> None:
        self.attributes[name] = max(float(self.attributes.get(name, value)), value)

    def _least(self, name: str, value: float) -> None:
        self.attributes[name] = min(float(self.attributes.get(name, value)), value)


current: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""Trace of the current task's request, or None if tracing is off."""


class OncePerMinute(logging.Filter):
    """A filter that passes one warning of OpenTelemetry per minute, and all records of other libraries.

    The SDK retries without end, and logs an error or a warning for every attempt.
    """

    def __init__(self) -> None:
        super().__init__(_SDK)
        self._last_s = -_WARNING_INTERVAL_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. A record of the SDK becomes a warning without a traceback."""
        if record.levelno < logging.WARNING or not super().filter(record):
            return True
        if record.created - self._last_s < _WARNING_INTERVAL_S:
            return False
        self._last_s = record.created
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        record.msg, record.args = f"spans are not sent to the collector: {record.getMessage()}", ()
        record.exc_info = record.exc_text = None
        return True


class Tracer:
    """Sends the spans of requests to a collector. A separate thread sends them in batches."""

    def __init__(self, endpoint: str, version: str) -> None:
        """Create a tracer. The SDK's OTEL_ environment variables apply to all options that the arguments do not set.

        Raises:
            InputError: The `otel` extra is not installed.

        """
        try:  # imported here, so that a service without tracing does not spend time on the import
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InputError("otlp_endpoint requires the extra otel: pip install 'mindie_mm[otel]'") from error
        for handler in logging.root.handlers:
            handler.addFilter(OncePerMinute())
        own = Resource.create({"service.name": "mindie_mm", "service.version": version})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("mindie_mm", version)

    def record(self, done: Trace, model: str, method: str, route: str, status: int) -> None:
        """Create the spans of an answered request."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now = time.perf_counter()
        epoch_ns = time.time_ns() - int(now * 1e9)  # Unix time at which time.perf_counter was 0

        def at(seconds: float) -> int:
            return epoch_ns + int(seconds * 1e9)

        root = self._tracer.start_span(
            SPAN_NAME,
            context=TraceContextTextMapPropagator().extract(done.carrier),
            kind=trace.SpanKind.SERVER,
            start_time=at(done.arrived),
            attributes={
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "gen_ai.request.id": done.request_id,
                "gen_ai.response.model": model,
                "gen_ai.latency.e2e": now - done.arrived,
                **done.attributes,
            },
        )
        parents: dict[tuple[str | None, int | None], Context] = {(None, None): trace.set_span_in_context(root)}
        for stage in sorted(done.stages, key=lambda stage: stage.within is not None):
            context = parents.get((stage.within, stage.choice if stage.within else None), parents[None, None])
            span = self._tracer.start_span(stage.name, context=context, start_time=at(stage.start_s))
            if stage.choice is not None:
                span.set_attribute("mindie_mm.choice", stage.choice)
            parents[stage.name, stage.choice] = trace.set_span_in_context(span)
            span.end(at(stage.stop_s))
        if done.error is not None or status >= 500:
            root.set_attribute("error.type", done.error or str(status))
            root.set_status(trace.StatusCode.ERROR)
        root.end(at(now))

    def close(self) -> None:
        """Send the remaining spans. Give up after `_CLOSE_TIMEOUT_S` seconds."""
        # The SDK itself waits for up to 30 s. Many supervisors kill a process earlier.
        closing = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
