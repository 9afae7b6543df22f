"""What all request bodies share. Numbers are strict; unknown fields are ignored, as others do, but for `not_served`."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mindie_mm.engine.sampling_params import MAX_LOGPROBS, MAX_SALT_CHARACTERS, SamplingParams
from mindie_mm.inputs import OFF, refused_fields, whole

INT32_MAX = 2**31 - 1

WHOLE = BeforeValidator(whole)
"""Beside the limits of an integer: 16.0, which clients in languages without integers send, is 16."""

# Numbers in the ranges of SamplingParams.check, which the interface's description tells (tests/service/test_openapi.py
# holds them to be the same): a request that leaves them is refused with the field's name before anything is made of it.
MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]

T = TypeVar("T")

Array = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong entry is told: an error for each would take a thousand times the request's memory."""

TokenIds = Array[Annotated[int, WHOLE]]
"""Token ids, whose range the vocabulary decides."""


def must_be(said: str) -> WrapValidator:
    """Of a union: one sentence for the mistakes of all its members, which are told by types' names."""

    def checked(given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(given)
        except ValidationError as error:
            raise PydanticCustomError("no_member", f"must be {said}") from error

    return WrapValidator(checked)


Stop = Annotated[
    str | Array[str],
    must_be("a text or a list of texts"),
    AfterValidator(lambda given: (given,) if isinstance(given, str) else tuple(given)),
]
"""Stop strings, or one; read as a tuple."""

Templated = Annotated[bool, must_be("true or false: no template but the checkpoint's is served")]
"""Whether `inputs` are one user turn through the chat template, or follow one another as they are."""

NotServed = Mapping[str, tuple[Any, ...]]
"""Others' fields that would make another answer than the one that comes without them, and the values of each that would
not, which alone are taken."""


class Fields(BaseModel):
    """Fields of a request: no number out of a string, no integer out of `true` or 1.5, nothing infinite."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    not_served: ClassVar[NotServed] = {}
    instead: ClassVar[Mapping[str, str]] = {}
    """What to give in the place of some of them."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        if isinstance(given, bytes):  # FastAPI leaves a body of another type as it is
            raise PydanticCustomError("no_json", "the request needs the header Content-Type: application/json")
        for name in refused_fields(given, cls.not_served) if isinstance(given, dict) else ():
            if name in cls.model_fields:
                continue
            others = " or ".join(json.dumps(one) for one in cls.not_served[name] if one not in OFF)
            said = "{name} is not served, but for {others}" if others else "{name} is not served"
            if instead := cls.instead.get(name, ""):
                said += "; give {instead}"
            raise PydanticCustomError("not_served", said, {"name": name, "others": others, "instead": instead})
        return given


class Settings(Fields):
    """Fields that say how to answer."""

    field: ClassVar[str | None] = None
    """The field of a body that they stand in; None: they are its own."""
    timings: bool | None = None
    """Ours: say where the request's time went, in the answer's `timings`, or in the `details` of MindIE's forms."""

    @abstractmethod
    def sampling_params(self) -> SamplingParams:
        """As the engine takes them; InputError for what contradicts itself or is not served."""

    def params(self, **made: Any) -> SamplingParams:
        """Those that are given here under the sampler's own names, with those of `made` in their place.

        What is absent or null keeps its default.
        """
        given = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__} | made
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class Body(Fields):
    """A request body."""

    model: str | None = None
    """The served model's name; may be left out, or empty."""

    @field_validator("model")
    @classmethod
    def _or_none(cls, given: str | None) -> str | None:
        return given or None
