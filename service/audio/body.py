"""The form of a transcription or a translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError

from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF
from mindie_mm.nn.speech import LANGUAGES, SpeechTraits
from service.http.errors import mistakes_in_words
from service.schemas.body import INT32_MAX, Array, Body, MaxTokens, NotServed, Penalty, RepetitionPenalty, TopP

Format = Literal["json", "verbose_json", "text", "srt", "vtt"]
Task = Literal["transcribe", "translate"]


class TranscriptionBody(Body):
    """POST /v1/audio/transcriptions and /v1/audio/translations, without the file."""

    not_served: ClassVar[NotServed] = {
        "chunking_strategy": (*OFF, "auto"),
        **dict.fromkeys(("include", "known_speaker_names", "known_speaker_references"), OFF),
        **dict.fromkeys(("use_beam_search", "to_language"), (*OFF, "false", "en")),
        "n": (*OFF, "1"),
        **dict.fromkeys(("vad_filter", "hotwords", "diarize"), (*OFF, "", "false")),
    }
    ignored: ClassVar[Sequence[str]] = ("stream_include_usage", "stream_continuous_usage_stats")

    language: str | None = None
    """Language of the speech, as an ISO 639 code or in English."""
    prompt: str | None = None
    """Text with names and words that the speech may contain, or the transcript before the speech."""
    response_format: Format | None = None
    stream: bool | None = None
    timestamp_granularities: Array[Literal["segment", "word"]] | None = None
    """Sent as `timestamp_granularities[]`. Requires `verbose_json`, and a model that writes time stamps."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Default: 0."""
    max_completion_tokens: MaxTokens | None = None
    """Maximum transcript length of each clip in tokens."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Sequence[str]]) -> Self:
        """Return the body for the fields of a form. Form values are strings, so numbers are converted.

        Raises:
            InputError: A field is not valid, or is given twice.

        """
        lists = {name for name, field in cls.model_fields.items() if "list" in str(field.annotation)}
        given: dict[str, Any] = {}
        for sent, values in fields.items():
            name = sent.removesuffix("[]")
            if name in lists:
                given[name] = [*values]
            elif len(values) > 1 and name not in cls.not_served:
                raise InputError(f"the form has {len(values)} parts named {name[:40]!r}; send one", param=name[:40])
            elif values[0] or name not in cls.model_fields:  # an empty field counts as absent
                given[name] = values[0]
        try:
            return cls.model_validate(given, strict=False)
        except ValidationError as error:
            mistakes: list[dict[str, Any]] = [
                {**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()
            ]
            first = next(iter(mistakes[0]["loc"][1:]), mistakes[0].get("ctx", {}).get("name"))
            raise InputError(mistakes_in_words(mistakes), param=first if isinstance(first, str) else None) from error

    @property
    def format(self) -> Format:
        """Format of the answer."""
        return self.response_format or "json"

    def check(self, task: Task, traits: SpeechTraits) -> None:
        """Raise InputError if the model or the format does not support a field."""
        if task == "translate" and traits.translate is None:
            raise InputError("this model does not translate speech; use /v1/audio/transcriptions")
        if self.stream and self.format not in ("json", "text"):
            raise InputError(
                f"response_format is {self.format!r}, but a stream has text only; use 'json', or leave stream out",
                param="response_format",
            )
        for granularity in self.timestamp_granularities or ():
            if granularity == "word" or not traits.has_times:
                raise InputError(
                    f"timestamp_granularities has {granularity!r}, but this model writes no time stamps of "
                    f"{granularity}s; leave it out",
                    param="timestamp_granularities",
                )
            if self.format != "verbose_json":
                raise InputError(
                    f"timestamp_granularities requires response_format 'verbose_json', not {self.format!r}",
                    param="timestamp_granularities",
                )

    def wants_times(self, traits: SpeechTraits) -> bool:
        """Return whether the model should write time stamps."""
        return traits.has_times and self.format in ("verbose_json", "srt", "vtt")

    def language_of(self, traits: SpeechTraits) -> tuple[str, str] | None:
        """Return the code of the language and its form in the prompt, or None if the request states no language.

        Raise InputError if the model does not know the language.
        """
        if self.language is None:
            return None
        wanted = self.language.strip().lower()
        names = {name.lower(): code for code, name in LANGUAGES.items()}
        code = names.get(wanted, wanted)
        for one in (code, code.partition("-")[0]):  # en-US is English
            if one in traits.languages:
                return one, traits.languages[one]
        known = ", ".join(traits.languages)
        raise InputError(
            f"language is {self.language[:40]!r}, which this model does not know; use one of {known}", param="language"
        )
