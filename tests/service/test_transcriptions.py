"""Tests for /v1/audio/transcriptions and /v1/audio/translations with the embedded checkpoint, which answers chats."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import soundfile

from mindie_mm.media.audio.cuts import SPEECH_RATE, cuts
from mindie_mm.nn.speech import SpeechTraits
from tests.audio_samples import encode_audio, encode_with_ffmpeg, speech, tone
from tests.media_samples import encode_video, encoded, moving_frames, photograph
from tests.service.test_api_page import section
from tests.service.test_openapi import described, require
from tests.service.test_snippets import SERVED_AT, run
from tools.serving import RunningService
from training.speech import HELD_OUT_VOICES, recorded

PATH = "/v1/audio/transcriptions"
RATE = 16_000
TRAITS = SpeechTraits()


def transcribe(http: httpx2.Client, recording: bytes, path: str = PATH, **fields: Any) -> httpx2.Response:
    """Send a form. A field whose value is a list becomes several parts."""
    return http.post(path, files={"file": ("speech.wav", recording)}, data={"model": "tiny"} | fields)


def chat(http: httpx2.Client, recording: bytes, text: str) -> dict[str, Any]:
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(recording).decode(), "format": "wav"}}
    messages = [{"role": "user", "content": [audio, {"type": "text", "text": text}]}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    *lines, last = answer.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (PATH, {}, TRAITS.transcribe),
        ("/audio/transcriptions", {"language": "de-AT"}, f"{TRAITS.transcribe} The language of the speech is German."),
        (PATH, {"language": "german", "prompt": "three"}, None),
        ("/v1/audio/translations", {}, TRAITS.translate),
    ],
)
def test_the_text_is_that_of_a_chat(http: httpx2.Client, path: str, fields: dict[str, str], text: str | None) -> None:
    text = text or f"{TRAITS.with_prompt}{TRAITS.transcribe}{TRAITS.in_language}".format(
        prompt="three", language="German"
    )
    answer = transcribe(http, speech(3), path, **fields)
    assert answer.status_code == 200, answer.text
    expected = chat(http, speech(3), text)
    assert answer.json() == {
        "text": expected["choices"][0]["message"]["content"].strip(),
        "usage": {
            "type": "tokens",
            "input_tokens": expected["usage"]["prompt_tokens"],
            "output_tokens": expected["usage"]["completion_tokens"],
            "total_tokens": expected["usage"]["total_tokens"],
        },
    }


@pytest.mark.parametrize(
    "encode",
    [
        partial(encode_audio, file_format="FLAC"),
        partial(encode_audio, file_format="MP3", subtype="MPEG_LAYER_III"),
        partial(encode_audio, file_format="OGG", subtype="VORBIS"),
        partial(encode_with_ffmpeg, container="ipod", codec="aac"),
        partial(encode_with_ffmpeg, container="matroska", codec="libopus"),
    ],
    ids=["flac", "mp3", "ogg", "m4a", "webm"],
)
def test_every_container_is_accepted(http: httpx2.Client, encode: Any) -> None:
    answer = transcribe(http, encode(tone(1.2, 48_000), 48_000), response_format="verbose_json")
    assert answer.status_code == 200, answer.text
    assert answer.json()["duration"] == pytest.approx(1.2, abs=0.1)


def test_each_format_has_the_same_text(http: httpx2.Client) -> None:
    recording = encode_audio(tone(1.5), RATE)
    text = transcribe(http, recording).json()["text"]
    verbose = transcribe(http, recording, response_format="verbose_json").json()
    assert (verbose["text"], verbose["duration"], verbose["task"]) == (text, 1.5, "transcribe")
    (segment,) = verbose["segments"]
    assert (segment["start"], segment["end"], segment["text"].strip()) == (0.0, 1.5, text)
    assert segment["avg_logprob"] < 0
    assert len(segment["tokens"]) > 0
    assert "no_speech_prob" not in segment
    plain, srt, vtt = (transcribe(http, recording, response_format=one) for one in ("text", "srt", "vtt"))
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"
    assert plain.text == f"{text}\n"
    assert srt.text == f"1\n00:00:00,000 --> 00:00:01,500\n{text}\n\n"
    assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"
    assert vtt.text == f"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n{text}\n\n"


def pauses(*lengths_s: float) -> bytes:
    """Return tones of the given lengths, with a pause of half a second between them."""
    parts: list[Any] = []
    for length in lengths_s:
        parts += [tone(length), np.zeros(RATE // 2, np.float32)]
    return encode_audio(np.concatenate(parts[:-1]), RATE)


def test_long_speech_is_cut_at_its_pauses(http: httpx2.Client) -> None:
    recording = pauses(20, 25, 2, 14)
    verbose = transcribe(http, recording, response_format="verbose_json").json()
    bounds = [(segment["start"], segment["end"]) for segment in verbose["segments"]]
    assert verbose["duration"] == 62.5
    assert [start for start, _ in bounds] == [0.0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == 62.5
    assert [20 <= bounds[0][1] <= 20.5, 45.5 <= bounds[1][1] <= 48.5] == [True, True]
    assert [segment["id"] for segment in verbose["segments"]] == [0, 1, 2]


def test_words_on_both_sides_of_a_cut_are_heard(http: httpx2.Client) -> None:
    """Spoken digits with pauses between them, in noise, are cut into clips with one whole digit each."""
    said = ["seven", "one", "eight", "nine", "zero", "two"]
    pause = np.zeros(int(0.9 * SPEECH_RATE))
    words = [soundfile.read(recorded(word, HELD_OUT_VOICES[0]))[0] for word in said]
    speech = np.concatenate([part for word in words for part in (word, pause)])
    noise = np.random.default_rng(0).normal(0, 0.002, len(speech))
    samples = ((speech + noise) * 32_767).astype(np.int16)
    clips = np.split(samples, cuts(samples, 2.0))
    assert [transcribe(http, encode_audio(clip / 32_768, SPEECH_RATE)).json()["text"] for clip in clips] == said


def test_each_clip_of_long_speech_has_the_text_of_a_chat(http: httpx2.Client) -> None:
    recording = pauses(20, 25)
    verbose = transcribe(http, recording, response_format="verbose_json").json()
    samples = np.frombuffer(recording[44:], np.int16)
    texts = []
    for segment in verbose["segments"]:
        start, stop = (round(segment[name] * RATE) for name in ("start", "end"))
        clip = encode_audio(samples[start:stop].astype(np.float32) / 2**15, RATE)
        texts.append(chat(http, clip, TRAITS.transcribe)["choices"][0]["message"]["content"].strip())
    assert [segment["text"].strip() for segment in verbose["segments"]] == texts
    assert verbose["text"] == " ".join(texts)


@pytest.mark.parametrize("lengths_s", [(1.0,), (20, 25)])
def test_a_stream_is_the_text_in_pieces(http: httpx2.Client, lengths_s: tuple[float, ...]) -> None:
    whole = transcribe(http, pauses(*lengths_s)).json()
    *deltas, last = events(transcribe(http, pauses(*lengths_s), stream="true"))
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == whole["text"]
    assert last == {"type": "transcript.text.done", **whole}


def test_answers_and_events_match_the_schema(http: httpx2.Client) -> None:
    content, recording = described(http, "post", PATH), encode_audio(tone(0.5), RATE)
    whole = [transcribe(http, recording, response_format=form).json() for form in ("json", "verbose_json")]
    require(http, content["application/json"]["schema"], whole)
    data = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"][1]
    require(http, data["contentSchema"]["anyOf"][0], events(transcribe(http, recording, stream="true")))
    assert {"text/plain", "text/vtt"} < content.keys()
    form = http.get("/openapi.json").json()["paths"][PATH]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert {"file", "timestamp_granularities[]", "language"} < form["schema"]["properties"].keys()


def test_openais_client_transcribes_and_translates(client: openai.OpenAI) -> None:
    recording = ("speech.wav", speech(2))
    whole = client.audio.transcriptions.create(model="tiny", file=recording)
    with client.audio.transcriptions.create(model="tiny", file=recording, stream=True) as stream:
        *_, last = stream
    assert last.type == "transcript.text.done"
    assert last.text == whole.text
    with pytest.deprecated_call():  # of the client
        translation = client.audio.translations.create(model="tiny", file=recording, response_format="verbose_json")
    assert translation.duration > 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": "whisper-1"}, "model", "'whisper-1'"),
        ({"language": "tlh"}, "language", "'tlh'"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"temperature": "nan"}, "temperature", "finite"),
        ({"temperature": "-1"}, "temperature", "greater than or equal to 0"),
        ({"response_format": "diarized_json"}, "response_format", "verbose_json"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "'srt'"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "no time stamps of segments"),
        ({"timestamp_granularities[]": ["word", "segment"]}, "timestamp_granularities", "no time stamps of words"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities", "word"),
        ({"include[]": "logprobs"}, "include", "include is not supported"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "not supported"),
        ({"to_language": "fr"}, "to_language", "to_language is not supported"),
        ({"language": ["de", "en"]}, "language", "2 parts"),
        ({"seed": str(2**70)}, "seed", "seed"),
        ({"prompt": "word " * 20_000}, "prompt", "tokens"),
    ],
)
def test_a_field_that_is_not_honored_is_refused_by_name(
    http: httpx2.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = transcribe(http, encode_audio(tone(0.5), RATE), **fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert (error["param"], words in error["message"]) == (param, True), error


@pytest.mark.parametrize("fields", [{"chunking_strategy": "auto"}, {"language": ""}, {"colour": "red"}, {"user": "me"}])
def test_harmless_fields_are_ignored(http: httpx2.Client, fields: dict[str, str]) -> None:
    assert transcribe(http, encode_audio(tone(0.5), RATE), **fields).status_code == 200


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no audio at all", "cannot be read as audio"),
        (b"", "empty"),
        (encode_audio(tone(0.02), RATE), "has 320 samples"),
        (encoded(photograph(size=(16, 16))), "audio"),
        (encode_video(moving_frames(3)), "no audio stream"),
        (speech(4)[:60_000], "truncated"),
    ],
    ids=["text", "empty", "short", "image", "silent film", "truncated"],
)
def test_a_file_that_is_no_speech_is_refused(http: httpx2.Client, data: bytes, words: str) -> None:
    answer = transcribe(http, data)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], words in error["message"]) == (400, "file", True), error
    assert "media item" not in error["message"]


def test_the_examples_of_the_docs_are_answered(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speech.wav").write_bytes(speech(2))
    text = section("POST /v1/audio/transcriptions")
    (python,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = run(python.replace(SERVED_AT, service.url))
    names["client"].close()
    assert capsys.readouterr().out.strip() == names["transcript"].text
    commands = re.findall(r"^```sh\n(curl .*?)^```$", text, re.MULTILINE | re.DOTALL)
    with httpx2.Client(base_url=service.url, timeout=60) as http:
        translation = transcribe(http, speech(2), "/v1/audio/translations", response_format="text").text
    if shutil.which("curl") is not None:
        subtitles, translated = (
            subprocess.run(
                ["sh", "-c", command.replace("localhost:8000", service.url)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout
            for command in commands
        )
        assert subtitles.startswith("1\n00:00:00,000 --> 00:00:01,")
        assert translated == translation


def test_nothing_is_left(service: RunningService) -> None:
    assert service.wait_until_free()["blocks"] == 0
    assert not list(service.log.with_name("spool").iterdir())
