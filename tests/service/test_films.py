"""Tests for films and audio clips over HTTP, with the answers of the embedded checkpoint."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import av
import pytest

from tests.media.test_films import encode_rgba, moving_square
from tools.serving import RunningService

CASES = Path(__file__).parents[1] / "cases/films"
WHAT = "What is in the video?"
WHICH_WAY = "Which way does the shape move?"
HOW_MANY = "How many beeps do you hear?"


def part(name: str) -> dict[str, Any]:
    kind = "audio" if name.endswith((".wav", ".flac", ".amr", ".3gp")) else "video"
    url = f"data:;base64,{base64.b64encode((CASES / name).read_bytes()).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def ask(http: Any, name: str, question: str, **fields: Any) -> tuple[str, int]:
    """Return the answer to a question about a file, and the number of prompt tokens."""
    content = [part(name), {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("name", "like", "question"),
    [
        ("valid_24_of_32.wav", "plain_24.wav", HOW_MANY),
        ("second_track_unknown.mov", "moving.mp4", WHICH_WAY),
        ("transparent.mov", "on_white.mov", WHICH_WAY),
        ("animation.png", "moving.mp4", WHICH_WAY),
        ("camera.h264", "moving.mp4", WHICH_WAY),
    ],
)
def test_a_file_has_the_answer_of_its_plain_form(http: Any, name: str, like: str, question: str) -> None:
    assert ask(http, name, question) == ask(http, like, question)


def test_the_alpha_channel_of_webm_is_decoded_by_a_locked_in_decoder(http: Any, tmp_path: Path) -> None:
    forms = {"a.webm": ("webm", "libvpx", "yuva420p"), "b.mov": ("mov", "qtrle", "argb")}
    for name, form in forms.items():
        (tmp_path / name).write_bytes(encode_rgba(moving_square(), *form))
    in_webm, in_mov = (ask(http, str(tmp_path / name), WHICH_WAY) for name in forms)
    assert in_webm == in_mov


def test_an_hlg_film_has_the_colors_of_the_same_film_in_sdr(http: Any) -> None:
    assert ask(http, "sdr_orange.mp4", WHAT)[0] == "orange square"
    assert ask(http, "hlg_orange.mp4", WHAT)[0] == "orange square"


def test_a_voice_message_in_amr_is_heard_as_in_3gp(http: Any, tmp_path: Path) -> None:
    in_3gp = tmp_path / "voice.3gp"
    with av.open(CASES / "voice.amr") as source, av.open(in_3gp, "w") as output:
        stream = output.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    assert ask(http, "voice.amr", HOW_MANY) == ask(http, str(in_3gp), HOW_MANY)


def late_beep() -> dict[str, Any]:
    return {"role": "user", "content": [part("late_beep.flac"), {"type": "text", "text": HOW_MANY}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [late_beep()]}),
        ("/tokenize", {"messages": [late_beep()]}),
        ("/infer", {"inputs": [{"audio": part("late_beep.flac")["audio_url"]["url"]}, {"text": HOW_MANY}]}),
    ],
)
def test_a_clip_above_the_window_is_400_with_the_limit(http: Any, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    expected = "the audio clip lasts 45.0 s; the limit of this model is 30 s. Cut the clip into parts of at most"
    assert expected in answer.text


def test_use_audio_in_video_adds_the_audio_of_a_film(http: Any) -> None:
    _, silent = ask(http, "moving_with_sound.mp4", WHICH_WAY)
    assert silent == ask(http, "moving.mp4", WHICH_WAY)[1]
    _, heard = ask(http, "moving_with_sound.mp4", WHICH_WAY, mm_processor_kwargs={"use_audio_in_video": True})
    assert heard - silent == 2.048 // 0.04 + 2, "25 tokens per second, a start and an end token"
    _, without = ask(http, "moving.mp4", WHICH_WAY, mm_processor_kwargs={"use_audio_in_video": True})
    assert without == silent
    content = [{**part("moving_with_sound.mp4"), "use_audio_in_video": True}, {"type": "text", "text": WHICH_WAY}]
    usage = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "media_spans": True}
    ).json()
    assert usage["usage"]["prompt_tokens"] == heard
    (span,) = usage["media_spans"]
    assert (
        span["features"] == usage["usage"]["prompt_tokens_details"]["video_tokens"] == span["stop"] - span["start"] - 2
    )


def test_audio_that_is_left_out_is_in_the_log(http: Any, service: RunningService) -> None:
    ask(http, "moving_with_sound.mp4", WHICH_WAY, max_tokens=1)
    assert "a video has audio, which is left out; set use_audio_in_video to include it" in service.log.read_text()


def test_the_audio_of_a_film_is_true_or_false(http: Any) -> None:
    content = [{**part("moving_with_sound.mp4"), "use_audio_in_video": "yes"}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert "use_audio_in_video='yes' must be true or false" in answer.text
