"""The answers of a transcription or a translation, in each format."""

from __future__ import annotations

import logging
import math
import unicodedata
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired

import msgspec
from typing_extensions import TypedDict

from mindie_mm.nn.speech import SpeechTraits
from service.audio.body import Format
from service.schemas.choices import Usage
from service.schemas.openai_answers import ChatChoice, ChatCompletion

_log = logging.getLogger(__name__)

DELTA, DONE = "transcript.text.delta", "transcript.text.done"


class TokenUsage(TypedDict):
    """Numbers of tokens of all clips together."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class DurationUsage(TypedDict):
    """Length of the speech."""

    type: Literal["duration"]
    seconds: float


class Transcript(TypedDict):
    """The answer in the format json."""

    text: str
    usage: TokenUsage
    finish_reason: NotRequired[Literal["length"]]
    """Present if a limit on tokens has cut off the text of a clip."""


class Segment(TypedDict):
    """A stretch of speech."""

    id: int
    seek: int
    """Beginning of the segment's clip, in frames of 10 ms."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    """Mean log-probability of the tokens."""
    compression_ratio: float
    no_speech_prob: NotRequired[float]
    """Probability that the segment's clip contains no speech. Missing if the model does not tell."""


class VerboseTranscript(TypedDict):
    """The answer in the format verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    """Language of the request, or the language that the model has detected, or an empty string."""
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage
    finish_reason: NotRequired[Literal["length"]]
    """Same as in `Transcript`."""


class TranscriptEvent(TypedDict):
    """An event of a streamed transcript."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: NotRequired[str]
    text: NotRequired[str]
    """The whole transcript, in the last event."""
    usage: NotRequired[TokenUsage]
    finish_reason: NotRequired[Literal["length"]]
    """Same as in `Transcript`, in the last event."""


