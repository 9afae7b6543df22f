"""Chooses the worker replica of a request. Ray Serve runs this router in each ingress replica."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from mindie_mm.routing import Candidate, HeldContent, order
from service.ray.content import Loads

SURPLUS_TOKENS = 8192
"""Default of `surplus_tokens`: a replica that holds a request's content gets the request if it has at most this number
of queued tokens more than the least loaded replica."""
_HELD_TOKENS = 2**18
"""Capacity of a replica that has not reported the capacity of its KV cache."""


class ContentRouter(RequestRouter):  # type: ignore[misc] # Ray has no types
    """Applies `mindie_mm.routing.order` to replicas. The argument `route` of a call is the `Route` of its request.

    A replica's queued tokens are those that it has reported, or those of the requests that this router has sent there
    and that are in progress, if this number is higher. A replica that stores the response to which the request refers
    comes first. Replicas that have received the request come last, and before them replicas on the same nodes, which
    may have failed, and replicas whose engine is down.
    """

    def initialize_state(self, surplus_tokens: int = SURPLUS_TOKENS) -> None:
        """Create the router's state. `surplus_tokens` is an argument of `order`."""
        self._surplus_tokens = surplus_tokens
        self._held: dict[str, HeldContent] = {}
        self._loads = Loads()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the candidates in the order in which the request should be offered to them."""
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        route = pending_request.kwargs.get("route") if pending_request is not None else None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # otherwise full replicas are asked in a busy loop
        reports = [replica.routing_stats for replica in candidate_replicas]
        candidates = [
            Candidate(
                name,
                max(int(report.get("queued_tokens", 0)), self._loads[name]),
                self._held[name].num_tokens(route.contents) if route is not None and name in self._held else 0,
            )
            for name, report in zip(names, reports, strict=True)
        ]
        ranked = order(candidates, self._surplus_tokens, route.first_key if route is not None else b"", spread=False)
        tried, nodes = (route.tried, route.nodes) if route is not None else ([], [])
        keeper = None if route is None else route.keeper
        ranked.sort(
            key=lambda index: (
                names[index] in tried,
                keeper is not None and reports[index].get("name") != keeper,
                not reports[index].get("up", True),
                candidate_replicas[index].node_id in nodes,
            )
        )
        if route is not None:
            route.names = names
            ranked = [index for index in ranked if route.only in (None, names[index])]
        return [[candidate_replicas[index]] for index in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record that a replica has accepted a request."""
        del result
        if (route := pending_request.kwargs.get("route")) is None:
            return
        name = replica_id.unique_id
        if (replica := self.curr_replicas.get(replica_id)) is not None:
            route.nodes.append(replica.node_id)
        if name not in self._held:
            report = {} if replica is None else replica.routing_stats
            for gone in self._held.keys() - {other.unique_id for other in self.curr_replicas}:
                del self._held[gone]
            self._held[name] = HeldContent(int(report.get("kv_cache_tokens", _HELD_TOKENS)))
        self._held[name].add(route.contents)
        route.begin(name, self._loads)
