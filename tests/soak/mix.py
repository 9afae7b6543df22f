"""Requests of a soak test: valid requests, and invalid requests with the expected status."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attacks.images import jpeg_of_size, png
from tools.demo import audio, draw_shape, encode, image, input_audio, video_part, write_audio, write_video
from training.scenes import TRAIN, draw, single

CHAT, COMPLETIONS, INFER, GENERATE = "/v1/chat/completions", "/v1/completions", "/infer", "/generate"
WHAT = "What is in the image?"
MiB = 2**20
MAX_REQUEST_BYTES = 2 * MiB
SETTINGS: dict[str, object] = {
    # These sizes are small, so that all of the memory has been used before the first measurement that counts.
    "arena_bytes": 64 * MiB,
    "kv_cache_bytes": 8 * MiB,
    "encoder_cache_bytes": 8 * MiB,
    "preprocessed_cache_bytes": 4 * MiB,
    "max_request_bytes": MAX_REQUEST_BYTES,
    "max_item_bytes": MiB // 2,
    "max_media_items": 6,
    "decoders": 2,
    "num_threads": 1,
    "reclaim_interval_s": 5.0,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer depends only on the request."""

    name: str
    path: str
    body: dict[str, Any]
    status: int = 200

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream")) or self.path.endswith("_stream")


def chat(name: str, content: Any, status: int = 200, **changes: Any) -> Case:
    messages = [{"role": "user", "content": content}]
    return Case(name, CHAT, {"messages": messages, "temperature": 0, "max_tokens": 12} | changes, status)


def asking(*media: dict[str, Any], text: str = WHAT) -> list[dict[str, Any]]:
    return [*media, {"type": "text", "text": text}]


def right(folder: Path, images: int) -> list[Case]:
    """Return valid requests about `images` images and about other media, which are written into `folder`."""
    scenes = [
        base64.b64encode(encode(draw(single(random.Random(seed), TRAIN)), ("JPEG", "PNG", "WEBP")[seed % 3])).decode()
        for seed in range(images)
    ]
    return [*_with_media(folder, scenes), *_of_text(), *(case for raw in scenes for case in _of_image(raw))]


def _of_image(raw: str) -> Iterator[Case]:
    """Yield a request about the image for each endpoint that accepts images."""
    url = f"data:image/jpeg;base64,{raw}"
    content = asking(image(url))
    yield chat("image", content)
    yield chat("image, streamed", content, stream=True, stream_options={"include_usage": True})
    items = [{"image": raw}, {"text": "What colour is it?"}]
    yield Case("/infer", INFER, {"inputs": items, "parameters": {"max_new_tokens": 8, "details": True}})
    yield Case("/infer, streamed", INFER, {"inputs": items, "stream": True, "parameters": {"max_new_tokens": 8}})


def _with_media(folder: Path, scenes: list[str]) -> Iterator[Case]:
    video, beeps = folder / "video.mp4", folder / "beeps.wav"
    write_video(video, [draw_shape("orange", (255, 140, 0), "circle", x=0.2 + 0.075 * i, size=0.3) for i in range(9)])
    write_audio(beeps, "beeps", hertz=880.0, spans=[(0.1 + 0.35 * i, 0.13) for i in range(3)], seconds=1.2)
    first, second = (image(raw) for raw in scenes[:2])
    yield chat("video", asking(video_part(video), text="Which way does the shape move?"))
    yield chat("video, fewer frames", asking({"video": str(video), "num_frames": 4}, text="Which way?"), stream=True)
    yield chat("audio", asking(audio(beeps), text="How many beeps do you hear?"))
    yield chat("audio in base64", asking(input_audio(beeps), text="How many beeps do you hear?"), stream=True)
    yield chat("two images", asking(first, second, text="Do both pictures show the same colour?"))
    everything = asking(first, video_part(video), audio(beeps), second, text="What do you see and hear?")
    yield chat("four items", everything, max_tokens=16)
    yield chat("several choices", asking(first), n=3, temperature=1.0, seed=5)
    yield chat("several choices, streamed", asking(second), n=2, temperature=0.7, seed=9, stream=True)
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}}, "required": ["colour"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "scene", "schema": schema}}
    yield chat("schema", asking(second), response_format=wanted, max_tokens=32)
    items = [{"image": scenes[0]}, {"video": str(video)}, {"text": WHAT}]
    parameters = {"max_new_tokens": 10, "details": True}
    yield Case("/generate", GENERATE, {"inputs": items, "parameters": parameters})
    yield Case("/generate_stream", f"{GENERATE}_stream", {"inputs": items, "parameters": parameters})
    yield Case("/tokenize", "/tokenize", {"inputs": items})


def _of_text() -> Iterator[Case]:
    yield chat("text", "Hello!")
    yield chat("text, streamed", "How are you?", stream=True)
    yield chat("stop string", "Hello!", stop=["e"], stream=True)
    yield chat("log-probabilities", "Hello!", logprobs=True, top_logprobs=2)
    many = {"prompt": ["red square", "blue"], "max_tokens": 6, "temperature": 0}
    yield Case("completions", COMPLETIONS, many)
    yield Case("ids", COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "stream": True})
    yield Case("/infer of text", INFER, {"inputs": "a red", "parameters": {"max_new_tokens": 5}})


def wrong(folder: Path) -> list[Case]:
    """Return invalid requests, each with the expected status."""

    def with_image(name: str, data: bytes) -> Case:
        return chat(name, asking(image(base64.b64encode(data).decode())), 400)

    broken = folder / "broken.mp4"
    broken.write_bytes((folder / "video.mp4").read_bytes()[:600])
    whole = encode(draw_shape("red", (220, 40, 40), "square", x=0.4), "PNG")
    return [
        with_image("a bomb", png(30_000, 30_000)),
        with_image("a huge JPEG by its header", jpeg_of_size(65_000, 65_000)),
        with_image("an image cut short", whole[: len(whole) // 2]),
        with_image("no image", b"hello, world" * 9),
        with_image("an item too large", bytes(MiB // 2 + 1)),
        chat("a video cut short", asking(video_part(broken)), 400),
        chat("no audio", asking({"type": "input_audio", "input_audio": {"data": "UklGRiQA", "format": "wav"}}), 400),
        chat("a private address", asking(image("http://127.0.0.1:1/x.png")), 400),
        chat("a file outside", asking(image("/etc/passwd")), 400),
        chat("too many items", asking(*[image("x")] * 7), 400),
        chat("another model", "Hello!", 404, model="gpt-5"),
        chat("too long an answer", "Hello!", 400, max_tokens=10**6),
        chat("a temperature of text", "Hello!", 400, temperature="0"),
        chat("no schema", "Hello!", 400, response_format={"type": "json_schema"}),
        chat("a wrong item after a right one", asking(image(base64.b64encode(whole).decode()), image("x")), 400),
        Case("ids out of range", COMPLETIONS, {"prompt": [10**9], "max_tokens": 2}, 400),
        Case("a negative id", COMPLETIONS, {"prompt": [-5, -6], "max_tokens": 2}, 400),
        Case("empty inputs", INFER, {"inputs": []}, 400),
        Case("no such route", "/v1/nothing", {}, 404),
    ]


def endless(raw: str, *, stream: bool, **changes: Any) -> Case:
    """Return a request that runs for a long time, so that its client disconnects first."""
    return chat("endless", asking(image(raw)), max_tokens=600, ignore_eos=True, stream=stream, **changes)
