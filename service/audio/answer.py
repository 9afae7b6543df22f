"""The formats of a transcription or a translation."""

from __future__ import annotations

import logging
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from service.audio.body import Format
from service.audio.heard import Heard, Stretch
from service.schemas.choices import Usage

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
    """Return the field that says that the text is cut off. Also log it, because subtitles cannot say so."""
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
    """Return the answer in a format: an object to encode as JSON, or a string."""
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
        return "".join(f"{one['id'] + 1}\n{_range(one, ',')}\n{_cue(one)}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(f"{_range(one, '.')}\n{escape(_cue(one), quote=False)}\n\n" for one in segments)


def _cue(segment: Segment) -> str:
    """Return the text of a segment in one line, because an empty line would end the cue."""
    return " ".join(segment["text"].split())


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
