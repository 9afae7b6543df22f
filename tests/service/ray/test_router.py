"""Tests for the router's order of replicas, which need no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mindie_mm.routing import Content
from service.ray.content import Route

pytest.importorskip("ray.serve", exc_type=ImportError)


class Id(NamedTuple):
    unique_id: str


class Replicas:
    """Running replicas with their reports, and a router that knows them."""

    def __init__(self, **reports: dict[str, Any]) -> None:
        from service.ray.content_router import ContentRouter  # imported late, because it needs Ray Serve

        self.router = ContentRouter.__new__(ContentRouter)  # without Ray's own state, which needs a cluster
        self.running = {
            name: SimpleNamespace(replica_id=Id(name), routing_stats=report, node_id=report.pop("node", name))
            for name, report in reports.items()
        }
        self.router._replicas = {}
        self.router.initialize_state(surplus_tokens=1000)

    async def order(self, route: Route) -> list[str]:
        request = SimpleNamespace(kwargs={"route": route}, routing_context=SimpleNamespace(should_backoff=False))
        ranked = await self.router.choose_replicas([*self.running.values()], request)
        return [replica.replica_id.unique_id for (replica,) in ranked]

    def routed(self, route: Route, name: str) -> None:
        request = SimpleNamespace(kwargs={"route": route})
        replica_id = Id(name)
        self.router._replicas = {replica_id: None} | {Id(other): one for other, one in self.running.items()}
        self.router.on_request_routed(request, replica_id, None)


def about(key: bytes, num_tokens: int = 100) -> Route:
    return Route((Content(key, num_tokens),), key)


async def test_content_goes_to_the_replica_that_holds_it():
    replicas = Replicas(a={}, b={}, c={})
    last = (await replicas.order(about(b"image")))[-1]
    first = about(b"image")
    replicas.routed(first, last)
    assert (await replicas.order(about(b"image")))[0] == last
    first.end()
    assert (await replicas.order(about(b"image")))[0] == last


async def test_a_request_that_refers_to_a_response_goes_to_the_replica_that_stores_it():
    replicas = Replicas(a={}, b={"queued_tokens": 10**6, "name": "0f"}, c={"name": "0a"})
    route = about(b"image")
    route.keeper = "0f"
    assert (await replicas.order(route))[0] == "b"
    route.tried.append("b")
    assert (await replicas.order(route))[-1] == "b"
    route.keeper = "gone"
    assert len(await replicas.order(route)) == 3


async def test_routers_that_do_not_know_each_other_choose_the_same_replica():
    keys = [b"%d" % number for number in range(20)]
    first = [[(await Replicas(a={}, b={}, c={}).order(about(key)))[0] for key in keys] for _ in range(2)]
    assert first[0] == first[1]
    assert set(first[0]) == {"a", "b", "c"}


async def test_a_replica_with_a_surplus_comes_last():
    replicas = Replicas(a={"queued_tokens": 1500}, b={"queued_tokens": 0})
    replicas.routed(about(b"image", 10), "a")
    assert await replicas.order(about(b"image")) == ["b", "a"]


async def test_the_requests_of_this_router_count_before_a_replica_reports_them():
    replicas = Replicas(a={}, b={})
    replicas.routed(about(b"image", 5000), "a")
    assert await replicas.order(about(b"image")) == ["b", "a"]


async def test_a_replica_without_an_engine_and_one_that_failed_come_last():
    replicas = Replicas(a={"up": False}, b={}, c={})
    route = about(b"image")
    assert (await replicas.order(route))[-1] == "a"
    assert route.has_others
    replicas.routed(route, "b")
    assert await replicas.order(route) == ["c", "a", "b"]
    replicas.routed(route, "c")
    replicas.routed(route, "a")
    assert not route.has_others


async def test_a_request_that_a_replica_lost_goes_to_another_node():
    replicas = Replicas(a={"node": "1"}, b={"node": "1"}, c={"node": "2", "queued_tokens": 5000})
    route = about(b"image")
    replicas.routed(route, "a")
    assert await replicas.order(route) == ["c", "b", "a"]
    assert (await replicas.order(about(b"text")))[-1] == "c"


async def test_a_replaced_replica_is_forgotten():
    replicas = Replicas(a={}, b={})
    replicas.routed(about(b"image"), "a")
    del replicas.running["a"]
    replicas.routed(about(b"image"), "b")
    assert replicas.router._held.keys() == {"b"}


async def test_a_request_for_one_replica_goes_nowhere_else():
    assert await Replicas(a={}, b={}, c={}).order(Route(only="b")) == ["b"]
    assert await Replicas(a={}).order(Route(only="b")) == []
