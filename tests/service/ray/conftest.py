"""A Ray cluster of three nodes on this machine, with a service on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest

from mindie_mm.shm import survey

MiB = 2**20
_OBJECT_STORE_BYTES = 100 * MiB
SETTINGS = {
    "device": "cpu",
    "arena_bytes": 64 * MiB,
    "kv_cache_bytes": 64 * MiB,
    "decoders": 1,
    "grace_s": 240,
    "served_model_name": ["tiny"],
}


class Cluster:
    """Three nodes on one machine. The head node runs the ingress, and each other node has room for two workers."""

    def __init__(self, port: int) -> None:
        from ray.cluster_utils import Cluster as Nodes  # imported late, because Ray takes seconds to import

        self.port = port
        self._nodes = Nodes(
            initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": _OBJECT_STORE_BYTES}
        )
        self.others: list[Any] = []
        self.fill()
        self._nodes.connect(namespace="mindie_mm")

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._nodes.shutdown()

    def deploy(self, **more: Any) -> None:
        from ray import serve

        from service.ray.application import Arguments, build

        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})
        given = {"settings": SETTINGS, "worker_resources": {"CPU": 0, "host": 1}, **more}
        serve.run(build(Arguments.model_validate(given)), name="tiny")

    def fill(self) -> None:
        """Start nodes in place of those that were removed."""
        while len(self.others) < 2:
            node = self._nodes.add_node(num_cpus=0, resources={"host": 2}, object_store_memory=_OBJECT_STORE_BYTES)
            self.others.append(node)

    def remove_node_of(self, worker: psutil.Process) -> None:
        """End the node that runs `worker` as if its machine had failed."""
        node, _ = self._node_of(worker)
        self.others.remove(node)
        self._nodes.remove_node(node, allow_graceful=False)

    @contextmanager
    def frozen_node_of(self, worker: psutil.Process) -> Iterator[None]:
        """Stop the node that runs `worker` as if its machine had lost power: its connections stay open, but are silent.

        The node is removed afterwards.
        """
        node, raylet = self._node_of(worker)
        processes = [raylet, *raylet.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.kill()
            self.others.remove(node)
            self._nodes.remove_node(node, allow_graceful=False)

    def _node_of(self, worker: psutil.Process) -> tuple[Any, psutil.Process]:
        """Return the node that runs `worker`, and its raylet, which is the ancestor of all workers of the node."""
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in self.others}
        return next((raylets[parent.pid], parent) for parent in worker.parents() if parent.pid in raylets)

    def num_workers(self) -> int:
        """Return the number of worker replicas that run."""
        from ray import serve

        states = serve.status().applications["tiny"].deployments["WorkerReplica"].replica_states
        return int(states.get("RUNNING", 0))


def workers() -> list[psutil.Process]:
    """Return the processes of the worker replicas."""
    return [process for process in psutil.process_iter(["cmdline"]) if _is_worker(process.info["cmdline"])]


def _is_worker(command: list[str] | None) -> bool:
    return bool(command) and command[0].startswith("ray::ServeReplica:tiny:WorkerReplica")


def dead_arenas() -> list[str]:
    """Return the files of arenas whose owners are gone."""
    return [arena.file for arena in survey() if not arena.alive]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray.serve", exc_type=ImportError)
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        # On a busy machine, Serve would otherwise kill its proxy while the proxy starts.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    with closing(Cluster(port)) as running:
        running.deploy(
            num_replicas=2,
            max_replicas=3,
            target_queued_tokens=1000,
            autoscaling_config={"upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 1},
        )
        yield running
    assert not workers()
