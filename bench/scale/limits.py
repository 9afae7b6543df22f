"""Limits that the model of a host finds: decoders that keep an accelerator busy, and tokens that a process can send."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import simpy

from bench.scale.host import Layout, Processors, Station, Steps, closed_loop
from bench.scale.stage_times import EngineTimes, RequestTimes

BUSY = 0.95
"""Share of the time in which a busy accelerator has work."""
CLIENTS = 64
IMAGES = 400
MOST_DECODERS = 128


@dataclass(frozen=True, slots=True)
class Decoders:
    """What keeps one accelerator busy."""

    number: int | None
    """Number of decoder processes, each on its own core, or None if another process is too slow."""
    utilization: float
    """Share of the time in which the accelerator has work."""
    limit: str
    """Busiest station."""


def decoders(times: RequestTimes, accelerator_s: float) -> Decoders:
    """Return the smallest number of decoders that keep an accelerator busy if it takes `accelerator_s` per image.

    Each request has one new image. The accelerator's time per image covers the tower, the prefill and the
    image's share of the decode steps. The service, the tokenizer and each decoder have their own cores, and the
    clients are on other hosts.
    """
    request = replace(times, client_s=0.0, engine_s=accelerator_s)

    def run(number: int) -> Decoders:
        layout = Layout(EngineTimes({}), decoders=number, accelerators=True, max_batched_tokens=1)
        result = closed_loop(layout, request, 1, CLIENTS + number, IMAGES + 8 * number)
        shares = dict(result.utilization)
        busiest = max(shares, key=lambda name: shares[name])
        return Decoders(number, shares["engine 0"], busiest)

    number = max(1, math.floor(times.decoder_s / accelerator_s))
    while (result := run(number)).utilization < BUSY:
        if result.limit not in {"decoder", "engine 0"} or number >= MOST_DECODERS:
            return replace(result, number=None)
        number += 1
    return result


@dataclass(frozen=True, slots=True)
class Stream:
    """The answers that engines generate."""

    batch: int = 32
    """Number of answers that an engine generates at the same time."""
    tokens_per_s: float = 50.0
    """Number of tokens per second and answer. An engine sends a token of each answer in each step."""
    answer_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Sender:
    """Times of a process that receives requests and sends tokens, in seconds."""

    request_s: float
    message_s: float
    """Time of a step's message from an engine, without its tokens."""
    token_s: float


def lag_s(sender: Sender, engines: int, processes: int, stream: Stream, seconds: float = 2.0) -> float:
    """Return the 99th percentile of the time from the end of an engine's step to the sending of its tokens.

    The answers of each engine are divided evenly among the processes. If an answer ends, a new request follows.
    """
    env = simpy.Environment()
    draws = random.Random(0)
    own = Processors(env, None)
    stations = [Station(env, own) for _ in range(processes)]
    lags: list[tuple[float, int]] = []
    shares = [stream.batch // processes + (index < stream.batch % processes) for index in range(processes)]

    def message(station: Station, tokens: int) -> Steps:
        begun = env.now
        yield from station.work(sender.message_s + tokens * sender.token_s)
        lags.append((env.now - begun, tokens))

    def engine(number: int) -> Steps:
        yield env.timeout(draws.random() / stream.tokens_per_s)
        for step in count():
            for index, station in enumerate(stations):
                if tokens := shares[(index + number) % processes]:
                    env.process(message(station, tokens))
            # The answers end evenly over the steps.
            ended = (step + 1) * stream.batch // stream.answer_tokens - step * stream.batch // stream.answer_tokens
            for _ in range(ended):
                env.process(draws.choice(stations).work(sender.request_s))
            yield env.timeout(1 / stream.tokens_per_s)

    for number in range(engines):
        env.process(engine(number))
    env.run(seconds)
    if len(lags) < 0.95 * engines * min(processes, stream.batch) * seconds * stream.tokens_per_s:
        return math.inf  # the queue grows for ever
    return float(np.percentile(np.repeat(*map(np.asarray, zip(*lags, strict=True))), 99))


def processes_needed(sender: Sender, engines: int, stream: Stream, most: int = 64) -> int | None:
    """Return the least number of processes whose lag is below one step of an engine, or None if `most` are too few."""
    least_work = engines * stream.tokens_per_s * (stream.batch * sender.token_s)
    for number in range(max(1, math.ceil(least_work)), most + 1):
        if lag_s(sender, engines, number, stream) < 1 / stream.tokens_per_s:
            return number
    return None


def tokens_per_s(sender: Sender, stream: Stream) -> float:
    """Return the number of tokens per second at which a process has no time left, requests included."""
    per_token = sender.token_s + sender.message_s / stream.batch + sender.request_s / stream.answer_tokens
    return 1 / per_token


def requests_per_s(times: Mapping[str, RequestTimes], size: str) -> dict[str, float]:
    """Return how many requests with one image a process can receive per second, if they have one token."""
    return {"service": 1 / times[size].service_s, "tokenizer": 1 / times[size].tokenizer_s}
