"""The model of hosts and clusters, compared with facts of queueing theory and of caches."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy

from bench.scale.hit_rates import Replicas, Router, Traffic, expected_hit_rate, simulate
from bench.scale.host import Host, Layout, Processors, Station, closed_loop
from bench.scale.limits import decoders
from bench.scale.stage_times import RESULTS, EngineTimes, RequestTimes, StageTimes, TokenTimes
from bench.scale.validation import Point, compare, predict
from mindie_mm.routing import Candidate, Content, order

TIMES = RequestTimes(0.001, 0.004, 0.002, 0.006, 0.012, prompt_tokens=100)
ENGINE = EngineTimes({1: 0.003, 2: 0.0035, 8: 0.006})
TOKENS = TokenTimes(0.0001, 0.0002, 0.0001, 0.0001)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_mean_wait_of_one_station_is_that_of_an_md1_queue(load: float) -> None:
    env = simpy.Environment()
    station = Station(env, Processors(env, None))
    arrivals, waits = random.Random(1), []

    def job():
        begun = env.now
        yield from station.work(1.0)
        waits.append(env.now - begun - 1.0)

    def source():
        for _ in range(15_000):
            yield env.timeout(arrivals.expovariate(load))
            env.process(job())

    env.run(env.process(source()))
    env.run()
    assert sum(waits) / len(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.08)


@pytest.mark.parametrize("layout", [Layout(ENGINE, TOKENS), Layout(ENGINE, TOKENS, 2, 2, 2, 1.2)])
def test_the_number_of_requests_in_a_host_is_their_rate_times_their_mean_time(layout: Layout) -> None:
    """Little's law. The number is integrated over time, and not computed from the requests' times."""
    env = simpy.Environment()
    host = Host(env, layout)
    arrivals = random.Random(2)
    inside, area, changed = 0, 0.0, 0.0

    def count(change: int) -> None:
        nonlocal inside, area, changed
        area += inside * (env.now - changed)
        inside, changed = inside + change, env.now

    def visit():
        count(1)
        yield from host.answer(TIMES, 4)
        count(-1)

    def source():
        for _ in range(300):
            yield env.timeout(arrivals.expovariate(30.0))
            env.process(visit())

    env.process(source())
    env.run()
    times = [request.ended_s - request.begun_s for request in host.finished]
    assert len(times) == 300
    rate = len(times) / changed
    assert area / changed == pytest.approx(rate * sum(times) / len(times))


def test_the_rate_is_that_of_the_bottleneck_and_never_more() -> None:
    times = replace(TIMES, decoder_s=0.05)
    run = closed_loop(Layout(ENGINE, TOKENS), times, 1, clients=8, requests=200)
    assert 0.97 / 0.05 < run.requests_per_s <= 1 / 0.05
    assert max(run.utilization, key=lambda name: run.utilization[name]) == "decoder"
    twice = closed_loop(Layout(ENGINE, TOKENS, decoders=2), times, 1, clients=8, requests=200)
    assert 0.97 * 2 / 0.05 < twice.requests_per_s <= 2 / 0.05


@pytest.mark.parametrize("number", [1, 2])
def test_processors_do_no_more_work_than_there_is_time(number: int) -> None:
    work_s = TIMES.client_s + TIMES.service_s + TIMES.tokenizer_s + TIMES.decoder_s + TIMES.engine_s
    layout = Layout(EngineTimes({}), engines=3, decoders=3, processors=number)
    run = closed_loop(layout, TIMES, 1, clients=12, requests=200)
    assert 0.9 * number / work_s < run.requests_per_s <= number / work_s


def test_one_client_waits_for_each_stage_once() -> None:
    run = closed_loop(Layout(ENGINE, TOKENS), TIMES, 3, clients=1, requests=5)
    outside = 0.0002 + 0.0003
    assert run.mean_wait_s == pytest.approx(0.025 + 2 * 0.003 + outside)  # the next step overlaps with the sending


def test_time_without_work_delays_a_request_but_needs_no_processor() -> None:
    times, engine = replace(TIMES, idle_s=0.02), replace(ENGINE, idle_s=0.001)
    run = closed_loop(Layout(engine, TOKENS, processors=1), times, 3, clients=1, requests=5)
    busy = closed_loop(Layout(ENGINE, TOKENS, processors=1), TIMES, 3, clients=1, requests=5)
    assert busy.mean_wait_s + 0.02 < run.mean_wait_s <= busy.mean_wait_s + 0.02 + 3 * 0.001 + 1e-9
    idle = closed_loop(Layout(EngineTimes({}), processors=1), replace(TIMES, idle_s=0.2), 1, clients=20, requests=400)
    assert idle.requests_per_s > 0.9 / 0.025  # the processor works for other requests meanwhile


def test_stage_times_count_what_a_service_adds_to_the_engine_alone() -> None:
    stages = ("client", "service", "tokenizer", "decoder", "engine")
    request = dict.fromkeys(stages, 0.002) | {"wait": 0.013}
    token = dict.fromkeys(stages, 0.0001) | {"engine": 0.0018, "wait": 0.002}
    measured = {
        "images": {"640x480": request},
        "repeated": {"640x480": request | {"wait": 0.009}},
        "token_1": token,
        "token_8": token,
        "decode_step": {"1": 0.0015, "2": 0.0016},
    }
    full_size = {"decoder_of_1": 0.01, "decoder_of_2": 0.011}
    times = StageTimes.of({"tiny": measured, "full_size": full_size}, "tiny")
    assert times.images["640x480"].idle_s == pytest.approx(0.003)
    assert times.repeated["640x480"].idle_s == 0.0  # its processes work at the same time
    assert times.engine.decode_step_s == pytest.approx({1: 0.0018, 2: 0.0019})
    assert times.engine.idle_s == pytest.approx(0.0002)
    assert times.contention == pytest.approx(1.1)


@pytest.mark.parametrize(("stages", "faster"), [({}, False), ({"1": 0.5}, True), ({"2": 0.5}, False)])
def test_stage_times_of_a_file_replace_the_common_ones_for_its_number_of_engines(
    stages: dict[str, float], faster: bool, tmp_path: Path
) -> None:
    common = json.loads((RESULTS / "scale_stages.json").read_text())["tiny"]
    point = {"checkpoint": "tiny", "size": "640x480", "clients": 1, "num_tokens": 2, "requests_per_s": 10.0}
    path = tmp_path / "points.json"
    given = {engines: {"tiny": scaled(common, factor)} for engines, factor in stages.items()}
    path.write_text(json.dumps({"points": [point], "stages": given}))
    (one,) = compare(path)
    rate = predict(Point(**point), StageTimes.read("tiny")).predicted.requests_per_s
    assert one.predicted.requests_per_s == pytest.approx(2 * rate if faster else rate, rel=0.1)


def scaled(figures: Any, factor: float) -> Any:
    """Return stage times multiplied by a factor."""
    if isinstance(figures, dict):
        return {name: scaled(one, factor) for name, one in figures.items()}
    return figures * factor if isinstance(figures, float) else figures


def test_the_number_of_decoders_is_the_ratio_of_the_times() -> None:
    times = replace(TIMES, decoder_s=0.045)
    assert decoders(times, 0.010).number == 5
    assert decoders(times, 0.100).number == 1
    slow = decoders(times, 0.002)
    assert (slow.number, slow.limit) == (None, "service")
    assert slow.utilization == pytest.approx(0.002 / times.service_s, rel=0.1)


@pytest.mark.parametrize("spread", [True, False])
def test_a_router_chooses_as_if_all_replicas_were_ranked(spread: bool) -> None:
    replicas = Replicas(12, cache_tokens=300, load=0.7, surplus_tokens=150)
    router = Router(replicas, spread=spread)
    draws = np.random.default_rng(3)
    for medium in draws.zipf(1.5, 300) % 40:
        content = Content(int(medium).to_bytes(8), 100)
        queued = draws.integers(0, 5, 12) * 100
        held = [record.num_tokens([content]) for record in router._held]
        candidates = [Candidate(str(index), int(queued[index]), held[index]) for index in range(12)]
        expected = order(candidates, 150, content.key, spread=spread)[0]
        assert router.choose(content, queued) == expected


def test_the_caches_of_replicas_hold_what_theory_expects() -> None:
    traffic = Traffic(media=600, exponent=1.0, media_tokens=100, text_tokens=10)
    replicas = Replicas(8, cache_tokens=2_000, load=0.5, surplus_tokens=10_000)
    by_content, by_chance = (
        simulate(policy, replicas, traffic, requests=4_000, warm_up=3_000).hit_rate for policy in ("content", "random")
    )
    # At random, each replica caches for itself. By content, all caches are like one.
    assert by_chance == pytest.approx(expected_hit_rate(traffic.popularity(), 20), abs=0.03)
    assert by_content == pytest.approx(expected_hit_rate(traffic.popularity(), 8 * 20), abs=0.03)