class Ended(TypedDict):
    """The key of an answer whose text is cut off."""

    finish_reason: NotRequired[Literal["length"]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a clip that has been transcribed."""

    start_s: float
    stop_s: float
    text: str
    tokens: Sequence[int] = ()
    avg_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Heard:
    """The answer about one clip."""

    start_s: float
    """Beginning of the clip in the speech."""
    stop_s: float
    stretches: Sequence[Stretch]
    usage: Usage
    is_cut_off: bool = False
    """Whether a limit on tokens has cut off the answer."""
    language: str = ""
    """Code of the language that the answer states, or an empty string."""
    no_speech_prob: float | None = None
    """Probability that the clip contains no speech. None if the model was not asked."""
    rest_s: float | None = None
    """Beginning of the rest of the clip, if the model has left it out, because a stretch in it did not end there."""

    @property
    def text(self) -> str:
        """The whole text of the clip."""
        return "".join(stretch.text for stretch in self.stretches).strip()


def heard(
    completion: ChatCompletion,
    traits: SpeechTraits,
    times: tuple[float, float],
    decode: Callable[[list[int]], str],
    ends: Collection[int],
) -> Heard:
    """Return the answer about the clip at `times`.

    Args:
        completion: Chat completion about the clip.
        traits: Traits of the checkpoint.
        times: Beginning and end of the clip in the speech, in seconds.
        decode: Function that returns the text of tokens.
        ends: Ids of the tokens that end an answer.

    """
    (choice,) = completion["choices"]
    is_cut_off = choice["finish_reason"] == "length"
    scored = [(token, score) for token, score in _scored(choice) if token not in ends]
    if not traits.has_times or not scored:
        before, text = _parted(traits.answer_start, choice["message"]["content"] or "")
        codes = {name: code for code, name in traits.languages.items()}
        language = codes.get(before.strip().rpartition(" ")[2], "")
        stretches = [Stretch(*times, text, *_tokens_and_mean(scored))] if text.strip() else []
        return Heard(*times, stretches, completion["usage"], is_cut_off, language)
    last = [token for token, _ in scored[-2:] if token >= traits.first_time_id]
    rest_s = None
    if len(last) == 2 and choice["finish_reason"] == "stop":  # the model has begun a further stretch, and stopped
        rest_s = _time_of(last[-1], traits, times)
    stretches = _stretches(scored, traits, times, decode)
    return Heard(*times, stretches, completion["usage"], is_cut_off, rest_s=rest_s)


def no_speech_prob(choice: ChatChoice) -> float:
    """Return the probability of the token that the request names in `logprob_token_ids`."""
    assert choice["logprobs"] is not None, "the request asks for it"
    (position,) = msgspec.json.decode(choice["logprobs"]["content"])
    return math.exp(position["top_logprobs"][-1]["logprob"])


def _scored(choice: ChatChoice) -> list[tuple[int, float]]:
    """Return the tokens of an answer with their log-probabilities, or an empty list if the request asked for none."""
    tokens, logprobs = choice["token_ids"], choice["logprobs"]
    if tokens is None or logprobs is None:
        return []
    scores = [position["logprob"] for position in msgspec.json.decode(logprobs["content"])]
    return [*zip(tokens, scores, strict=False)]


def _tokens_and_mean(scored: Sequence[tuple[int, float]]) -> tuple[list[int], float]:
    return [token for token, _ in scored], sum(score for _, score in scored) / max(len(scored), 1)


def _parted(start: str, text: str) -> tuple[str, str]:
    """Return the text before `start` and the text after it."""
    if not start or start not in text:
        return "", text
    before, _, after = text.partition(start)
    return before, after


def _stretches(
    scored: Sequence[tuple[int, float]],
    traits: SpeechTraits,
    times: tuple[float, float],
    decode: Callable[[list[int]], str],
) -> list[Stretch]:
    """Return the stretches between time stamps. A missing last time stamp is the end of the clip.

    `scored` has the tokens with their log-probabilities.
    """
    found: list[Stretch] = []
    begun, stop = times
    own: list[tuple[int, float]] = []

    def end(at: float) -> None:
        nonlocal begun
        ids, mean = _tokens_and_mean(own)
        if text := decode(ids):
            found.append(Stretch(begun, at, text, ids, mean))
        own.clear()
        begun = at

    for token, score in scored:
        if token >= traits.first_time_id:
            end(_time_of(token, traits, times))
        else:
            own.append((token, score))
    end(stop)
    return found


def _time_of(token: int, traits: SpeechTraits, times: tuple[float, float]) -> float:
    return min(times[0] + (token - traits.first_time_id) * traits.time_s, times[1])


def joined(texts: Sequence[str]) -> str:
    """Return the texts of consecutive clips as one text, with spaces unless the script has none."""
    whole = ""
    for text in filter(None, map(str.strip, texts)):
        whole += separator(whole, text) + text
    return whole


def separator(before: str, after: str) -> str:
    """Return the text between two stripped texts: a space, except beside a character of Chinese or Japanese."""
    return "" if not before or not after or _is_unspaced(before[-1]) or _is_unspaced(after[0]) else " "


def _is_unspaced(character: str) -> bool:
    is_wide = unicodedata.east_asian_width(character) in ("W", "F")
    return is_wide and not unicodedata.name(character, "").startswith("HANGUL")


def token_usage(clips: Sequence[Usage]) -> TokenUsage:
    """Return the usage of all clips."""
    given, made = (sum(clip[name] for clip in clips) for name in ("prompt_tokens", "completion_tokens"))
    return {"type": "tokens", "input_tokens": given, "output_tokens": made, "total_tokens": given + made}


def ended(cut_off: Iterable[bool]) -> Ended:
    """Return the key that reports a text which is cut off, and log it, because subtitles have no place for it."""
    if not (num_clips := sum(cut_off)):
        return {}
    _log.warning("a limit on tokens has cut off the text of %d clips of speech", num_clips)
    return {"finish_reason": "length"}


def answer(
    clips: Sequence[Heard],
    form: Format,
    *,
    task: Literal["transcribe", "translate"],
    language: str,
    temperature: float,
    duration_s: float,
) -> Mapping[str, Any] | str:
    """Return the answer in a format: an object to encode as JSON, or a text."""
    text, end = joined([clip.text for clip in clips]), ended(clip.is_cut_off for clip in clips)
    if form == "json":
        return Transcript(text=text, usage=token_usage([clip.usage for clip in clips]), **end)
    if form == "text":
        return f"{text}\n"
    segments = _segments(clips, temperature)
    if form == "verbose_json":
        return VerboseTranscript(
            task=task,
            language=language,
            duration=duration_s,
            text=text,
            segments=segments,
            usage={"type": "duration", "seconds": duration_s},
            **end,
        )
    if form == "srt":
        cues = [f"{one['id'] + 1}\n{_range(one, ',')}\n{one['text'].strip()}\n\n" for one in segments]
        return "".join(cues)
    return "WEBVTT\n\n" + "".join(f"{_range(one, '.')}\n{one['text'].strip()}\n\n" for one in segments)


def _segments(clips: Sequence[Heard], temperature: float) -> list[Segment]:
    stretches = [(clip, stretch) for clip in clips for stretch in clip.stretches]
    return [_segment(index, clip, stretch, temperature) for index, (clip, stretch) in enumerate(stretches)]


def _segment(index: int, clip: Heard, stretch: Stretch, temperature: float) -> Segment:
    segment: Segment = {
        "id": index,
        "seek": round(100 * clip.start_s),
        "start": round(stretch.start_s, 3),
        "end": round(stretch.stop_s, 3),
        "text": stretch.text,
        "tokens": [*stretch.tokens],
        "temperature": temperature,
        "avg_logprob": stretch.avg_logprob,
        "compression_ratio": len(data := stretch.text.encode()) / len(zlib.compress(data)),
    }
    if clip.no_speech_prob is not None:
        segment["no_speech_prob"] = clip.no_speech_prob
    return segment


def _range(segment: Segment, point: str) -> str:
    return f"{_time(segment['start'], point)} --> {_time(segment['end'], point)}"


def _time(seconds: float, point: str) -> str:
    whole = round(1000 * seconds)
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
