"""OpenTelemetry spans: one a request, under it one for each stage that it went through.

A request's spans are made when it has been answered, from the times that are taken anyway. They hold numbers and names;
no text of a prompt or an answer. Names and attributes are vLLM's where the meaning is the same.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Stage:
    """One span of a request; times on the clock of time.perf_counter."""

    name: str
    start_s: float
    stop_s: float
    within: str | None = None
    """The stage of the same choice that it is a part of."""
    choice: int | None = None


@dataclass(slots=True)
class Trace:
    """What is known of a request; filled on its way."""

    request_id: str
    arrived: float
    """On the clock of time.perf_counter."""
    carrier: Mapping[str, str]
    """The headers traceparent and tracestate, where the client sent them."""
    stages: list[Stage] = field(default_factory=list)
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    error: str | None = None
    """Class of what it failed with."""

    def tokenized(self, started: float, fetch_s: float, preprocess_s: float) -> None:
        """Its media were fetched and it was tokenised."""
        if fetch_s:
            self.stages.append(Stage("fetch", started, started + fetch_s))
        self.stages.append(Stage("preprocess", started + fetch_s, started + fetch_s + preprocess_s))

    def asked(self, params: SamplingParams, n: int, num_prompt_tokens: int) -> None:
        """The engine is asked for `n` choices."""
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
        """A choice had its first and its last output at those times; the tower runs as the prefill begins."""
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
"""The trace of the request that the current task works for; None where tracing is off."""


class Tracer:
    """Sends the spans of requests to a collector, in batches, from a thread of its own."""

    def __init__(self, endpoint: str, version: str) -> None:
        """InputError if the extra is not installed. OTEL_ variables of the SDK hold where no setting says otherwise."""
        try:  # late: what is off costs nothing
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InputError("otlp_endpoint is set, which needs the extra: pip install 'mindie_mm[otel]'") from error
        own = Resource.create({"service.name": "mindie_mm", "service.version": version})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("mindie_mm", version)

    def record(self, done: Trace, model: str, method: str, route: str, status: int) -> None:
        """Makes the spans of a request that has been answered."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now = time.perf_counter()
        epoch_ns = time.time_ns() - int(now * 1e9)  # of the clock of time.perf_counter

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
        """Sends what is left, for two seconds at most."""
        # The SDK's own limit is 30 s, longer than many wait for the end of a process.
        closing = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
