"""Trace an image question of four tokens over HTTP: `python -m tools.trace_http`.

The service, its tokenizer process and its engine process run as threads of this process, on the embedded checkpoint.
They exchange their usual messages. Decoder processes are not traced. The question is asked over a TCP connection, after
a question about another image. The output lists the project's files in the order in which the request enters them,
the functions that it enters in each, and the number of calls. Comprehensions count as parts of their functions.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import httpx2
import uvicorn
from PIL import Image

from mindie_mm.engine.process.engine_process import load_engine
from mindie_mm.engine.ranks import ALONE
from mindie_mm.engine.requests.engine_messages import Start
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.ipc import Child, ChildChannel, Lifeline, socket_pair
from mindie_mm.settings.config import EngineConfig, MiB, ServiceConfig, WorkerConfig
from mindie_mm.worker.worker import Worker
from service.app import create_app, require_places
from service.http.connection import Connection
from tools.arguments import parser
from tools.demo import data_url
from tools.trace_request import NUM_TOKENS, ROOT, Trace, show

FOLDERS = (ROOT / "mindie_mm", ROOT / "service")


class HTTPTrace(Trace):
    """A counter of calls to the library's and the service's functions."""

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._names:
            path = Path(code.co_filename)
            own = any(map(path.is_relative_to, FOLDERS)) and not code.co_name.endswith(("comp>", "<genexpr>"))
            self._names[code] = (str(path.relative_to(ROOT)), code.co_qualname) if own else None
        return self._names[code]


class _Lifeline(Lifeline):
    """A lifeline that never exits the process, because the worker is a thread of it."""

    def __init__(self) -> None:
        self._descriptors = []
        self._lock = threading.Lock()
        self._actions = []


class _Thread(threading.Thread):
    """A worker that runs as a thread, with the part of subprocess.Popen that `Child` uses."""

    def __init__(self, module: str, arguments: tuple[str, ...], descriptor: int) -> None:
        super().__init__(name=module, daemon=True)
        self._module, self._arguments, self._descriptor = module, arguments, descriptor
        self.pid = os.getpid()
        self.start()

    def run(self) -> None:
        with ChildChannel(self._descriptor) as channel:
            importlib.import_module(self._module).main(channel, _Lifeline(), *self._arguments)

    @property
    def returncode(self) -> int | None:
        return None if self.is_alive() else 0

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self.join()
        return 0

    def terminate(self) -> None:
        """Do nothing: the thread ends when its channel is closed."""

    kill = terminate


class _Threads(ForkClient):
    """A fork server's client that starts workers as threads instead."""

    def __init__(self) -> None:
        """Start nothing."""

    async def allows(self, *_: str | None) -> bool:
        return True

    async def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, spare: bool = False
    ) -> Child:
        ours, theirs = socket_pair()
        return await Child.adopt(_Thread(module, arguments, theirs.detach()), ours)


async def ask(port: int, colour: str) -> None:
    """Ask about an image of the given color, and read the whole stream."""
    image = {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (224, 224), colour))}}
    question = {"role": "user", "content": [image, {"type": "text", "text": "What color is it?"}]}
    body = {"messages": [question], "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text


async def traced(folder: Path) -> HTTPTrace:
    """Return the trace of a question to a service with its spool in `folder`."""
    config = ServiceConfig(port=0, spool=folder / "spool", reclaim_interval_s=3600)
    engine = EngineConfig(device="cpu", prefix_caching=False)
    require_places(config)
    load_engine(Start(None, engine), ALONE)  # imports what the workers need, because tracing imports takes long
    with HTTPTrace() as trace:
        async with await Worker.start(WorkerConfig(engine=engine, arena_bytes=64 * MiB), forks=_Threads()) as worker:
            app = create_app(worker, config)
            server = uvicorn.Server(uvicorn.Config(app, port=0, http=Connection, ws="none", log_level="warning"))
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for this
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            await ask(port, "blue")
            trace.calls.clear()
            await ask(port, "red")
            found = trace.calls.copy()
            server.should_exit = True
            await serving
    trace.calls = found
    return trace


def main() -> None:
    """Print the trace and its counts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(signal, "signal"),  # only a main thread can handle signals
        patch.object(asyncio.SelectorEventLoop, "add_signal_handler"),
    ):
        show(asyncio.run(traced(Path(folder))))


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
