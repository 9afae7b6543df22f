"""Tests for a worker replica with real processes, which need no cluster."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindie_mm.errors import ProcessDied
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from service.ray.plan import LOST, calling, plan_of
from service.ray.worker_replica import WorkerReplica

MiB = 2**20
CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}).encode()
LONG = {"max_tokens": 100, "ignore_eos": True}
SETTINGS = {"device": "cpu", "decoders": 1, "arena_bytes": 64 * MiB, "kv_cache_bytes": 64 * MiB}


async def begin(replica: WorkerReplica, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    """Return the first message of the answer to a request."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    scope = calling(scope)
    async with aclosing(replica.answer(scope, body, 1)) as messages:
        first, *_ = pickle.loads(await anext(messages))
    assert isinstance(first, dict)
    return first


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.*__del__:pytest.PytestUnraisableExceptionWarning")  # Python calls it, too
async def test_the_health_check_fails_if_the_engine_cannot_be_restarted(tmp_path: Path):
    """Ray Serve replaces such a replica."""
    model = shutil.copytree(EMBEDDED, tmp_path / "model")
    replica = WorkerReplica.__new__(WorkerReplica)
    await replica.__init__(plan_of(SETTINGS | {"model": str(model)}))  # type: ignore[misc] # Ray Serve awaits it, too
    try:
        await replica.check_health()
        assert (await replica.record_routing_stats())["up"]
        (model / "config.json").unlink()
        psutil.Process(replica._worker.engine.pid).kill()
        reason = ""
        while "config.json" not in reason:
            try:
                await replica.check_health()
            except ProcessDied as error:
                reason = str(error)
            await asyncio.sleep(0.01)
        assert not (await replica.record_routing_stats())["up"]
        assert (await begin(replica, "POST", "/v1/chat/completions", CHAT))["status"] == 503
    finally:
        await replica.__del__()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.*__del__:pytest.PytestUnraisableExceptionWarning")  # Python calls it, too
async def test_a_request_that_crashes_the_engine_twice_is_marked_for_the_ingress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MINDIE_MM_FAULTS", str(tmp_path))
    trigger = tmp_path / "engine.received"
    replica = WorkerReplica.__new__(WorkerReplica)
    await replica.__init__(plan_of(SETTINGS))  # type: ignore[misc] # Ray Serve awaits it, too
    try:
        trigger.touch()
        request = asyncio.create_task(begin(replica, "POST", "/v1/chat/completions", CHAT))
        probe = await begin(replica, "GET", "/health")
        while probe["status"] == 200:
            probe = await begin(replica, "GET", "/health")
        assert probe["status"] == 503
        assert LOST not in probe, "another worker may answer a probe"
        assert not trigger.exists()
        trigger.touch()
        answer = await request
        assert (answer["status"], answer.get(LOST)) == (503, True)
        assert not trigger.exists()
    finally:
        await replica.__del__()


async def send(
    replica: WorkerReplica, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> Any:
    """Return status and body of an answer."""
    headers = [(b"content-type", kind.encode())]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    messages: list[Any] = []
    async with aclosing(replica.answer(calling(scope), body, 1)) as batches:
        async for batch in batches:
            messages += pickle.loads(batch)
    return messages[0]["status"], b"".join(message["body"] for message in messages[1:])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:.*__del__:pytest.PytestUnraisableExceptionWarning")  # Python calls it, too
async def test_every_replica_finds_all_files_and_batches_in_the_shared_folder(tmp_path: Path):
    settings = SETTINGS | {"files_path": str(tmp_path / "files")}
    first, second = (WorkerReplica.__new__(WorkerReplica) for _ in range(2))
    replicas = []
    try:
        for replica in (first, second):
            await replica.__init__(plan_of(settings))  # type: ignore[misc] # Ray Serve awaits it, too
            replicas.append(replica)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": json.loads(CHAT) | LONG}
        written = b"\n".join(json.dumps(line | {"custom_id": f"{index}"}).encode() for index in range(50))
        form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        form += b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + written + b"\r\n--B--\r\n"
        _, made = await send(first, "POST", "/v1/files", form, "multipart/form-data; boundary=B")
        file_id = json.loads(made)["id"]
        assert await send(second, "GET", f"/v1/files/{file_id}/content") == (200, written)
        asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        for cancels in (False, True):
            _, made = await send(first, "POST", "/v1/batches", json.dumps(asked).encode())
            path = f"/v1/batches/{json.loads(made)['id']}"
            if cancels:
                assert (await send(second, "POST", f"{path}/cancel"))[0] == 200
            ends = {"completed", "cancelled"}
            while (batch := json.loads((await send(second, "GET", path))[1]))["status"] not in ends:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert batch["request_counts"]["total"] == 50
            assert batch["status"] == ("cancelled" if cancels else "completed")
        status, _ = await send(first, "DELETE", f"/v1/files/{file_id}")
        assert (status, (await send(second, "GET", f"/v1/files/{file_id}"))[0]) == (200, 404)
    finally:
        for replica in replicas:
            await replica.__del__()
