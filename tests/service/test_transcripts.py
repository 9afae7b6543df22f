"""Tests for the texts and times of transcripts, without a service, and the prompt of a recognizer of speech."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from mindie_mm.errors import OperationalError
from mindie_mm.media.audio.cuts import SAMPLES, SPEECH_RATE, cuts
from mindie_mm.nn.family import Plan
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.shm import ArraySpec
from mindie_mm.tokenize.clips import Clips, keep_rest
from service.audio.answer import answer, joined
from service.audio.heard import Heard, Stretch, heard
from service.audio.stream import SpeechText
from tests.audio_samples import encode_audio, tone
from tests.models.test_qwen3_asr import TestQwen3ASR as Recognizer
from tests.warm import running_service

ASR = SpeechTraits(answer_start="<asr_text>")
TIMED = SpeechTraits(with_times="<|0.00|>", first_time_id=100, time_s=0.02)
USAGE: Any = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def completion(content: str, tokens: list[int] | None = None) -> Any:
    logprobs = None
    if tokens is not None:
        positions = [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in tokens]
        logprobs = {"content": msgspec.Raw(msgspec.json.encode(positions))}
    choice = {"message": {"content": content}, "token_ids": tokens, "logprobs": logprobs, "finish_reason": "stop"}
    return {"choices": [choice], "usage": USAGE}


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def test_stretches_lie_between_time_stamps() -> None:
    # a pair of stamps, one stamp between two stretches, text without a stamp at its end, and the end of the answer
    tokens = [110, 0, 1, 120, 125, 2, 150, 3, 99]
    found = heard(completion("", tokens), TIMED, (10.0, 13.0), letters, ends=[99]).stretches
    assert [(round(one.start_s, 2), round(one.stop_s, 2), one.text) for one in found] == [
        (10.2, 10.4, "ab"),
        (10.5, 11.0, "c"),
        (11.0, 13.0, "d"),
    ]
    assert {one.avg_logprob for one in found} == {-0.5}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("srt", "1\n00:00:01,000 --> 00:00:02,500\nA & <b> --> c\n\n"),
        ("vtt", "WEBVTT\n\n00:00:01.000 --> 00:00:02.500\nA &amp; &lt;b&gt; --&gt; c\n\n"),
    ],
)
def test_text_does_not_break_a_subtitle(form: Any, expected: str) -> None:
    clip = Heard(0.0, 3.0, [Stretch(1.0, 2.5, " A & <b>\n\n--> c")], USAGE)
    assert answer([clip], form, task="transcribe", language="", temperature=0.0, duration_s=3.0) == expected


def test_an_answer_of_a_recognizer_states_its_language() -> None:
    one = heard(completion("language German<asr_text>Ja.", [1, 2, 99]), ASR, (0.0, 1.0), letters, ends=[99])
    assert (one.language, one.text, one.stretches[0].avg_logprob) == ("de", "Ja.", -0.5)


@pytest.mark.parametrize(
    ("tokens", "rest_s"),
    [
        ([100, 0, 150, 150, 99], 11.0),  # a further stretch begins at the end of the last one
        ([100, 0, 150, 160, 99], 11.2),
        ([100, 0, 150, 99], None),  # nothing is said after the last stamp
        ([100, 0, 99], None),
    ],
)
def test_a_stretch_that_begins_at_the_end_is_left_for_the_next_answer(tokens: list[int], rest_s: float | None) -> None:
    one = heard(completion("", tokens), TIMED, (10.0, 13.0), letters, ends=[99])
    assert one.rest_s == (None if rest_s is None else pytest.approx(rest_s))


@pytest.mark.parametrize(
    ("spec", "grid"),
    [
        (ArraySpec((100,), "int16"), (50, 50)),
        (ArraySpec((100,), "int16"), (0, 50)),
        (ArraySpec((100,), "int16"), (50, 100)),
        (ArraySpec((100,), "int16"), (2**60,)),
        (ArraySpec((100,), "float32"), ()),
        (ArraySpec((10, 10), "int16"), ()),
    ],
)
def test_a_plan_that_is_not_one_of_speech_is_refused(spec: ArraySpec, grid: tuple[int, ...]) -> None:
    """A decoder that a file has compromised may send any plan."""
    with pytest.raises(OperationalError, match="not one of speech"):
        Clips.of(Plan(1, {SAMPLES: spec}, "", grid))
    with pytest.raises(OperationalError, match="not one of speech"):
        Clips.of(Plan(1, {"other": spec}, ""))


def test_the_rest_of_a_clip_is_a_clip(tmp_path: Path) -> None:
    clip = tmp_path / "clip-0.wav"
    clip.write_bytes(encode_audio(tone(2.0), SPEECH_RATE))
    whole = np.frombuffer(clip.read_bytes()[44:], np.int16)
    keep_rest(clip, 0.52)
    assert np.array_equal(whole[round(0.52 * SPEECH_RATE) :], np.frombuffer(clip.read_bytes()[44:], np.int16))
    assert [*tmp_path.iterdir()] == [clip]


def test_stamps_beyond_the_end_of_the_clip_are_its_end() -> None:
    (one,) = heard(completion("", [100, 0, 500]), TIMED, (0.0, 1.5), letters, ends=[]).stretches
    assert (one.start_s, one.stop_s) == (0.0, 1.5)


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_times_of_subtitles_have_hours(form: Any) -> None:
    clip = heard(completion(" so\n"), ASR, (3599.9996, 3723.5), letters, ends=[])
    given: Any = {"task": "transcribe", "language": "", "temperature": 0.0, "duration_s": 3723.5}
    point = "," if form == "srt" else "."
    head = "1\n" if form == "srt" else "WEBVTT\n\n"
    assert answer([clip], form, **given) == f"{head}01:00:00{point}000 --> 01:02:03{point}500\nso\n\n"


def test_silence_has_no_segments() -> None:
    clip = heard(completion(" \n"), ASR, (0.0, 2.0), letters, ends=[])
    given: Any = {"task": "transcribe", "language": "de", "temperature": 0.0, "duration_s": 2.0}
    assert answer([clip], "srt", **given) == ""
    verbose: Any = answer([clip], "verbose_json", **given)
    assert (verbose["text"], verbose["segments"]) == ("", [])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([" one ", "", "two."], "one two."),
        (["你好", "世界。"], "你好世界。"),
        (["안녕", "하세요"], "안녕 하세요"),
        (["これはPCM", "です"], "これはPCMです"),
        ([], ""),
    ],
)
def test_texts_of_clips_are_joined_as_their_script_requires(texts: list[str], expected: str) -> None:
    assert joined(texts) == expected


def test_a_stream_has_the_order_of_the_speech() -> None:
    sent: list[str] = []
    speech = SpeechText(sent.append)
    first, second, third = (speech.clip("<asr_text>") for _ in range(3))

    def say(clip: Any, text: str) -> None:
        clip.add({"choices": [{"delta": {"content": text}, "finish_reason": None}]})

    say(third, "language None<asr_text>three")
    third.finish()
    say(first, "language Eng")
    say(first, "lish<asr_text> on")
    say(first, "e ")
    say(second, "two")  # without the text before the transcript
    assert sent == ["on", "e"]
    first.finish()
    second.finish()
    assert sent == ["on", "e", " two", " three"]
    assert speech.text == joined(["one", "two", "three"])


def bursts(*lengths_s: float) -> np.ndarray:
    parts: list[np.ndarray] = []
    for length in lengths_s:
        parts += [tone(length), np.zeros(SPEECH_RATE // 4, np.float32)]
    return np.round(np.concatenate(parts) * 2**15).astype(np.int16)


@pytest.mark.parametrize("lengths_s", [(3.0,), (6, 9, 2, 5, 7), (31.0,), (1.0,) * 40, (9.9, 5.3, 4.8), (4.0, 9.0, 9.5)])
def test_clips_cover_the_speech_and_fit_the_window(lengths_s: tuple[float, ...]) -> None:
    samples = bursts(*lengths_s)
    bounds = [0, *cuts(samples, 10.0), len(samples)]
    lengths = np.diff(bounds) / SPEECH_RATE
    assert lengths.max() <= 10.0
    assert lengths.min() >= min(1.0, len(samples) / SPEECH_RATE)
    if 31.0 not in lengths_s:  # otherwise, there is no pause
        for cut in bounds[1:-1]:
            assert not samples[cut - SPEECH_RATE // 20 : cut + SPEECH_RATE // 20].any()


@pytest.mark.slow
def test_a_recognizer_gets_language_and_prompt_as_it_was_trained(tmp_path: Path, settings: dict[str, object]) -> None:
    (checkpoint := tmp_path / "asr").mkdir()
    Recognizer.write_checkpoint(checkpoint)
    given = settings | {"spool": tmp_path / "spool", "log_prompts": True, "pooling": "auto"}
    with running_service(given, tmp_path / "log", checkpoint) as service:
        fields = {"language": "de", "prompt": "Ada Lovelace", "max_completion_tokens": "3"}
        for stream in ("false", "true"):
            answered = httpx2.post(
                f"{service.url}/v1/audio/transcriptions",
                files={"file": ("a.wav", encode_audio(tone(0.4), SPEECH_RATE))},
                data=fields | {"stream": stream},
                timeout=300,
            )
            assert answered.status_code == 200, answered.text
        refused = httpx2.post(f"{service.url}/v1/audio/translations", files={"file": b"a"}, timeout=300)
        assert "does not translate" in refused.json()["error"]["message"]
    (prompt, _) = [line for line in (tmp_path / "log").read_text().split("INFO") if " prompt of " in line]
    assert "system\\nAda Lovelace<|im_end|>" in prompt
    assert "<|im_start|>assistant\\nlanguage German<asr_text> [" in prompt
