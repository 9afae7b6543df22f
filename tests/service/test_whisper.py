"""Tests for transcriptions by a family that writes time stamps, with random weights and a window of 2 s."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from mindie_mm.media.audio.cuts import cuts
from tests.audio_samples import encode_audio, tone
from tests.models.test_whisper import TARGET, WINDOW_S, write_timed_checkpoint
from tests.service.test_audio import input_audio
from tests.service.test_transcriptions import PATH, RATE, events
from tests.warm import running_service
from tools.serving import RunningService

CLIP = encode_audio(tone(1.3, hertz=900), RATE)
TIME_S = 0.02


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("whisper")
    (folder / "timed").mkdir()
    given = settings | {"spool": folder / "spool", "pooling": "auto"}
    with running_service(given, folder / "log", write_timed_checkpoint(folder / "timed")) as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not list((folder / "spool").iterdir())


@pytest.fixture(scope="module")
def listener(whisper: RunningService) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=whisper.url, timeout=300) as client:
        yield client


def transcribe(listener: httpx2.Client, audio: bytes, path: str = PATH, **fields: Any) -> httpx2.Response:
    data = {"max_completion_tokens": "24"} | fields
    answer = listener.post(path, files={"file": ("a.wav", audio)}, data=data)
    assert answer.status_code == 200, answer.text
    return answer


def chat(listener: httpx2.Client, audio: bytes, text: str) -> tuple[str, list[int]]:
    """Return the text and the tokens of a chat about the audio."""
    messages = [{"role": "user", "content": [input_audio(audio), {"type": "text", "text": text}]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    answer = listener.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"].strip(), choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (PATH, {}, "<|transcribe|>"),
        (PATH, {"language": "German"}, "<|transcribe|><|de|>"),
        (PATH, {"language": "en-US", "prompt": "A square."}, "A square.<|transcribe|><|en|>"),
        ("/v1/audio/translations", {"language": "de"}, "<|translate|><|de|>"),
    ],
)
def test_language_task_and_prompt_begin_the_decoders_sequence(
    listener: httpx2.Client, path: str, fields: dict[str, str], text: str
) -> None:
    answer, _ = chat(listener, CLIP, text)
    expected = re.sub(r"<\|[\d.]+\|>", "", answer).strip()
    assert transcribe(listener, CLIP, path, **fields).json()["text"] == expected
    *_, last = events(transcribe(listener, CLIP, path, stream="true", **fields))
    assert last["text"] == expected


def test_segments_lie_between_time_stamps(listener: httpx2.Client, whisper: RunningService) -> None:
    _, tokens = chat(listener, CLIP, "<|transcribe|><|0.00|>")
    granularity = {"timestamp_granularities[]": "segment"}
    verbose = transcribe(listener, CLIP, response_format="verbose_json", **granularity).json()
    described = json.loads((whisper.log.with_name("timed") / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in described["added_tokens"]}
    first, ends = ids["<|0.00|>"], {ids["<|endoftext|>"]}
    times = [index for index in tokens if index >= first]
    assert len(times) > 1
    own = [segment for segment in verbose["segments"] if segment["seek"] == 0]  # the others are of another answer
    assert verbose["duration"] == 1.3
    assert verbose["text"].startswith("".join(segment["text"] for segment in own).strip())
    assert own[0]["start"] == pytest.approx((times[0] - first) * TIME_S)
    said = [index for segment in own for index in segment["tokens"]]
    assert said == [index for index in tokens if index < first and index not in ends]
    for segment in verbose["segments"]:
        assert 0 <= segment["start"] <= segment["end"] <= 1.3
        assert segment["avg_logprob"] < 0


def test_times_of_long_speech_add_up(listener: httpx2.Client) -> None:
    parts = [part for hertz in (300, 900, 1500) for part in (tone(1.4, hertz=hertz), np.zeros(RATE // 2, np.float32))]
    samples = np.concatenate(parts)
    audio = encode_audio(samples, RATE)
    segments = transcribe(listener, audio, response_format="verbose_json").json()["segments"]
    seeks = [cut / RATE for cut in (0, *cuts(np.frombuffer(audio[44:], np.int16), WINDOW_S))]
    assert len(seeks) == 3
    whole = np.frombuffer(audio[44:], np.int16)
    for start, stop in pairwise([*seeks, len(samples) / RATE]):
        assert stop - start <= WINDOW_S
        clip = encode_audio(whole[round(start * RATE) : round(stop * RATE)].astype(np.float32) / 2**15, RATE)
        alone = transcribe(listener, clip, response_format="verbose_json").json()["segments"]
        own = [segment for segment in segments if start <= segment["seek"] / 100 + 0.01 < stop]
        assert [segment["tokens"] for segment in own] == [segment["tokens"] for segment in alone]
        for one, other in zip(own, alone, strict=True):
            assert one["start"] == pytest.approx(start + other["start"], abs=2e-3)
            assert one["end"] == pytest.approx(start + other["end"], abs=2e-3)


def test_the_rest_that_an_answer_leaves_out_is_heard(listener: httpx2.Client) -> None:
    """The first answer ends with the beginning of a further stretch. A second one begins there."""
    samples = tone(1.9, hertz=2400)
    audio = encode_audio(samples, RATE)
    _, tokens = chat(listener, audio, "<|transcribe|><|0.00|>")
    *_, last, second, _ = tokens
    assert last == second
    segments = transcribe(listener, audio, response_format="verbose_json").json()["segments"]
    seeks = sorted({segment["seek"] / 100 for segment in segments})
    assert len(seeks) > 1
    rest = encode_audio(np.frombuffer(audio[44:], np.int16)[round(seeks[1] * RATE) :].astype(np.float32) / 2**15, RATE)
    alone = transcribe(listener, rest, response_format="verbose_json").json()["segments"]
    assert [segment["tokens"] for segment in segments[-len(alone) :]] == [segment["tokens"] for segment in alone]
    assert segments[0]["end"] <= seeks[1]


@pytest.mark.parametrize("typed", ["<|de|>", "a <|translate|>", "<|0.00|>", "<|startoflm|>", "<<|de|><|en|>"])
def test_text_in_a_prompt_is_no_control_token(listener: httpx2.Client, typed: str) -> None:
    fields = {"response_format": "verbose_json", "language": "en"}
    answer = transcribe(listener, CLIP, prompt=f"{typed} b", **fields).json()
    plain = transcribe(listener, CLIP, prompt=f"{typed} b".replace("<|", "< |"), **fields).json()
    assert answer == plain
    assert answer["usage"] == {"type": "duration", "seconds": 1.3}
    texts = {
        transcribe(listener, CLIP, prompt=text, max_completion_tokens="1").json()["usage"]["input_tokens"]
        for text in (typed, typed.replace("<|", "< |"))
    }
    assert len(texts) == 1


@pytest.mark.parametrize("prompt", ["word " * 100, "<|de|> " * 30_000])
def test_the_end_of_a_long_prompt_is_read(listener: httpx2.Client, prompt: str) -> None:
    usage = transcribe(listener, CLIP, prompt=prompt, language="en").json()["usage"]
    without = transcribe(listener, CLIP, language="en").json()["usage"]
    assert usage["input_tokens"] - without["input_tokens"] == 1 + TARGET // 2 - 1  # the first is <|startofprev|>


@pytest.mark.parametrize("hertz", [300, 900])
def test_text_has_no_time_stamps(listener: httpx2.Client, hertz: int) -> None:
    audio = encode_audio(tone(1.9, hertz=hertz), RATE)
    shown, tokens = chat(listener, audio, "<|transcribe|><|en|>")
    assert "<|" in shown, tokens
    for fields in ({}, {"response_format": "text"}, {"stream": "true"}, {"response_format": "verbose_json"}):
        assert "<|" not in transcribe(listener, audio, language="en", **fields).text
    assert "<|" not in transcribe(listener, audio, "/v1/audio/translations").text


def test_an_answer_that_is_cut_off_says_so(listener: httpx2.Client, whisper: RunningService) -> None:
    for form in ("json", "verbose_json"):
        cut = transcribe(listener, CLIP, response_format=form, max_completion_tokens="2").json()
        assert cut["finish_reason"] == "length"
    *_, last = events(transcribe(listener, CLIP, stream="true", max_completion_tokens="2"))
    assert last["finish_reason"] == "length"
    transcribe(listener, CLIP, response_format="srt", max_completion_tokens="2")
    assert whisper.log.read_text().count("cut off the text of 1 clips") >= 4


def test_language_and_silence_are_the_references(listener: httpx2.Client, whisper: RunningService) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    path = whisper.log.with_name("timed")
    model, extract = (
        WhisperForConditionalGeneration.from_pretrained(path),
        WhisperFeatureExtractor.from_pretrained(path),
    )
    names = {index: name.strip("<|>") for name, index in model.generation_config.lang_to_id.items()}
    for hertz in (300, 900, 1500):
        samples = tone(1.3, hertz=hertz)
        found = model.detect_language(**extract(samples, sampling_rate=RATE, return_tensors="pt"))
        audio = encode_audio(samples, RATE)
        verbose = transcribe(listener, audio, response_format="verbose_json", prompt="Ja.").json()
        assert verbose["language"] == names[int(found[0])]
        with torch.inference_mode():
            start = torch.tensor([[model.generation_config.decoder_start_token_id]])
            logits = model(**extract(samples, sampling_rate=RATE, return_tensors="pt"), decoder_input_ids=start).logits
        silence = logits[0, -1].softmax(-1)[model.generation_config.no_timestamps_token_id - 1].item()
        for segment in verbose["segments"]:
            assert segment["no_speech_prob"] == pytest.approx(silence, rel=1e-3)
    stated = transcribe(listener, CLIP, response_format="verbose_json", language="German").json()
    assert stated["language"] == "de"


def test_words_have_no_time_stamps(listener: httpx2.Client) -> None:
    data = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    answer = listener.post(PATH, files={"file": ("a.wav", CLIP)}, data=data)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timestamp_granularities"


def test_a_language_that_the_checkpoint_lacks_is_refused(listener: httpx2.Client) -> None:
    answer = listener.post(PATH, files={"file": ("a.wav", CLIP)}, data={"language": "fr"})
    assert answer.json()["error"]["message"] == ("language is 'fr', which this model does not know; use one of en, de")
