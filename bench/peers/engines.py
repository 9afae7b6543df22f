"""The engines that are compared: our service, OpenVINO GenAI, llama.cpp's server and vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil
import pybase64

from bench.peers.convert import gguf, openvino
from bench.peers.install import PYTHON, SERVER, VLLM
from bench.serve.load import QUESTION, Answer, Load, Outcome, Server, drive, session
from tools.serving import running_service

START_S = 300.0


class Engine(Protocol):
    """A running engine."""

    async def drive(self, load: Load, numbers: Iterator[int]) -> Outcome:
        """Send the requests of the load. Raise RuntimeError if one fails."""

    def pss(self) -> int:
        """Return the proportional set size of all processes of the engine in bytes."""


class HttpEngine:
    """A server with OpenAI's interface."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self._pid = pid

    async def drive(self, load: Load, numbers: Iterator[int]) -> Outcome:
        """Send each request over a new connection, because llama-server sometimes drops reused connections."""
        images = await asyncio.to_thread(load.images, numbers)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as http:
            outcome = await drive(http, self._server, load, images)
        if faults := [answer.fault for answer in outcome.answers if answer.fault]:
            raise RuntimeError(f"{self._server.url}: {faults[0]}")
        return outcome

    def pss(self) -> int:
        return tree_pss(self._pid)


class OpenVinoEngine:
    """A process that runs bench/peers/runner.py."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    async def drive(self, load: Load, numbers: Iterator[int]) -> Outcome:
        """Write the images to files, and let the process answer one request per file."""
        files = []
        for index, url in enumerate(await asyncio.to_thread(load.images, numbers)):
            files.append(self._folder / f"{index}.jpg")
            files[-1].write_bytes(pybase64.b64decode(url.partition(",")[2]))
        job = {"images": [*map(str, files)], "tokens": load.max_tokens, "clients": load.concurrent}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job | {"question": QUESTION}).encode() + b"\n")
        reply = await self.reply()
        return Outcome([_answer(**answer) for answer in reply["answers"]], reply["total_s"])

    async def reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with suppress(json.JSONDecodeError):  # OpenVINO also prints lines that are not replies
                reply: dict[str, Any] = json.loads(line)
                return reply
        raise RuntimeError("OpenVINO's process ended; see its output above")

    def pss(self) -> int:
        return tree_pss(self._process.pid)


def _answer(begun: float, ended: float, token_s: Sequence[float]) -> Answer:
    return Answer(begun, ended, drawn=[(time_s, number) for number, time_s in enumerate(token_s, 1)])


def tree_pss(pid: int) -> int:
    """Return the sum of the proportional set sizes of a process and its descendants in bytes."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True)))


@asynccontextmanager
async def ours(weights: str, dtype: str, checkpoint: Path, threads: int) -> AsyncIterator[Engine]:
    """Run `mindie-mm serve`. It guesses no tokens, because the others do not, and random weights repeat themselves."""
    with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as folder:
        settings: dict[str, Any] = {
            "spool": Path(folder) / "spool",
            "num_threads": threads,
            "kv_cache_bytes": 512 << 20,
        }
        settings |= {"weights": weights, "dtype": dtype, "num_speculative_tokens": 0}
        with running_service(settings, Path(folder) / "log", checkpoint) as service:
            yield HttpEngine(Server(service.url, service.model), service.process.pid)


@asynccontextmanager
async def llama(precision: str, checkpoint: Path, threads: int) -> AsyncIterator[Engine]:
    """Run llama-server. Its prompt cache is disabled, because every image is new."""
    model, projector = await asyncio.to_thread(gguf, checkpoint, precision)
    flags = ["-m", model, "--mmproj", projector, "-t", threads, "-tb", threads, "-np", 4, "-c", 16384, "--cache-ram", 0]
    # With repacked weights, this version uses AMX instructions, which cause SIGILL in some virtual machines.
    flags += ["--no-repack", "--jinja", "--port", port := _free_port()]
    flags += ["-ctk", "f32", "-ctv", "f32"] if precision == "f32" else []
    async with _server(SERVER, *flags, port=port) as engine:
        yield engine


@asynccontextmanager
async def vllm(dtype: str, checkpoint: Path, threads: int) -> AsyncIterator[Engine]:
    """Run `vllm serve` in eager mode, without torch.compile."""
    flags = ["serve", checkpoint, "--served-model-name", "any", "--dtype", dtype, "--max-model-len", 4096]
    flags += ["--enforce-eager", "--max-num-seqs", 16, "--port", port := _free_port()]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    async with _server(VLLM, *flags, port=port, environment=settings) as engine:
        yield engine


@asynccontextmanager
async def _server(
    command: Path, *arguments: object, port: int, environment: dict[str, str] | None = None
) -> AsyncIterator[Engine]:
    """Run a server with OpenAI's interface until the context ends."""
    process = await asyncio.create_subprocess_exec(
        command,
        *map(str, arguments),
        env=os.environ | (environment or {}),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_healthy(url)
        yield HttpEngine(Server(url, "any"), process.pid)
    finally:
        with suppress(ProcessLookupError):  # it may have died
            process.terminate()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def _until_healthy(url: str) -> None:
    deadline = time.monotonic() + START_S
    async with session() as http:
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not start within {START_S:g} s")


@asynccontextmanager
async def genai(precision: str, checkpoint: Path, threads: int) -> AsyncIterator[Engine]:
    """Run OpenVINO GenAI in its own process."""
    model = await asyncio.to_thread(openvino, checkpoint, precision)
    folder = Path(tempfile.mkdtemp(prefix="mindie_mm-bench-"))
    runner = Path(__file__).with_name("runner.py")
    process = await asyncio.create_subprocess_exec(
        PYTHON, runner, model, str(threads), precision,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        engine = OpenVinoEngine(process, folder)
        await engine.reply()
        yield engine
    finally:
        process.terminate()
        await process.wait()
        shutil.rmtree(folder)


ENGINES: dict[str, Callable[[Path, int], AbstractAsyncContextManager[Engine]]] = {
    "mindie_mm": partial(ours, "auto", "float32"),
    "mindie_mm_bf16": partial(ours, "auto", "bfloat16"),
    "mindie_mm_int8": partial(ours, "int8", "float32"),
    "openvino_f32": partial(genai, "f32"),
    "openvino_bf16": partial(genai, "bf16"),
    "openvino_int8": partial(genai, "int8"),
    "llama_f32": partial(llama, "f32"),
    "llama_q8_0": partial(llama, "q8_0"),
    "vllm_f32": partial(vllm, "float32"),
    "vllm_bf16": partial(vllm, "bfloat16"),
}
"""Functions that start an engine, by the name of the engine. They get the checkpoint and the number of threads."""
