"""The service that `tools.fault_matrix` kills, and its clients."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil
from PIL import Image, PngImagePlugin

from tools.demo import draw_shape
from tools.fault_points import Point
from tools.serving import RunningService, running_service

DEADLINE_S = 240.0
"""Time after which a request counts as hanging, and a process as not restarted."""
NUM_DECODERS = 2
BATCH_REQUESTS = 6
"""Number of requests of a batch."""
SETTINGS: dict[str, object] = {
    "arena_bytes": 32 << 20,
    "decoders": NUM_DECODERS,
    "dtype": "float32",
    "kv_cache_bytes": 4 << 20,  # 2048 tokens, so that two answers of `Rig.preempt` preempt each other
    "encoder_cache_bytes": 0,
    "prefix_caching": False,
    "grace_s": 0.2,
    "pooling": "mean",  # embeddings and scores are answered, too
    "max_num_batched_tokens": 24,  # each prompt is prefilled in chunks, also alone
    "request_timeout_s": DEADLINE_S,
}
MODULES = {
    "fork_server": "mindie_mm.processes.fork_server",
    "tokenizer": "mindie_mm.tokenize.stage.tokenizer_process",
    "engine": "mindie_mm.engine.process.engine_process",
}


_FORKS = re.compile(r'^mindie_mm:processes\{.*process="fork_server"\} 1', re.MULTILINE)
"""Metric of a fork server that is ready."""


class Rig:
    """A context manager for a service with armed fault points.

    The property `service` starts a new service if the last service was dropped.
    """

    def __init__(
        self,
        folder: Path,
        running: Callable[..., AbstractContextManager[RunningService]] = running_service,
        device: str = "auto",
    ) -> None:
        """Create a rig without starting the service.

        Args:
            folder: Folder for logs, the spool and trigger files.
            running: Context manager that starts the service, like `tools.serving.running_service`.
            device: Device of the service's engine.

        """
        self._running = running
        self._device = device
        self.folder = folder
        self.spool = folder / "spool"
        self.files = folder / "files"
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self.num_engines = 1
        """Number of engines of the service. `require` changes it."""
        self._stack = ExitStack()
        self._service: RunningService | None = None
        self._starts = 0
        self._images = 0
        self._long: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def service(self) -> RunningService:
        if self._service is None:
            self._starts += 1
            log = self.folder / f"log-{self._starts}"
            settings = SETTINGS | {"spool": self.spool, "files_path": self.files, "device": self._device}
            settings |= {"replicas": self.num_engines}
            environment = {"MINDIE_MM_FAULTS": str(self.faults)}
            self._service = self._stack.enter_context(self._running(settings, log, environment=environment))
        return self._service

    def require(self, num_engines: int) -> None:
        """Stop the service unless it has this number of engines. The next service has this number."""
        if self.num_engines != num_engines:
            self.close()
        self.num_engines = num_engines

    def close(self) -> None:
        """Stop the service if it is running. The next use of `service` starts a new service."""
        self._stack.close()
        self._service = None

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the service's processes by role. Two engines have the role `replica`."""
        api = psutil.Process(self.service.process.pid)
        processes = {"api": [api]}
        engine = "engine" if self.num_engines == 1 else "replica"
        for child in api.children():
            with suppress(psutil.NoSuchProcess):
                command = child.cmdline()
                for role, module in MODULES.items():
                    if module in command:
                        processes.setdefault(engine if role == "engine" else role, []).append(child)
        if servers := processes.get("fork_server"):
            # A copy of the fork server has the same command line.
            processes["fork_server"] = [min(servers, key=psutil.Process.create_time)]
        with suppress(KeyError, psutil.NoSuchProcess):
            for nursery in processes["tokenizer"][0].children():
                processes |= {"nursery": [nursery], "decoder": nursery.children()}
        return processes

    def wait_for_items(self) -> None:
        """Wait until the tokenizer has opened as many files of the spool as there are decoders.

        The tokenizer sends a file to a decoder, or to the decoders' queue, as soon as it has opened the file.
        """
        (tokenizer,) = self.processes()["tokenizer"]

        def handed_out() -> bool:
            return sum(file.path.startswith(f"{self.spool}/") for file in tokenizer.open_files()) >= NUM_DECODERS

        if wait_until(handed_out, DEADLINE_S) is None:
            raise TimeoutError("the tokenizer has not opened the files")

    def whole(self) -> dict[str, list[psutil.Process]]:
        """Wait until all processes run and /health returns 200, and return the processes by role."""
        url = f"{self.service.url}/health"
        # api, fork server, tokenizer, nursery, engines, decoders and a spare decoder
        number = 5 + self.num_engines + NUM_DECODERS

        def well() -> bool:
            health = httpx2.get(url)
            if health.status_code != 200 or health.json()["engines"]["alive"] < self.num_engines:
                return False
            if not _FORKS.search(httpx2.get(f"{self.service.url}/metrics").text):
                return False
            return sum(map(len, self.processes().values())) == number

        if wait_until(well, DEADLINE_S) is None:
            raise TimeoutError("a process was not restarted")
        return self.processes()

    def image(self, colour: str, rgb: tuple[int, int, int], shape: str) -> dict[str, Any]:
        """Return an image part. Images with equal pixels get different bytes, so that no cache skips the tower."""
        self._images += 1
        note = PngImagePlugin.PngInfo()
        note.add_text("number", str(self._images))
        return image_part(draw_shape(colour, rgb, shape, x=0.4), note)

    def ask(self, *, stream: bool = False) -> str:
        """Ask about one image, or about two images with a streamed answer. Return the `outcome`."""
        red = self.image("red", (220, 40, 40), "square")
        if not stream:
            return outcome(self.service.url, [red], "What is in the image?", "red square")
        green = self.image("green", (40, 160, 60), "star")
        question = "Do both pictures show the same colour?"
        return outcome(self.service.url, [red, green], question, "red and green, so no", stream=True)

    def leave(self) -> str:
        """Ask for a long answer, and disconnect after its first event."""
        body = chat([self.image("red", (220, 40, 40), "square")], "What is in the image?", stream=True)
        body |= {"ignore_eos": True, "max_tokens": 1000}
        with (
            suppress(httpx2.HTTPError),
            httpx2.stream("POST", self.service.url + CHAT, json=body, timeout=60) as answer,
        ):
            next(answer.iter_raw())
        return "left"

    def preempt(self) -> str:
        """Ask for an answer that fills more than half of the KV cache. Return the outcome."""
        media = [self.image("red", (220, 40, 40), "square"), self.image("green", (40, 160, 60), "star")]
        body = chat(media, "What is in the image?") | {"ignore_eos": True, "max_tokens": 1200}
        try:
            answer = httpx2.post(self.service.url + CHAT, json=body, timeout=DEADLINE_S)
        except httpx2.TimeoutException:
            return "hangs"
        except httpx2.HTTPError:
            return "lost"
        if answer.status_code != 200:
            return "failed" if answer.status_code == 503 else f"error {answer.text}"
        text: str = answer.json()["choices"][0]["message"]["content"]
        self._long = self._long or text  # the first answer is requested alone, so it is not preempted
        return "right" if text == self._long else f"wrong: {text[-80:]!r}"

    def batch(self) -> str:
        """Upload and begin a batch of questions about images. The outcome of the batch is that of `end_of_batches`."""
        body = chat([self.image("red", (220, 40, 40), "square")], "What is in the image?")
        line = {"method": "POST", "url": CHAT, "body": body}
        lines = [json.dumps({"custom_id": f"{number}", **line}) for number in range(BATCH_REQUESTS)]
        asked = {"endpoint": CHAT, "completion_window": "24h"}
        try:
            with httpx2.Client(base_url=self.service.url, timeout=DEADLINE_S) as client:
                file = client.post("/v1/files", files={"file": "\n".join(lines).encode()}, data={"purpose": "batch"})
                made = client.post("/v1/batches", json=asked | {"input_file_id": file.json()["id"]})
        except httpx2.HTTPError:
            return "lost"
        return "right" if made.status_code == 200 else f"error {made.text}"

    def end_of_batches(self) -> str:
        """Wait until all batches have ended. Return `right` if each of their requests has the right answer once."""
        with httpx2.Client(base_url=self.service.url, timeout=DEADLINE_S) as client:

            def batches() -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = client.get("/v1/batches", params={"limit": 100}).json()["data"]
                return found

            if wait_until(lambda: all(one["status"] == "completed" for one in batches()), DEADLINE_S) is None:
                return f"not completed: {batches()}"
            for batch in batches():
                output = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
                lines = [json.loads(line) for line in output]
                texts = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
                if {text.strip().rstrip(".").lower() for text in texts} != {"red square"}:
                    return f"wrong: {texts}"
                if sorted(int(line["custom_id"]) for line in lines) != [*range(BATCH_REQUESTS)]:
                    return f"lines: {lines}"
            if left := [path for path in (self.files / "uploads").iterdir() if any(path.iterdir())]:
                return f"left in the uploads: {left}"
        return "right"

    def left_in_spool(self) -> list[str]:
        """Return the contents of the spool's directories. Empty directories are reclaimed after a minute."""
        # The service may remove directories meanwhile. `os.walk` passes over them, but `Path.rglob` raises an error.
        inside = [(folder, names + files) for folder, names, files in os.walk(self.spool) if Path(folder) != self.spool]
        return [str(Path(folder, name).relative_to(self.spool)) for folder, names in inside for name in names]

    def trigger(self, point: Point) -> Path:
        return self.faults / point.trigger


