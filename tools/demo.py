"""`make demo`: the service, asked about real pictures, videos and sounds over HTTP, answers through shared memory.

Exits 0 only if every answer is right and nothing is left in /dev/shm.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
import soundfile
from PIL import Image
from rich.console import Console
from rich.table import Table

from tools.questions import CHAT_ANSWERS
from tools.scenes import Scene, Thing, draw
from tools.serving import RunningService, running_service
from tools.sounds import Kind, Sound, make
from tools.speech import HELD_OUT_VOICES, RATE, recorded

SHM = Path("/dev/shm")  # noqa: S108 - the place itself is what is looked at
WHAT = "What is in the image?"


def main() -> int:
    """Runs the demo; the exit status."""
    console = Console()
    started = time.monotonic()
    before = arenas()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mindie_mm-demo-")))
        questions = make_questions(folder)
        settings = {"allowed_media_dir": folder, "spool": folder / "spool"}
        with console.status("starting the service with the embedded checkpoint"):
            service = stack.enter_context(running_service(settings, folder / "service.log"))
        console.print(f"[bold]{service.model}[/] at {service.url}, ready in {time.monotonic() - started:.1f} s\n")
        with Watch(service) as watch:
            right = [ask(console, service, question) for question in questions]
        after = service.wait_until_free()
        status = service.stop()
    left = sorted(arenas() - before)
    show_memory(console, watch, after, left)
    good = all(right) and not after["blocks"] and not left and status == 0
    took_s = time.monotonic() - started
    console.print(
        f"{sum(right)} of {len(right)} answers right, exit status of the service {status}, {took_s:.1f} s: "
        + ("[bold green]all is well[/]" if good else "[bold red]something is wrong[/]")
    )
    return 0 if good else 1


def arenas() -> set[str]:
    """The names of all arenas in /dev/shm, whoever has made them."""
    return {path.name for path in SHM.glob("mindie_mm-*")}


@dataclass(frozen=True, slots=True)
class Question:
    """One request and the answer that is right."""

    title: str
    path: str
    body: dict[str, Any]
    answer: str
    streamed: bool = False


def make_questions(folder: Path) -> list[Question]:
    """The demo's requests; makes their pictures, video and sounds in `folder`."""
    red_square = picture("red", (220, 40, 40), "square", x=0.35)
    blue_circle = picture("blue", (40, 80, 220), "circle", x=0.56)
    green_star = picture("green", (40, 160, 60), "star", x=0.5)
    path = folder / "blue_circle.png"
    blue_circle.save(path)
    video = folder / "video.mp4"
    write_video(video, [picture("orange", (255, 140, 0), "circle", x=0.2 + 0.075 * i, size=0.3) for i in range(9)])
    tone, beeps, seven = folder / "tone.wav", folder / "beeps.ogg", recorded("seven", HELD_OUT_VOICES[0])
    write_sound(tone, "tone", hertz=2600.0, spans=[(0.1, 0.8)], seconds=1.0)
    write_sound(beeps, "beeps", hertz=880.0, spans=[(0.1 + 0.35 * i, 0.13) for i in range(3)], seconds=1.2)
    spoken = folder / "seven.flac"
    spoken.write_bytes(seven.read_bytes())
    raw = base64.b64encode(encode(green_star, "JPEG")).decode()
    red_url = data_url(red_square)
    return [
        chat("a drawn picture, as a data: URL", WHAT, [image(red_url)], "red square"),
        chat("a picture given as a file", WHAT, [image(f"file://{path}")], "blue circle"),
        chat("a picture given as raw base64", WHAT, [image(raw)], "green star"),
        chat("the same, streamed", "What colour is it?", [image(raw)], "green", stream=True),
        chat(
            "two pictures compared",
            "Do both pictures show the same colour?",
            [image(red_url), image(raw)],
            "red and green, so no",
        ),
        chat("a video", "Which way does the shape move?", [video_part(video)], "right"),
        chat("a tone, as a WAV file", "Is the tone high, middle or low?", [audio(tone)], "high"),
        chat("beeps, as an Ogg file", "How many beeps do you hear?", [audio(beeps)], "3"),
        chat(
            "a spoken digit, as FLAC in base64",
            "Which digit is spoken?",
            [input_audio(seven)],
            "seven",
        ),
        chat("plain text", "Hello!", [], CHAT_ANSWERS["hello"]),
        infer("MindIE's /infer with a file", [{"image": str(path)}, {"text": WHAT}], "blue circle"),
        infer(
            "MindIE's /infer with base64",
            [{"type": "image_url", "image_url": raw}, {"type": "text", "text": "Which shape is it?"}],
            "star",
        ),
        infer(
            "a picture, a video, a sound and text in one List[Dict]",
            [
                {"image": str(path)},
                {"video": str(video)},
                {"audio": str(spoken)},
                {"text": "What do you see and hear?"},
            ],
            "blue circle, right, seven",
        ),
    ]


