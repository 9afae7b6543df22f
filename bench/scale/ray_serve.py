"""What Ray Serve adds to a request: `python -m bench.scale.ray_serve`.

The ingress, the router and `WorkerReplica.answer` are those of the service. Behind them, a small application sends
chunks at a given rate, because a model on the CPU is too slow to reach the limit of an ingress replica. The same
application also runs directly in uvicorn, and behind each of Ray's two fronts. The clients run on the same machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from bench import report
from bench.scale.ray_chunks import chunks
from tools.arguments import parser

MiB = 2**20
REQUESTS, LARGE_REQUESTS = 200, 5
LARGE_BYTES = 48 * MiB
CHUNKS, STREAMS, RATE, SECONDS = 300, 32, 50, 6
FRONTS = ("direct", "ray", "ray_haproxy")


def direct(port: int) -> None:
    """Serve the application without Ray, in this process."""
    uvicorn.run(chunks, port=port, http="httptools", loop="uvloop", log_level="warning", access_log=False)


def on_ray(port: int, stopping: Any, ready: Any, environment: dict[str, str]) -> None:
    """Serve the application on a local Ray, in this process."""
    os.environ.update(environment)
    import ray  # imported late, because Ray and Serve read the environment when they are imported
    from ray import serve

    from bench.scale.ray_source import Source
    from service.ray.content_router import ContentRouter
    from service.ray.ingress import Ingress
    from service.ray.plan import plan_of

    ray.init(num_cpus=4, object_store_memory=500 * MiB, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    source = serve.deployment(Source).options(
        max_ongoing_requests=1000, request_router_config={"request_router_class": ContentRouter}
    )
    ingress = serve.deployment(Ingress).options(max_ongoing_requests=1000)
    serve.run(ingress.bind(plan_of({"log_level": "warning"}), source.bind()))
    ready.set()
    stopping.wait()
    serve.shutdown()
    ray.shutdown()


async def measured(url: str) -> dict[str, float]:
    """Return the figures of the server at `url`."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def request(body: bytes) -> float:
            begun = time.perf_counter()
            async with http.post(f"{url}/v1/chat/completions", data=body) as response:
                await response.read()
                assert response.status == 200, await response.text()
            return time.perf_counter() - begun

        async def stream(chunks: int, interval_s: float) -> list[float]:
            async with http.post(f"{url}/?chunks={chunks}&interval_s={interval_s}", data=b"{}") as response:
                lines = ((time.monotonic(), line) async for line in response.content)
                return [received - float(line[6:]) async for received, line in lines if line.startswith(b"data: ")]

        small = b'{"messages": [{"role": "user", "content": "' + b"word " * 200 + b'"}]}'
        large = b'{"messages": [{"role": "user", "content": "' + b"w" * LARGE_BYTES + b'"}]}'
        for _ in range(20):
            await request(small)
        one = [await request(small) for _ in range(REQUESTS)]
        many = [await request(large) for _ in range(LARGE_REQUESTS)]
        lags = await stream(CHUNKS, 0.01)
        begun = time.perf_counter()
        at_once = await asyncio.gather(*(stream(RATE * SECONDS, 1 / RATE) for _ in range(STREAMS)))
        seconds = time.perf_counter() - begun
        together = [lag for found in at_once for lag in found]
        return {
            "request_ms": round(report.median(one) * 1000, 2),
            "request_48_mib_ms": round(report.median(many) * 1000, 1),
            "chunk_lag_ms": round(report.median(lags) * 1000, 2),
            "streams": STREAMS,
            "chunks_per_s_sent": STREAMS * RATE,
            "chunks_per_s": round(len(together) / seconds, 1),
            "chunk_lag_of_streams_ms": round(report.median(together) * 1000, 2),
        }


def of_front(front: str) -> dict[str, float]:
    """Start the application behind `front`, measure it, and stop it."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    stopping, ready = context.Event(), context.Event()
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(front == "ray_haproxy")),
    }
    target: Callable[..., None] = direct if front == "direct" else on_ray
    process = context.Process(
        target=target, args=(port,) if front == "direct" else (port, stopping, ready, environment)
    )
    process.start()
    try:
        if front != "direct":
            assert ready.wait(600), "Ray Serve did not start"
        asyncio.run(_until_open(port))
        return asyncio.run(measured(f"http://127.0.0.1:{port}"))
    finally:
        stopping.set()
        if front == "direct":
            process.terminate()
        process.join(60)
        process.kill()


async def _until_open(port: int) -> None:
    deadline = time.monotonic() + 60
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"http://127.0.0.1:{port}/") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < deadline, "the server does not answer"
            await asyncio.sleep(0.2)


def main() -> None:
    figures: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    for front in FRONTS:
        figures[front] = of_front(front)
    figures["load_average_after"] = os.getloadavg()[0]
    report.write("ray_serve", figures)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
