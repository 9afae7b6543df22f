"""Base classes and field types of all request bodies.

Values are not converted to other types. Fields in `not_served` are refused. All other unknown fields are ignored with a
warning, as in other servers, unless the service is strict.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mindie_mm.engine.requests.sampling_params import ALL_TOKENS, MAX_LOGPROBS, MAX_SALT_CHARACTERS, SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF, refused_fields, whole
from mindie_mm.inputs.unknown_keys import warn_once
from mindie_mm.structured.outputs import StructuredOutputs

INT32_MAX = 2**31 - 1

WHOLE = BeforeValidator(whole)
"""Validator that accepts 16.0 as 16. Clients in languages without integers send integers as floats."""

# These ranges are the same as in SamplingParams.check. The OpenAPI description and errors for single fields need them.
# tests/service/test_openapi.py checks that they agree.
MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
Logprobs = Annotated[int, Field(ge=ALL_TOKENS, le=MAX_LOGPROBS), WHOLE]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]

T = TypeVar("T")

Array = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first wrong entry. An error per entry could take a thousand times the request's size."""

TokenIds = Array[Annotated[int, WHOLE]]
"""A list of token ids. Their range is checked later, against the vocabulary."""
NotServed = Mapping[str, tuple[Any, ...]]
"""Fields of other servers that would change the answer, each with the harmless values that are accepted."""
IGNORED_FIELDS = frozenset(
    {
        # OpenAI's fields about users, billing and storage
        *("store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "moderation"),
        *("parallel_tool_calls", "stream_options"),
        # fields of vLLM and SGLang about scheduling and logs
        *("request_id", "rid", "kv_transfer_params"),
    }
)
"""Fields that clients send, but that do not change answers. They are accepted even with `--strict`."""
_MAX_UNKNOWN = 16
"""Maximum number of unknown fields to remember per request. Clients may send any number of them."""
_MAX_SHOWN = 40


def must_be(expected: str) -> WrapValidator:
    """Return a validator for a union. It reports one error, "must be `expected`", instead of one error per member."""

    def checked(given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(given)
        except ValidationError as error:
            raise PydanticCustomError("no_member", f"must be {expected}") from error

    return WrapValidator(checked)


Stop = Annotated[
    str | Array[str],
    must_be("a string or a list of strings"),
    AfterValidator(lambda given: (given,) if isinstance(given, str) else tuple(given)),
]
"""One stop string or a list of stop strings. The value is a tuple in both cases."""

Templated = Annotated[bool, must_be("true or false; only the chat template of the checkpoint is supported")]
"""True if the chat template turns `inputs` into a user turn. If not, `inputs` are joined without a template."""


class Fields(BaseModel):
    """A request body whose values are not converted. A number must be finite, and cannot be a string or a boolean."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    not_served: ClassVar[NotServed] = {}
    instead: ClassVar[Mapping[str, str]] = {}
    """Fields to use instead of some of the fields in `not_served`. Error messages suggest them."""
    ignored: ClassVar[Collection[str]] = ()
    """Fields that are known not to change the answer."""
    _unknown: tuple[str, ...] = PrivateAttr(())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the fields of the request, and of objects in it, that their classes do not define."""
        objects = [
            (name, value) for name in type(self).model_fields if isinstance(value := getattr(self, name), Fields)
        ]
        return (*self._unknown, *(f"{name}.{one}" for name, value in objects for one in value.unknown))

    @model_validator(mode="wrap")
    @classmethod
    def _note_unknown(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        fields = handler(given)
        if isinstance(given, dict):
            known = {*cls.model_fields, *cls.not_served, *cls.ignored}
            fields._unknown = unknown_fields(given, known)  # noqa: SLF001 - its own class
        return fields

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if isinstance(given, bytes):  # FastAPI parses a body only if its content type is JSON
            raise PydanticCustomError("no_json", "the request must have the header Content-Type: application/json")
        for name in refused_fields(given, cls.not_served) if isinstance(given, dict) else ():
            if name in cls.model_fields:
                continue
            others = " or ".join(json.dumps(one) for one in cls.not_served[name] if one not in OFF)
            expected = "{name} is not supported, except {others}" if others else "{name} is not supported"
            if instead := cls.instead.get(name, ""):
                expected += "; use {instead}"
            raise PydanticCustomError("not_served", expected, {"name": name, "others": others, "instead": instead})
        return given


class Closed(Fields, extra="forbid"):
    """An object that must not have unknown fields. Only the first one is reported. A null field counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {field.alias or name for name, field in cls.model_fields.items()}
        kept |= {*islice((name for name, one in given.items() if one is not None and name not in kept), 1)}
        return {name: one for name, one in given.items() if name in kept and one is not None}


@dataclass(frozen=True, slots=True)
class Structure:
    """The structured output that a request asks for, and the field that describes it."""

    wanted: StructuredOutputs
    field: str


class Settings(Fields):
    """Fields that control how the answer is generated."""

    field: ClassVar[str | None] = None
    """Field of the body that contains these fields, or None if they are at the top level."""
    timings: bool | None = None
    """Report how the request's time was spent, in `timings` of the answer or of MindIE's `details`.

    This field is an extension of both APIs.
    """

    @abstractmethod
    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters for the engine. If a field is absent or null, the value of `default` applies.

        Raises:
            InputError: Fields contradict each other, or a value is not supported.

        """

    def structure(self, *, close: bool) -> Structure | None:
        """Return the structured output that the request asks for, or None.

        Args:
            close: Whether a JSON schema without `additionalProperties` allows only the properties that it lists.

        Raises:
            InputError: A description is not valid, or two fields describe different outputs.

        """
        return None

    def params(self, default: SamplingParams, **overrides: Any) -> SamplingParams:
        """Return `default` updated with the fields that `SamplingParams` also has, and with `overrides`."""
        given = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__} | overrides
        return default.stating(**given)


class Body(Fields):
    """A request body."""

    model: str | None = None
    """Name of the served model, or None. An empty name counts as None."""

    @field_validator("model")
    @classmethod
    def _or_none(cls, given: str | None) -> str | None:
        return given or None


def unknown_fields(given: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the first `_MAX_UNKNOWN` names in `given` that are neither in `known` nor in `IGNORED_FIELDS`.

    Fields that are null count as absent.
    """
    unknown = (
        name for name, value in given.items() if value is not None and name not in known and name not in IGNORED_FIELDS
    )
    return tuple(islice(unknown, _MAX_UNKNOWN))


def pass_over_fields(names: Collection[str], *, strict: bool) -> None:
    """Warn about each unknown field when it occurs for the first time. If `strict`, raise InputError instead."""
    for name in names:
        if strict:
            shown = name[:_MAX_SHOWN]
            raise InputError(
                f"the request has the unknown field {shown!r}; this service refuses unknown fields (--strict)",
                param=shown,
            )
        warn_once(name, "a request")
