"""What all request bodies share. Numbers are strict; unknown fields are ignored, as others do."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mindie_mm.engine.sampling_params import MAX_LOGPROBS

INT32_MAX = 2**31 - 1

# Numbers in the ranges of SamplingParams.check, which the interface's description tells (tests/service/test_openapi.py
# holds them to be the same): a request that leaves them is refused with the field's name before anything is made of it.
MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX)]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

T = TypeVar("T")

Array = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong entry is told: an error for each would take a thousand times the request's memory."""


class Body(BaseModel):
    """A request body: no number out of a string, no integer out of `true` or 1.5, nothing infinite."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    """The served model's name; may be left out."""
