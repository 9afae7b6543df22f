"""The transcript of a clip: texts between time stamps, read from the model's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from mindie_mm.nn.speech import SpeechTraits
from service.schemas.choices import Usage
from service.schemas.openai_answers import ChatChoice, ChatCompletion


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
    """True if a limit on tokens has cut off the answer."""
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