def picture(colour: str, rgb: tuple[int, int, int], shape: str, x: float, size: float = 0.5) -> Image.Image:
    """One shape on a light ground."""
    return draw(Scene(160, 128, (250, 250, 250), (Thing(colour, shape, rgb, x, 0.5, size, 0.0),), None))


def encode(drawn: Image.Image, format_name: str) -> bytes:
    buffer = io.BytesIO()
    drawn.save(buffer, format_name, quality=90)
    return buffer.getvalue()


def data_url(drawn: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encode(drawn, 'PNG')).decode()}"


def write_sound(path: Path, kind: Kind, hertz: float, spans: list[tuple[float, float]], seconds: float) -> None:
    """Writes a tone or beeps at 16 kHz, as the file's ending tells."""
    samples, _ = make(Sound(kind, "", seconds, tuple(spans), hertz, "sine", level=0.5, noise=0.0, noise_seed=0))
    soundfile.write(path, samples, RATE)


def write_video(path: Path, frames: list[Image.Image]) -> None:
    """Writes `frames` as two seconds and a quarter of H.264, 4 frames a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def audio(path: Path) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"file://{path}"}}


def input_audio(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix[1:]}}


def video_part(path: Path) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"file://{path}"}}


def chat(title: str, text: str, media: list[dict[str, Any]], answer: str, *, stream: bool = False) -> Question:
    content = [*media, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64, "stream": stream}
    return Question(title, "/v1/chat/completions", body, answer, stream)


def infer(title: str, inputs: list[dict[str, Any]], answer: str) -> Question:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 32, "details": True}}
    return Question(title, "/infer", body, answer)


def ask(console: Console, service: RunningService, question: Question) -> bool:
    """Posts the question and prints it with its answer; whether that is right."""
    request = urllib.request.Request(  # noqa: S310 - our own server
        service.url + question.path, json.dumps(question.body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as lines:  # noqa: S310 - our own server
        answer = (_streamed if question.streamed else _whole)(lines).strip()
    took_ms = (time.monotonic() - started) * 1000
    right = answer.lower().rstrip(".") == question.answer.lower().rstrip(".")
    mark = "[green]right[/]" if right else f"[red]wrong, expected {question.answer!r}[/]"
    console.print(f"[dim]{question.title}, {question.path}[/]")
    console.print(f"  {_text_of(question.body)}  ->  [bold]{answer}[/]  {mark}  [dim]{took_ms:.0f} ms[/]")
    return right


def _text_of(body: dict[str, Any]) -> str:
    parts = body["inputs"] if "inputs" in body else body["messages"][0]["content"]
    return next(str(part["text"]) for part in parts if "text" in part)


def _whole(lines: Iterable[bytes]) -> str:
    answer = json.loads(b"".join(lines))
    return str(answer["generated_text"] if "generated_text" in answer else answer["choices"][0]["message"]["content"])


def _streamed(lines: Iterable[bytes]) -> str:
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])


class Watch:
    """Samples the service's shared memory from a thread of its own, for as long as it is entered."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.num_samples = 0
        self.most: dict[str, Any] = {"blocks": 0, "bytes": 0}
        """The sample with the most bytes in use."""

    def _sample(self) -> None:
        while not self._done.is_set():
            found = self._service.shm()
            self.num_samples += 1
            if found["bytes"] > self.most["bytes"]:
                self.most = found
            self._done.wait(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def show_memory(console: Console, watch: Watch, after: dict[str, Any], left: list[str]) -> None:
    """Prints the shared memory in use during and after."""
    table = Table(title="Shared memory")
    for column in ("", "blocks", "bytes"):
        table.add_column(column, justify="left" if not column else "right")
    title = f"most while requests ran ({watch.num_samples} samples)"
    table.add_row(title, str(watch.most["blocks"]), f"{watch.most['bytes']:,}")
    table.add_row("after the last answer", str(after["blocks"]), f"{after['bytes']:,}")
    table.add_row("arenas left in /dev/shm after the stop", str(len(left)), ", ".join(left) or "none")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