CHAT = "/v1/chat/completions"


def image_part(drawn: Image.Image, note: PngImagePlugin.PngInfo) -> dict[str, Any]:
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG", pnginfo=note)
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(media: Sequence[dict[str, Any]], text: str, *, stream: bool = False) -> dict[str, Any]:
    content = [*media, {"type": "text", "text": text}]
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": stream,
    }


def outcome(url: str, media: Sequence[dict[str, Any]], text: str, right: str, *, stream: bool = False) -> str:
    """Send a request and classify the result.

    Returns:
        `right`, `failed` (503 because a process died), `lost` (no complete response), `hangs`, or a description of a
        wrong answer or an unexpected error.

    """
    try:
        with httpx2.stream("POST", url + CHAT, json=chat(media, text, stream=stream), timeout=DEADLINE_S) as answer:
            body = b"".join(answer.iter_raw())
    except httpx2.TimeoutException:
        return "hangs"
    except httpx2.HTTPError:
        return "lost"
    events = body.split(b"\n\n") if stream and answer.status_code == 200 else [b"data: " + body]
    text = ""
    for event in events:
        data = event.removeprefix(b"data: ")
        if data in (b"", b"[DONE]"):
            continue
        parsed = json.loads(data)
        if error := parsed.get("error"):
            died = error["code"] == 503 and ("process" in error["message"] or "tokenizer" in error["message"])
            return "failed" if died else f"error {error}"
        text += "".join((choice.get("delta") or choice["message"])["content"] for choice in parsed["choices"])
    return "right" if text.strip().rstrip(".").lower() == right else f"wrong: {text!r}"


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float | None:
    """Return the seconds until `condition` is true, or None after `timeout_s` seconds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            return None
        time.sleep(0.01)
    return time.monotonic() - start
