"""Tests for replicas and nodes that end, on a cluster of three nodes. The tests share the cluster, in this order."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psutil
import pytest

from mindie_mm.errors import InputError
from tests.service.ray.conftest import Cluster, dead_arenas, workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),  # warnings that Ray's own code causes
]
WAIT_S = 900.0


def ask(port: int, text: str, **more: Any) -> tuple[int, str]:
    """Return the status and the body of the answer to a chat."""
    body = {"messages": [{"role": "user", "content": text}], "ignore_eos": True, "temperature": 0, **more}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def engine_seconds(worker: psutil.Process) -> float:
    total = 0.0
    for child in worker.children():
        times = child.cpu_times()
        total += times.user + times.system
    return total


def busiest() -> psutil.Process:
    """Return the worker whose processes have used most processor time in the last second."""
    found = workers()
    before = [engine_seconds(worker) for worker in found]
    time.sleep(1)
    used = [engine_seconds(worker) - earlier for worker, earlier in zip(found, before, strict=True)]
    return found[used.index(max(used))]


def tokens(answer: tuple[int, str]) -> int:
    status, body = answer
    assert status == 200, body
    count: int = json.loads(body)["usage"]["completion_tokens"]
    return count


def metric(port: int, sample: str) -> float:
    """Return the sum of a metric over all workers. `sample` is a regular expression for its name and labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(rf"^mindie_mm:{sample}.*\}} (.*)$", page, re.MULTILINE)
    assert len(found) == 2, page
    return sum(map(float, found))


def test_a_second_application_of_the_same_name_is_refused(cluster: Cluster) -> None:
    from service.ray.running import require_free  # imported late, because it needs Ray Serve

    with pytest.raises(InputError, match="the application 'tiny' already runs on this cluster"):
        require_free("tiny", "auto")
    require_free("another name", "auto")
    assert cluster.num_workers() == 2


def test_a_disconnect_ends_a_stream(cluster: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=900)
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert [value for name, value in response.getheaders() if name.lower() == "x-request-id"] == ["mine"]
    assert response.read(6) == b"data: "
    aborted = 'request_success_total{.*finished_reason="abort"'
    before = metric(cluster.port, aborted)
    response.close()
    connection.close()
    wait(lambda: metric(cluster.port, aborted) == before + 1, "the request still runs")


def test_a_killed_replica_loses_only_streams_that_have_begun(cluster: Cluster) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(ask, cluster.port, "hi", max_tokens=1500)
        stream = pool.submit(ask, cluster.port, "hi", max_tokens=3000, stream=True)
        worker = busiest()
        children = worker.children(recursive=True)
        worker.kill()
        assert tokens(whole.result()) == 1500
        status, body = stream.result()
    assert status == 200
    *_, error, last = body.split("\n\n")[:-1]
    assert last == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "ServiceUnavailableError"
    _, alive = psutil.wait_procs(children, WAIT_S)
    assert not alive
    assert not dead_arenas()
    wait(lambda: len(workers()) == cluster.num_workers() == 2, "the replica is not replaced")


def test_the_requests_of_a_removed_node_are_answered_by_another(cluster: Cluster) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, cluster.port, f"hi {number}", max_tokens=1500) for number in range(8)]
        worker = busiest()
        before = {child.pid: child for worker in workers() for child in worker.children(recursive=True)}
        cluster.remove_node_of(worker)
        assert not any(one.done() for one in asked)
        assert [tokens(one.result()) for one in asked] == [1500] * 8
    worker.wait(WAIT_S)
    wait(lambda: len(workers()) == cluster.num_workers() == 2, "the replicas are not replaced")
    kept = {child.pid for worker in workers() for child in worker.children(recursive=True)}
    _, alive = psutil.wait_procs([child for pid, child in before.items() if pid not in kept], WAIT_S)
    assert not alive
    wait(lambda: not dead_arenas(), "an arena is left")


def test_streams_are_finished_while_replicas_are_added_and_removed(cluster: Cluster) -> None:
    cluster.fill()
    answers: list[tuple[int, str]] = []

    def stream(text: str, ended: threading.Event) -> None:
        while not ended.is_set():
            answers.append(ask(cluster.port, text, max_tokens=200, stream=True))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for number_wanted, text in ((3, "word " * 1000), (2, "hi")):
            ended = threading.Event()
            streams = [pool.submit(stream, f"{number} {text}", ended) for number in range(6)]
            try:
                wait(lambda wanted=number_wanted: cluster.num_workers() == wanted, f"no {number_wanted} replicas")
            finally:
                ended.set()
            for one in streams:
                one.result()
    for status, body in answers:
        assert (status, body[-len("data: [DONE]\n\n") :]) == (200, "data: [DONE]\n\n")
        assert '"finish_reason":"length"' in body
        assert '"error"' not in body
    wait(lambda: len(workers()) == 2, "the removed replica does not end")
    assert not dead_arenas()


class Stream:
    """A streamed chat in a thread of its own."""

    def __init__(self, port: int, text: str) -> None:
        self.has_begun = threading.Event()
        self.events: list[str] = []
        self._port, self._text = port, text
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": self._text}], "max_tokens": 2000, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), headers)
        with closing(connection), connection.getresponse() as response:
            for line in response:
                if line.startswith(b"data: "):
                    self.events.append(line.decode().removeprefix("data: ").strip())
                    self.has_begun.set()

    def ended_by(self) -> str:
        """Return "length" for a whole answer, or the type of the error in the last event but one."""
        *_, last, done = self.events
        assert done == "[DONE]"
        event = json.loads(last)
        return str(event["error"]["type"] if "error" in event else event["choices"][0]["finish_reason"])


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_each_of_20_streams_ends_or_goes_on_when_the_node_of_a_worker_dies(cluster: Cluster, how: str) -> None:
    cluster.fill()
    streams = [Stream(cluster.port, f"{number} hi") for number in range(20)]
    for stream in streams:
        assert stream.has_begun.wait(WAIT_S)
    with contextlib.ExitStack() as frozen:
        if how == "killed":
            cluster.remove_node_of(busiest())
        else:
            frozen.enter_context(cluster.frozen_node_of(busiest()))
        deadline = time.monotonic() + WAIT_S
        for stream in streams:
            stream.thread.join(deadline - time.monotonic())
        assert not [stream for stream in streams if stream.thread.is_alive()], "a stream hangs"
    ends = Counter(stream.ended_by() for stream in streams)
    assert ends["ServiceUnavailableError"] > 0
    assert ends.keys() <= {"ServiceUnavailableError", "length"}
    cluster.fill()
    wait(lambda: len(workers()) == cluster.num_workers() == 2, "the replicas are not replaced")
    assert tokens(ask(cluster.port, "hi", max_tokens=5)) == 5
    wait(lambda: not dead_arenas(), "an arena is left")


def test_a_worker_leaves_neither_process_nor_arena_however_it_ends(cluster: Cluster) -> None:
    import ray  # imported late, because it takes seconds

    found = workers()
    children = [child for worker in found for child in worker.children(recursive=True)]
    actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if "#WorkerReplica#" in one["name"]]
    ray.kill(ray.get_actor(**actors[0]))
    wait(lambda: not all(worker.is_running() for worker in found), "ray.kill has no effect")
    for worker in found:
        if worker.is_running():
            worker.terminate()
    _, alive = psutil.wait_procs([*found, *children], WAIT_S)
    assert not alive
    wait(lambda: not dead_arenas(), "an arena is left")
