"""Tests for audio inputs over HTTP, with a model family that accepts audio."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.audio_samples import encode_audio, encode_with_ffmpeg, tone
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.models.test_qwen2_5_omni import write_checkpoint
from tests.service.conftest import SETTINGS
from tests.warm import running_service
from tools.serving import RunningService

FILES = {
    "tone.wav": partial(encode_audio, tone(0.8), 16_000),
    "tone.flac": partial(encode_audio, tone(0.8), 16_000, "FLAC"),
    "tone.mp3": partial(encode_audio, tone(0.8), 16_000, "MP3", "MPEG_LAYER_III"),
    "tone.ogg": partial(encode_audio, tone(0.8), 16_000, "OGG", "VORBIS"),
    "tone.m4a": partial(encode_with_ffmpeg, tone(0.8, 48_000), 48_000, "ipod", "aac"),
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for name, encode in FILES.items():
        (folder / name).write_bytes(encode())
    return folder


@pytest.fixture(scope="module")
def hearing(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object], clips: Path
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("hearing")
    (folder / "omni").mkdir()
    write_checkpoint(folder / "omni")
    given = settings | {"spool": folder / "spool", "allowed_media_dir": clips, "allow_private_media": True}
    with running_service(given, folder / "log", folder / "omni") as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]


@pytest.fixture(scope="module")
def listener(hearing: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=hearing.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def web(clips: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(clips)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def input_audio(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64_of(data), "format": "wav"}}


def audio_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def chat(listener: httpx2.Client, *parts: dict[str, Any]) -> tuple[int, list[float]]:
    """Return the number of prompt tokens, and the log-probabilities of the five likeliest first tokens."""
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 5,
    }
    answer = listener.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    completion = answer.json()
    (token,) = completion["choices"][0]["logprobs"]["content"]
    return completion["usage"]["prompt_tokens"], [one["logprob"] for one in token["top_logprobs"]]


def test_every_form_of_an_audio_clip_has_the_same_answer(listener: httpx2.Client, clips: Path, web: str) -> None:
    data = (clips / "tone.wav").read_bytes()
    num_tokens, likelihoods = chat(listener, input_audio(data))
    for part in (
        audio_url(f"data:audio/wav;base64,{base64_of(data)}"),
        audio_url(f"{web}/tone.wav"),
        audio_url((clips / "tone.wav").as_uri()),
        {"type": "audio", "audio": str(clips / "tone.wav")},
        audio_url(f"{web}/tone.flac"),
        {"type": "input_audio", "input_audio": {"data": f"data:;base64,{base64_of(data)}", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"{web}/tone.wav", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": base64.encodebytes(data).decode(), "format": "wav"}},
    ):
        assert chat(listener, part) == (num_tokens, pytest.approx(likelihoods, abs=1e-4))
    # The audio has 80 frames of 10 ms. The tower halves the number twice, and a start and an end token are added.
    assert num_tokens - chat(listener)[0] == 80 // 4 + 2


def test_different_audio_clips_have_different_answers(listener: httpx2.Client) -> None:
    first, second = (chat(listener, input_audio(encode_audio(tone(0.8, hertz=h), 16_000))) for h in (300, 2500))
    assert first[0] == second[0]
    assert first[1] != pytest.approx(second[1], abs=1e-3)


@pytest.mark.parametrize("name", FILES)
def test_each_format_is_decoded_whatever_the_request_calls_it(listener: httpx2.Client, clips: Path, name: str) -> None:
    num_tokens, _ = chat(listener, input_audio((clips / name).read_bytes()))  # declared as WAV
    assert 80 // 4 <= num_tokens - chat(listener)[0] - 2 <= 80 // 4 + 3


def test_the_openai_client_streams_an_answer_about_an_audio_clip(hearing: RunningService, clips: Path) -> None:
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        content: Any = [input_audio((clips / "tone.mp3").read_bytes()), {"type": "text", "text": "What?"}]
        chunks = client.chat.completions.create(
            model="omni", messages=[{"role": "user", "content": content}], max_tokens=6, temperature=0, stream=True
        )
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("length", "stop")


def test_a_prompt_may_mix_all_kinds_of_media(listener: httpx2.Client, clips: Path) -> None:
    items = [
        {"text": "Look: "},
        {"image": f"data:;base64,{base64_of(encoded(photograph(size=(80, 60))))}"},
        {"video": f"data:;base64,{base64_of(encode_video(moving_frames(8), fps=4))}"},
        {"audio": str(clips / "tone.wav")},
        {"text": "what, and when?"},
    ]
    answer = listener.post("/infer", json={"inputs": items, "parameters": {"max_new_tokens": 4}})
    assert answer.status_code == 200, answer.text
    bodies = [{"messages": [{"role": "user", "content": items[:n]}]} for n in (3, 4)]
    without, with_audio = (listener.post("/tokenize", json=body).json()["tokens"] for body in bodies)
    assert len(with_audio) - len(without) == 80 // 4 + 2
    assert min(with_audio) >= 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no audio at all", "cannot be read as audio"),
        (encode_audio(tone(0.02), 16_000), "the audio clip has 320 samples"),
        (encoded(photograph(size=(16, 16))), "cannot be read as audio|no audio stream"),
        (encode_video(moving_frames(3)), "no audio stream"),
    ],
)
def test_an_invalid_audio_clip_is_400(listener: httpx2.Client, data: bytes, message: str) -> None:
    body = {"messages": [{"role": "user", "content": [input_audio(data)]}]}
    answer = listener.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]["message"]
    assert "media item 0 (audio)" in error
    assert any(part in error for part in message.split("|")), error


@pytest.mark.slow  # tests/tokenize/test_tokenizer.py has the same refusal without a service
def test_a_family_without_audio_refuses_an_audio_clip(random_checkpoint: Path, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": [input_audio(encode_audio(tone(0.3), 16_000))]}]}
    with running_service(SETTINGS | {"spool": tmp_path / "spool"}, tmp_path / "log", random_checkpoint) as service:
        answer = httpx2.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
        upload = httpx2.post(f"{service.url}/v1/audio/transcriptions", files={"file": b"x" * 2**20}, timeout=300)
    assert (upload.status_code, "does not accept audio" in upload.text) == (400, True)
    assert answer.status_code == 400
    assert "does not accept audio inputs; it accepts image, video" in answer.json()["error"]["message"]
