"""A discrete-event model of one host: clients, service, tokenizer, decoders and engines, which share processors.

A request passes through the stages in the order that ARCHITECTURE.md describes. Only the durations of the stages are
given. Queues, batches and rates follow from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from bench.scale.stage_times import EngineTimes, RequestTimes, TokenTimes
from mindie_mm.routing import Candidate, order

SLICE_S = 0.001
"""Time after which a processor is given to the next process that waits for it."""

Steps = Generator[simpy.Event, Any, None]


class Processors:
    """The processors of a host. If more processes want to run than there are processors, they run in turns."""

    def __init__(self, env: simpy.Environment, number: int | None, contention: float = 1.0) -> None:
        """Create `number` processors, or one for each process if it is None.

        While several of them are busy, work takes `contention` times as long.
        """
        self._env = env
        self._turns = None if number is None else simpy.Resource(env, number)
        self._contention = contention

    def work(self, seconds: float) -> Steps:
        """Wait until `seconds` of processor time have passed."""
        if self._turns is None:
            yield self._env.timeout(seconds)
            return
        while seconds > 0:
            with self._turns.request() as turn:
                yield turn
                slowed = self._contention if self._turns.count > 1 else 1.0
                now = min(seconds, SLICE_S)
                yield self._env.timeout(now * slowed)
            seconds -= now


class Station:
    """A process that does one job after the other, or several equal processes with one queue."""

    def __init__(self, env: simpy.Environment, processors: Processors, number: int = 1) -> None:
        self._env = env
        self._processors = processors
        self._turns = simpy.Resource(env, number)
        self.jobs = 0
        self.busy_s = 0.0
        """Time in which the processes had a job, including the time in which they waited for a processor."""

    def work(self, seconds: float) -> Steps:
        """Wait until the jobs before this one and the job itself are done."""
        with self._turns.request() as turn:
            yield turn
            begun = self._env.now
            yield from self._processors.work(seconds)
            self.jobs += 1
            self.busy_s += self._env.now - begun


@dataclass(slots=True, eq=False)
class Request:
    """A request in progress."""

    times: RequestTimes
    num_tokens: int
    """Number of tokens of the answer."""
    answered: simpy.Event
    sent: int = 0
    """Number of tokens that the engine has computed."""
    begun_s: float = 0.0
    ended_s: float = math.nan


class Engine:
    """An engine, which computes a step for all requests that it has: continuous batching."""

    def __init__(
        self,
        env: simpy.Environment,
        processors: Processors,
        times: EngineTimes,
        sent: Callable[[list[Request]], None],
        max_batched_tokens: int,
    ) -> None:
        """Create an idle engine. It calls `sent` with the requests of each step, when the step is computed."""
        self.station = Station(env, processors)
        self._env = env
        self._times = times
        self._sent = sent
        self._max_batched_tokens = max_batched_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._arrival = env.event()
        env.process(self._steps())

    @property
    def queued_tokens(self) -> int:
        """Number of tokens that the engine has accepted, but not computed."""
        waiting = sum(request.times.prompt_tokens + request.num_tokens for request in self._waiting)
        return waiting + sum(request.num_tokens - request.sent for request in self._running)

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        if not self._arrival.triggered:
            self._arrival.succeed()

    def _steps(self) -> Steps:
        while True:
            if not self._waiting and not self._running:
                self._arrival = self._env.event()
                yield self._arrival
            decodes = len(self._running)
            prompts = self._admit()
            yield self._env.timeout(self._times.idle_s)
            yield from self.station.work(self._times.step_s(decodes, [request.times.engine_s for request in prompts]))
            self._running += prompts
            for request in self._running:
                request.sent += 1
            self._sent(list(self._running))
            self._running = [request for request in self._running if request.sent < request.num_tokens]

    def _admit(self) -> list[Request]:
        """Return the prompts of the next step. A prompt that exceeds the limit has a step of its own."""
        left = self._max_batched_tokens - len(self._running)
        prompts: list[Request] = []
        while self._waiting and (not prompts or self._waiting[0].times.prompt_tokens <= left):
            left -= self._waiting[0].times.prompt_tokens
            prompts.append(self._waiting.popleft())
        return prompts


@dataclass(frozen=True, slots=True)
class Layout:
    """What runs on a host."""

    engine: EngineTimes
    tokens: TokenTimes = field(default_factory=TokenTimes)
    engines: int = 1
    decoders: int = 1
    processors: int | None = None
    """Number of processors that all processes share. None: each process has its own."""
    contention: float = 1.0
    """See `StageTimes.contention`."""
    accelerators: bool = False
    """True if each engine has an accelerator, so that its steps need none of the processors."""
    max_batched_tokens: int = 2048


@dataclass(slots=True)
class Host:
    """A host with a queue in front of each of its processes."""

    env: simpy.Environment
    layout: Layout
    stations: dict[str, Station] = field(init=False)
    engines: list[Engine] = field(init=False)
    finished: list[Request] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        layout, env = self.layout, self.env
        processors = Processors(env, layout.processors, layout.contention)
        numbers = {"client": 1, "service": 1, "tokenizer": 1, "decoder": layout.decoders}
        self.stations = {name: Station(env, processors, number) for name, number in numbers.items()}
        own = Processors(env, None) if layout.accelerators else processors
        self.engines = [
            Engine(env, own, layout.engine, self._sent, layout.max_batched_tokens) for _ in range(layout.engines)
        ]
        self.stations |= {f"engine {index}": engine.station for index, engine in enumerate(self.engines)}

    def answer(self, times: RequestTimes, num_tokens: int) -> Steps:
        """Send a request, and wait until the client has the last of `num_tokens` tokens."""
        request = Request(times, num_tokens, self.env.event(), begun_s=self.env.now)
        yield from self.stations["client"].work(times.client_s)
        yield from self.stations["service"].work(times.service_s)
        yield from self.stations["tokenizer"].work(times.tokenizer_s)
        yield from self.stations["decoder"].work(times.decoder_s)
        yield self.env.timeout(times.idle_s)
        loads = [Candidate(str(index), engine.queued_tokens, 0) for index, engine in enumerate(self.engines)]
        self.engines[order(loads, 0)[0]].add(request)
        yield request.answered
        request.ended_s = self.env.now
        self.finished.append(request)

    def utilization(self, seconds: float) -> dict[str, float]:
        """Return the share of `seconds` in which each station was busy."""
        return {
            name: station.busy_s / seconds / (self.layout.decoders if name == "decoder" else 1)
            for name, station in self.stations.items()
        }

    def _sent(self, requests: list[Request]) -> None:
        later = sum(request.sent > 1 for request in requests)  # the first token's time is in `RequestTimes`
        self.env.process(self._deliver(later, [one for one in requests if one.sent == one.num_tokens]))

    def _deliver(self, later: int, last: list[Request]) -> Steps:
        """Pass `later` tokens of a step to the clients. The requests `last` end with this step."""
        tokens = self.layout.tokens
        for name, message_s, token_s in (
            ("service", tokens.service_message_s, tokens.service_token_s),
            ("client", tokens.client_message_s, tokens.client_token_s),
        ):
            if later:
                yield from self.stations[name].work(message_s + later * token_s)
        for request in last:
            request.answered.succeed()


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulation."""

    requests_per_s: float
    mean_wait_s: float
    """Mean time from a request to its last token."""
    utilization: dict[str, float]


def closed_loop(layout: Layout, times: RequestTimes, num_tokens: int, clients: int, requests: int) -> Run:
    """Simulate clients that each send their next request when they have the last answer, as `bench.serve.load` does."""
    env = simpy.Environment()
    host = Host(env, layout)
    left = iter(range(requests))

    def client() -> Steps:
        for _ in left:
            yield from host.answer(times, num_tokens)

    env.run(env.all_of([env.process(client()) for _ in range(clients)]))
    waits = [request.ended_s - request.begun_s for request in host.finished]
    return Run(requests / env.now, sum(waits) / len(waits), host.utilization(env.now))
