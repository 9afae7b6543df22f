"""`make demo`: start the service, ask it about images, a video and audio clips over HTTP, and stop it.

The exit status is 0 only if every answer is correct and no shared memory is left in /dev/shm.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
import soundfile
from PIL import Image
from rich.console import Console
from rich.table import Table

from tools.arguments import parser
from tools.serving import RunningService, running_service
from training.questions import CHAT_ANSWERS
from training.scenes import Scene, Thing, draw
from training.sounds import Kind, Sound, make
from training.speech import HELD_OUT_VOICES, RATE, recorded

SHM = Path("/dev/shm")  # noqa: S108 - the demo looks at this folder
WHAT = "What is in the image?"
COLORS = ["blue", "green", "red", "yellow"]


def main() -> int:
    """Run the demo and return the exit status."""
    console = Console()
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mindie_mm-demo-")))
        questions = make_questions(folder)
        settings = {"allowed_media_dir": folder, "spool": folder / "spool"}
        with console.status("starting the service with the embedded model"):
            service = stack.enter_context(running_service(settings, folder / "service.log"))
        ready_s = time.monotonic() - started
        console.print(f"The service has started at {service.url} in {ready_s:.1f} s.\n")
        with Watch(service) as watch:
            right = [ask(console, service, question) for question in questions]
        after = service.wait_until_free()
        status = service.stop()
    own = {arena["name"] for arena in after["arenas"]}  # other services on this machine have others
    left = sorted(own & arenas())
    show_memory(console, watch, after, left)
    good = all(right) and not after["blocks"] and not left and status == 0
    took_s = time.monotonic() - started
    console.print(
        f"{sum(right)} of {len(right)} answers are correct. The service stopped with exit status {status}.\n"
        f"The demo took {took_s:.1f} s. "
        + ("[bold green]Everything works.[/]" if good else "[bold red]Something is wrong.[/]")
    )
    return 0 if good else 1


def arenas() -> set[str]:
    """Return the names of all arenas in /dev/shm, of any process."""
    return {path.name for path in SHM.glob("mindie_mm-*")}


@dataclass(frozen=True, slots=True)
class Question:
    """One request with its correct answer."""

    title: str
    path: str
    body: dict[str, Any]
    answer: str
    streamed: bool = False


def make_questions(folder: Path) -> list[Question]:
    """Make the images, the video and the clips in `folder`, and return the requests about them."""
    red_square = draw_shape("red", (220, 40, 40), "square", x=0.35)
    blue_circle = draw_shape("blue", (40, 80, 220), "circle", x=0.56)
    green_star = draw_shape("green", (40, 160, 60), "star", x=0.5)
    path = folder / "blue_circle.png"
    blue_circle.save(path)
    video = folder / "video.mp4"
    write_video(video, [draw_shape("orange", (255, 140, 0), "circle", x=0.2 + 0.075 * i, size=0.3) for i in range(9)])
    tone, beeps, seven = folder / "tone.wav", folder / "beeps.ogg", recorded("seven", HELD_OUT_VOICES[0])
    write_audio(tone, "tone", hertz=2600.0, spans=[(0.1, 0.8)], seconds=1.0)
    write_audio(beeps, "beeps", hertz=880.0, spans=[(0.1 + 0.35 * i, 0.13) for i in range(3)], seconds=1.2)
    spoken = folder / "seven.flac"
    spoken.write_bytes(seven.read_bytes())
    raw = base64.b64encode(encode(green_star, "JPEG")).decode()
    red_url = data_url(red_square)
    return [
        chat("An image in a data: URL", WHAT, [image(red_url)], "red square"),
        chat("An image in a file", WHAT, [image(f"file://{path}")], "blue circle"),
        chat("An image in plain base64", WHAT, [image(raw)], "green star"),
        chat("The same image, with a streamed answer", "What colour is it?", [image(raw)], "green", stream=True),
        chat(
            "Two images to compare",
            "Do both pictures show the same colour?",
            [image(red_url), image(raw)],
            "red and green, so no",
        ),
        chat("A video", "Which way does the shape move?", [video_part(video)], "right"),
        chat("A tone in a WAV file", "Is the tone high, middle or low?", [audio(tone)], "high"),
        chat("Beeps in an Ogg file", "How many beeps do you hear?", [audio(beeps)], "3"),
        chat(
            "A spoken digit in base64 FLAC",
            "Which digit is spoken?",
            [input_audio(seven)],
            "seven",
        ),
        chat("Text alone", "Hello!", [], CHAT_ANSWERS["hello"]),
        called("A tool that the model has to call", "What colour is it?", [image(red_url)]),
        infer("An image file for MindIE", [{"image": str(path)}, {"text": WHAT}], "blue circle"),
        infer(
            "A base64 image for MindIE",
            [{"type": "image_url", "image_url": raw}, {"type": "text", "text": "Which shape is it?"}],
            "star",
        ),
        infer(
            "An image, a video and an audio clip in one request",
            [
                {"image": str(path)},
                {"video": str(video)},
                {"audio": str(spoken)},
                {"text": "What do you see and hear?"},
            ],
            "blue circle, right, seven",
        ),
    ]


def draw_shape(colour: str, rgb: tuple[int, int, int], shape: str, x: float, size: float = 0.5) -> Image.Image:
    """Draw one shape on a light background."""
    return draw(Scene(160, 128, (250, 250, 250), (Thing(colour, shape, rgb, x, 0.5, size, 0.0),), None))


def encode(drawn: Image.Image, format_name: str) -> bytes:
    buffer = io.BytesIO()
    drawn.save(buffer, format_name, quality=90)
    return buffer.getvalue()


def data_url(drawn: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encode(drawn, 'PNG')).decode()}"


def write_audio(path: Path, kind: Kind, hertz: float, spans: list[tuple[float, float]], seconds: float) -> None:
    """Write a tone or beeps at 16 kHz, in the format that the file extension indicates."""
    samples, _ = make(Sound(kind, "", seconds, tuple(spans), hertz, "sine", level=0.5, noise=0.0, noise_seed=0))
    soundfile.write(path, samples, RATE)


def write_video(path: Path, frames: list[Image.Image]) -> None:
    """Write `frames` as H.264 with 4 frames per second."""
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


def called(title: str, text: str, media: list[dict[str, Any]]) -> Question:
    """Return a question whose answer is a call to a tool with the color of the image."""
    parameters = {"type": "object", "properties": {"color": {"enum": COLORS}}, "required": ["color"]}
    tool = {"name": "paint", "description": "Paints the wall.", "parameters": parameters}
    question = chat(title, text, media, 'paint({"color": "red"})')
    forced = {
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    return replace(question, body=question.body | forced)


def infer(title: str, inputs: list[dict[str, Any]], answer: str) -> Question:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 32, "details": True}}
    return Question(title, "/infer", body, answer)


def ask(console: Console, service: RunningService, question: Question) -> bool:
    """Post the question, print it with the answer, and return whether the answer is correct."""
    request = urllib.request.Request(  # noqa: S310 - our own server
        service.url + question.path, json.dumps(question.body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as lines:  # noqa: S310 - our own server
        answer = (_streamed if question.streamed else _whole)(lines).strip()
    took_ms = (time.monotonic() - started) * 1000
    right = answer.lower().rstrip(".") == question.answer.lower().rstrip(".")
    mark = "[green]correct[/]" if right else f"[red]wrong, expected {question.answer!r}[/]"
    console.print(f"[dim]{question.title} (POST {question.path})[/]")
    console.print(
        f"  {_text_of(question.body)}  ->  [bold]{answer}[/]  {mark}, [dim]{took_ms:.0f} ms[/]", soft_wrap=True
    )
    return right


def _text_of(body: dict[str, Any]) -> str:
    parts = body["inputs"] if "inputs" in body else body["messages"][0]["content"]
    return next(str(part["text"]) for part in parts if "text" in part)


def _whole(lines: Iterable[bytes]) -> str:
    answer = json.loads(b"".join(lines))
    if "generated_text" in answer:
        return str(answer["generated_text"])
    message = answer["choices"][0]["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "; ".join(f"{function['name']}({function['arguments']})" for function in functions)


def _streamed(lines: Iterable[bytes]) -> str:
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])


class Watch:
    """A context manager that samples the service's shared memory in a separate thread."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.num_samples = 0
        self.most: dict[str, Any] = {"blocks": 0, "bytes": 0}
        """Sample with the most bytes in use."""

    def _sample(self) -> None:
        while not self._done.is_set():
            state = self._service.shm()
            self.num_samples += 1
            if state["bytes"] > self.most["bytes"]:
                self.most = state
            self._done.wait(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def show_memory(console: Console, watch: Watch, after: dict[str, Any], left: list[str]) -> None:
    """Print the shared memory in use during and after the requests."""
    table = Table(title="Shared memory in use")
    for column in ("", "blocks", "bytes"):
        table.add_column(column, justify="left" if not column else "right")
    title = f"maximum during the requests ({watch.num_samples} samples)"
    table.add_row(title, str(watch.most["blocks"]), f"{watch.most['bytes']:,}")
    table.add_row("after the last answer", str(after["blocks"]), f"{after['bytes']:,}")
    table.add_row("arenas left in /dev/shm after the service stopped", str(len(left)), ", ".join(left) or "none")
    console.print(table)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    sys.exit(main())
