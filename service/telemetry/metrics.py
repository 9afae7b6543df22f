"""Prometheus metrics. A metric that vLLM also has uses vLLM's name."""

from __future__ import annotations

import math
import platform
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mindie_mm.engine.requests.engine_messages import Stats, Timings
from mindie_mm.errors import BadReference, CorruptReference, SegmentMissing, StaleReference
from mindie_mm.processes.standard_streams import dropped_lines
from mindie_mm.shm import ArenaInfo
from mindie_mm.shm.dev_shm import ShmSpace
from mindie_mm.shm.format.layout import ArenaStats
from mindie_mm.shm.reclaim import totals
from mindie_mm.worker.worker import Worker
from service.http.clients import Client

PREFIX = "mindie_mm:"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(2**power) for power in range(16))
_REASONS = ("stop", "length", "abort", "refused", "error")
_BAD_REFERENCES: Mapping[type[BadReference], str] = {
    StaleReference: "stale",
    CorruptReference: "corrupt",
    SegmentMissing: "missing",
}


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # the usual process_... metrics, for the service process
        self.model_name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(PREFIX + name, text, ("model_name",), registry=self.registry, buckets=buckets)
            return whole.labels(model_name)

        self._http_requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self.registry
        )
        self._rejections = counter(
            "admission_rejections", "HTTP requests refused with status 429 because the service was full."
        ).labels(model_name)
        finished = counter("request_success", "Finished choices, by finish reason.", "finished_reason")
        # Every series exists from the start, so that `rate` sees the first event.
        self._finished = {reason: finished.labels(model_name, reason) for reason in _REASONS}
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.").labels(model_name)
        self._generation_tokens = counter("generation_tokens", "Generated tokens.").labels(model_name)
        self.first_token_s = histogram(
            "time_to_first_token_seconds", "Time from the arrival of a request to the first token of a choice.", _LONG_S
        )
        self.inter_token_s = histogram("inter_token_latency_seconds", "Time between two tokens of a choice.", _SHORT_S)
        self.e2e_s = histogram(
            "e2e_request_latency_seconds", "Time from the arrival of a request to the end of a choice.", _LONG_S
        )
        self.tokenize_s = histogram(
            "request_tokenize_time_seconds", "Time to turn text and media into token ids.", _LONG_S
        )
        self._queue_s = histogram("request_queue_time_seconds", "Time that a choice waited to be scheduled.", _LONG_S)
        self._prefill_s = histogram("request_prefill_time_seconds", "Time from scheduling to the first token.", _LONG_S)
        self._decode_s = histogram("request_decode_time_seconds", "Time from the first to the last token.", _LONG_S)
        self._inference_s = histogram(
            "request_inference_time_seconds", "Time from scheduling to the last token.", _LONG_S
        )
        self._per_token_s = histogram(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a choice.", _SHORT_S
        )
        self._tower_s = histogram("request_tower_time_seconds", "Time in the vision tower.", _LONG_S)
        self._plan_queries = counter(
            "plan_cache_queries", "Media items of /render that were looked up among earlier plans."
        ).labels(model_name)
        self._plan_hits = counter(
            "plan_cache_hits", "Media items of /render that were neither fetched nor planned again."
        ).labels(model_name)
        bad_references = counter(
            "shm_bad_references", "Choices that failed because their media were missing or damaged, by kind.", "kind"
        )
        self._bad_references = {
            error: bad_references.labels(model_name, kind) for error, kind in _BAD_REFERENCES.items()
        }
        self._of_loras = {
            "choices": counter("lora_request_success", "Finished choices by LoRA adapter.", "lora_name"),
            "prompt": counter("lora_prompt_tokens", "Prompt tokens by LoRA adapter.", "lora_name"),
            "generation": counter("lora_generation_tokens", "Generated tokens by LoRA adapter.", "lora_name"),
        }
        self._request_prompt_tokens = histogram("request_prompt_tokens", "Number of tokens of a prompt.", _TOKENS)
        self._request_generation_tokens = histogram(
            "request_generation_tokens", "Number of tokens of a choice.", _TOKENS
        )
        self._longest_choice = histogram(
            "request_max_num_generation_tokens", "Number of tokens of the longest choice of a prompt.", _TOKENS
        )
        self._params_n = histogram("request_params_n", "Number of choices requested for a prompt.", _CHOICES)
        self._params_max_tokens = histogram("request_params_max_tokens", "max_tokens of requests that set it.", _TOKENS)

    def count_http(self, route: str, method: str, status: int) -> None:
        """Count an answered request. `route` is the route's path template, or `none` if no route matched."""
        self._http_requests.labels(route, method, status).inc()
        if status == 429:
            self._rejections.inc()

    def count_prompt(self, num_tokens: int, n: int, max_tokens: int | None) -> None:
        """Count a prompt of `num_tokens` tokens that is sent to the engine.

        Args:
            num_tokens: Length of the prompt.
            n: Number of choices requested.
            max_tokens: Maximum length of a choice, or None if the request does not set it.

        """
        self._prompt_tokens.inc(num_tokens)
        self._request_prompt_tokens.observe(num_tokens)
        self._params_n.observe(n)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def count_plans(self, num_asked: int, num_found: int) -> None:
        """Count media items of /render that were looked up among earlier plans, and those that were found."""
        self._plan_queries.inc(num_asked)
        self._plan_hits.inc(num_found)

    def count_tokens(self, number: int) -> None:
        """Count `number` generated tokens."""
        self._generation_tokens.inc(number)

    def count_choice(self, reason: str, num_tokens: int, timings: Timings | None) -> None:
        """Count a choice that has ended.

        Args:
            reason: `stop` or `length` if the choice is finished, `abort` if the client disconnected, `refused` if the
                request itself is at fault, and `error` in all other cases.
            num_tokens: Length of the choice. These tokens have already been counted by `count_tokens`.
            timings: Times of the engine's stages, or None if the choice is not finished.

        """
        self._finished[reason].inc()
        self._request_generation_tokens.observe(num_tokens)
        if timings is not None:
            self._queue_s.observe(timings.queue_s)
            self._prefill_s.observe(timings.prefill_s)
            self._decode_s.observe(timings.decode_s)
            self._tower_s.observe(timings.tower_s)
            self._inference_s.observe(timings.prefill_s + timings.decode_s)
            if num_tokens > 1:
                self._per_token_s.observe(timings.decode_s / (num_tokens - 1))

    def of_lora(self, name: str) -> dict[str, Counter]:
        """Return the counters of a LoRA adapter: `choices`, `prompt` tokens and `generation` tokens."""
        return {what: counter.labels(self.model_name, name) for what, counter in self._of_loras.items()}

    def forget_lora(self, name: str) -> None:
        """Remove the counters of a LoRA adapter. Requests that have begun do not add them again."""
        self.of_lora(name)  # so that they exist
        for counter in self._of_loras.values():
            counter.remove(self.model_name, name)

    def count_longest(self, num_tokens: int) -> None:
        """Record the length of the longest choice of a prompt whose choices are finished."""
        self._longest_choice.observe(num_tokens)

    def count_error(self, error: Exception) -> None:
        """Count the error of a failed choice if it is a BadReference."""
        for kind, counter in self._bad_references.items():
            if isinstance(error, kind):
                counter.inc()

    def watch_arenas(self, arenas: Callable[[], Sequence[ArenaInfo]]) -> None:
        """Add metrics of shared memory. Each scrape calls `arenas`, and reads the totals of reclaimed objects."""
        self.registry.register(_SharedMemory(arenas, self.model_name))

    def watch(self, stats: Callable[[], Sequence[Stats]]) -> None:
        """Add the gauges of the engines. Each scrape calls `stats`, which returns one element per engine."""
        self.registry.register(_EngineGauges(stats, self.model_name))

    def watch_processes(self, worker: Worker) -> None:
        """Add metrics of the worker's processes and their restarts, software versions, and KV cache settings."""
        self.registry.register(_Processes(worker, self.model_name))

    def watch_clients(self, clients: Callable[[], Sequence[Client]]) -> None:
        """Add metrics of the API keys with names. Each scrape calls `clients`."""
        self.registry.register(_Clients(clients, self.model_name))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. Inspecting the arenas may take milliseconds."""
        return generate_latest(self.registry)


def _engine_labels(num_engines: int) -> tuple[str, ...]:
    """Return the labels of metrics of engines. A single engine has no number, because its label would be redundant.

    The metric families ignore label values without a label.
    """
    return ("model_name",) if num_engines == 1 else ("model_name", "engine")


class _EngineGauges(Collector):
    def __init__(self, stats: Callable[[], Sequence[Stats]], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        several = self._stats()
        for family, rows in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
            for name, text, value in rows:
                metric = family(PREFIX + name, text, labels=_engine_labels(len(several)))
                for number, stats in enumerate(several):
                    metric.add_metric((self._model_name, str(number)), value(stats))
                yield metric


class _Clients(Collector):
    def __init__(self, clients: Callable[[], Sequence[Client]], model_name: str) -> None:
        self._clients = clients
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        clients = self._clients()
        for family, rows in ((GaugeMetricFamily, _CLIENT_GAUGES), (CounterMetricFamily, _CLIENT_COUNTERS)):
            for name, text, value in rows:
                metric = family(f"{PREFIX}client_{name}", text, labels=("model_name", "client"))
                for client in clients:
                    metric.add_metric((self._model_name, client.name), value(client))
                yield metric


class _Processes(Collector):
    def __init__(self, worker: Worker, model_name: str) -> None:
        self._worker = worker
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        engine, tokenizers = self._worker.engine, self._worker.tokenizer_stage
        labels = ("model_name", "process")
        alive = GaugeMetricFamily(f"{PREFIX}processes", "Processes that accept requests.", labels=labels)
        started = CounterMetricFamily(
            f"{PREFIX}process_restarts", "Processes started to replace a dead one.", labels=labels
        )
        failed = CounterMetricFamily(
            f"{PREFIX}process_start_failures", "Failed attempts to start a process.", labels=labels
        )
        rows = [
            ("engine", engine.num_alive, engine.restarts),
            ("tokenizer", len(tokenizers.pids), tokenizers.restarts),
        ]
        if (forks := self._worker.forks) is not None:
            rows.append(("fork_server", forks.num_alive, forks.restarts))
        for name, number, restarts in rows:
            alive.add_metric((self._model_name, name), number)
            started.add_metric((self._model_name, name), restarts.started)
            failed.add_metric((self._model_name, name), restarts.failed)
        yield from (alive, started, failed)
        remade = CounterMetricFamily(
            f"{PREFIX}media_remade",
            "Media items preprocessed again, mostly after a preemption.",
            labels=("model_name",),
        )
        remade.add_metric((self._model_name,), self._worker.media_remade)
        yield remade
        dropped = CounterMetricFamily(
            f"{PREFIX}log_lines_dropped",
            "Log lines dropped because standard error was not read.",
            labels=("model_name",),
        )
        dropped.add_metric((self._model_name,), dropped_lines())
        yield dropped
        text = "Configuration of the KV cache, with its number of blocks on any device."
        caches = InfoMetricFamily(f"{PREFIX}cache_config", text, labels=_engine_labels(len(engine.engines)))
        for index, one in enumerate(engine.engines):
            cache = {
                "block_size": str(one.info.kv_block_size),
                "num_gpu_blocks": str(one.info.kv_cache_tokens // one.info.kv_block_size),
                "enable_prefix_caching": str(self._worker.config.engine.prefix_caching),
            }
            caches.add_metric((self._model_name, str(index)), cache)
        yield caches
        build = {name: version(name) for name in ("mindie_mm", "torch", "transformers")}
        build = {**build, "python": platform.python_version(), "device": engine.info.device}
        family = InfoMetricFamily(f"{PREFIX}build", "Versions and device.", labels=("model_name",))
        family.add_metric((self._model_name,), build)
        yield family


class _SharedMemory(Collector):
    def __init__(self, arenas: Callable[[], Sequence[ArenaInfo]], model_name: str) -> None:
        self._arenas = arenas
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        arenas = self._arenas()
        # One series per arena, because a sum of counters would decrease when a tokenizer restarts.
        for family, rows in ((GaugeMetricFamily, _ARENA_GAUGES), (CounterMetricFamily, _ARENA_COUNTERS)):
            for name, text, value in rows:
                metric = family(f"{PREFIX}shm_{name}", text, labels=("model_name", "arena"))
                for arena in arenas:
                    if arena.stats is not None:
                        metric.add_metric((self._model_name, arena.name), value(arena, arena.stats))
                yield metric
        yield self._blocks(arenas)
        yield from self._filesystem()
        yield from self._reclaimed()

    def _blocks(self, arenas: Sequence[ArenaInfo]) -> Metric:
        blocks = GaugeMetricFamily(f"{PREFIX}shm_blocks", "Blocks by state.", labels=("model_name", "arena", "state"))
        for arena in arenas:
            states = Counts(block.state for block in arena.blocks)
            for state in ("filling", "published"):
                blocks.add_metric((self._model_name, arena.name, state), states[state])
        return blocks

    def _filesystem(self) -> Iterator[Metric]:
        space = ShmSpace.now()
        for name, text, num_bytes in (
            (
                "filesystem_bytes",
                "Size of /dev/shm, which any program may use, or +Inf if it has no limit.",
                space.total_bytes,
            ),
            ("filesystem_free_bytes", "Bytes of /dev/shm that are free.", space.free_bytes),
        ):
            metric = GaugeMetricFamily(f"{PREFIX}shm_{name}", text, labels=("model_name",))
            metric.add_metric((self._model_name,), math.inf if num_bytes is None else num_bytes)
            yield metric

    def _reclaimed(self) -> Iterator[Metric]:
        labels = ("model_name", "cause")
        number = CounterMetricFamily(
            f"{PREFIX}shm_reclaimed", "Objects reclaimed from dead processes, by cause.", labels=labels
        )
        num_bytes = CounterMetricFamily(
            f"{PREFIX}shm_reclaimed_bytes",
            "Bytes of shared memory reclaimed from dead processes, by cause.",
            labels=labels,
        )
        for cause, total in totals().items():
            number.add_metric((self._model_name, cause), total.number)
            num_bytes.add_metric((self._model_name, cause), total.num_bytes)
        yield number
        yield num_bytes


_EngineValues = Sequence[tuple[str, str, Callable[[Stats], float]]]
"""Name, description and function for the value of metrics that have one series per engine."""

_ENGINE_GAUGES: _EngineValues = (
    ("num_requests_running", "Requests in the running batch.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests waiting for the batch.", lambda stats: stats.num_waiting),
    ("kv_cache_usage_perc", "Used fraction of the KV cache, from 0 to 1.", lambda stats: stats.kv_cache_usage),
)
_ENGINE_COUNTERS: _EngineValues = (
    ("mm_cache_queries", "Media items looked up in the encoder cache.", lambda stats: stats.encoder_cache_queries),
    ("mm_cache_hits", "Media items found in the encoder cache.", lambda stats: stats.encoder_cache_hits),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.prefix_cache_hits),
    ("num_preemptions", "Requests preempted to free KV cache.", lambda stats: stats.preemptions),
    ("spec_decode_num_drafts", "Steps of a request with guesses of its next tokens.", lambda stats: stats.drafts),
    ("spec_decode_num_draft_tokens", "Tokens that were guessed.", lambda stats: stats.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Guesses that were drawn.", lambda stats: stats.accepted_tokens),
)


_ClientValues = Sequence[tuple[str, str, Callable[[Client], float]]]
"""Name, description and function for the value of metrics that have one series per API key with a name."""

_CLIENT_GAUGES: _ClientValues = (
    ("requests_running", "Requests in progress, by API key.", lambda client: client.num_running),
)
_CLIENT_COUNTERS: _ClientValues = (
    ("requests", "Requests to the model, by API key.", lambda client: client.num_requests),
    ("requests_refused", "Requests refused because of the quota of their key.", lambda client: client.num_refused),
    ("prompt_tokens", "Prompt tokens, by API key.", lambda client: client.num_prompt_tokens),
    ("generation_tokens", "Generated tokens, by API key.", lambda client: client.num_generated_tokens),
)


def _oldest(arena: ArenaInfo) -> float:
    return max((block.age_s for block in arena.blocks), default=0.0)


_ArenaValues = Sequence[tuple[str, str, Callable[[ArenaInfo, ArenaStats], float]]]
"""Name, description and function for the value of metrics that have one series per arena."""

_ARENA_GAUGES: _ArenaValues = (
    ("capacity_bytes", "Capacity for blocks in bytes.", lambda arena, _: arena.capacity_bytes),
    ("used_bytes", "Bytes in blocks that are not freed.", lambda arena, _: arena.used_bytes),
    ("peak_bytes", "Maximum number of bytes that were in blocks at once.", lambda _, stats: stats.peak_bytes),
    (
        "populated_ratio",
        "Fraction of the arena that is faulted in, from 0 to 1.",
        lambda arena, _: arena.populated_fraction,
    ),
    ("waiting_bytes", "Bytes that requests are waiting to allocate.", lambda _, stats: stats.waiting_bytes),
    ("oldest_block_age_seconds", "Age of the oldest block, or 0 if there is none.", lambda arena, _: _oldest(arena)),
)
_ARENA_COUNTERS: _ArenaValues = (
    ("allocations", "Blocks allocated.", lambda _, stats: stats.allocations),
    ("waits", "Requests that had to wait for room.", lambda _, stats: stats.waits),
    ("waited_seconds", "Time that requests have waited for room.", lambda _, stats: stats.waited_ns / 1e9),
    ("full", "Requests that failed because no room became free (ArenaFull).", lambda _, stats: stats.full),
    ("taken_back", "Published blocks that were freed and reclaimed by the owner.", lambda _, stats: stats.taken_back),
)
