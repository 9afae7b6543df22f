"""POST /infer, with MindIE's request and response format. docs/api.md describes the format and our differences."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from secrets import randbits
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.deltas import Answer, Delta
from mindie_mm.worker.retry import PromptSource
from service.request.admitted import SendEvent
from service.request.call import Call
from service.request.incoming import IncomingDep, Responder
from service.request.prompts import Parse, PromptReader
from service.schemas.body import (
    INT32_MAX,
    WHOLE,
    Array,
    Body,
    CacheSalt,
    MaxTokens,
    NotServed,
    RepetitionPenalty,
    Settings,
    Stop,
    Templated,
    TopP,
    must_be,
)
from service.schemas.choices import Timed
from service.schemas.description import streamed
from service.schemas.message_types import AnyItem
from service.schemas.not_served import EXTRAS, INSTEAD_OF_MINDIES, NOT_SERVED, STRUCTURES

router = APIRouter()

DEFAULT_NEW_TOKENS = 20
_SEED_BITS = 63


Inputs = Annotated[str | Array[AnyItem], must_be("a string, or a list of dicts with one item each")]
"""A string that is used without a chat template, or a `List[Dict]`."""


class InferParameters(Settings):
    """MindIE's `parameters`. `typical_p`, `watermark` and `priority` are accepted and ignored, as in MindIE."""

    field = "parameters"
    not_served: ClassVar[NotServed] = {
        **NOT_SERVED,
        **STRUCTURES,
        **EXTRAS,
        **dict.fromkeys(("ignore_eos", "logit_bias", "stop_token_ids"), OFF),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), (None, 0)),
        **dict.fromkeys(("best_of", "n"), (None, 1)),
        "add_special_tokens": (None, True),
        **dict.fromkeys(("logprobs", "top_logprobs"), (*OFF, 0)),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), (None,)),  # OpenAI's names for max_new_tokens
    }

    instead: ClassVar[Mapping[str, str]] = INSTEAD_OF_MINDIES
    ignored: ClassVar[Collection[str]] = ("typical_p", "watermark", "priority")

    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    top_p: TopP | None = None
    max_new_tokens: MaxTokens | None = None
    do_sample: bool | None = None
    """Whether to sample. If it is None, tokens are sampled if `temperature`, `top_k` or `top_p` is given."""
    seed: Annotated[int, Field(ge=0, lt=2**63), WHOLE] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stop | None = None
    cache_salt: CacheSalt | None = None
    """Has the same meaning as in `GenerationBody`."""
    parse_special: bool | None = None
    """True if the spelling of a control token becomes the token in texts without a chat template, except for tokens of
    media items. If not, it is plain text. Default: `--parse-special`."""
    details: bool | None = None
    timeout: Annotated[int, Field(ge=1, le=3600), WHOLE] | None = None
    """Maximum time for the answer, in seconds."""

    @property
    def draws(self) -> bool:
        """True if tokens are sampled. If not, decoding is greedy."""
        if self.do_sample is None:
            return any(value is not None for value in (self.temperature, self.top_k, self.top_p))
        return self.do_sample

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters as described in `Settings`."""
        return self.params(
            default,
            max_tokens=self.max_new_tokens or DEFAULT_NEW_TOKENS,
            temperature=self.temperature or default.temperature or 1.0 if self.draws else 0.0,
            # If the request has no seed, choose one here, because the answer must report the seed.
            seed=randbits(_SEED_BITS) if self.seed is None and self.draws else self.seed,
        )


class InputsBody(Body):
    """Fields that the bodies of MindIE's endpoints share."""

    # These bodies have a boolean field chat_template, so it is not refused.
    not_served: ClassVar[NotServed] = {
        name: off for name, off in InferParameters.not_served.items() if name != "chat_template"
    }
    instead: ClassVar[Mapping[str, str]] = {
        **INSTEAD_OF_MINDIES,
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens inside parameters"),
        "stop_sequences": "stop inside parameters",
    }
    ignored: ClassVar[Collection[str]] = ("id",)
    of_parameters: ClassVar[Collection[str]] = InferParameters.model_fields
    """Names of fields that are accepted only in `parameters`."""

    inputs: Inputs
    """A string that is used without a chat template, or a `List[Dict]` that becomes one user turn of a chat."""
    chat_template: Templated | None = None
    """True if a list becomes a chat turn. If it is false, the items are joined without a template. Default: true."""
    parameters: InferParameters | None = None

    @model_validator(mode="before")
    @classmethod
    def _require_parameters(cls, given: Any) -> Any:
        """Refuse parameters at the top level. They would otherwise be ignored without notice."""
        for name in cls.of_parameters if isinstance(given, dict) else ():
            if given.get(name) is not None:
                raise PydanticCustomError("misplaced", "{name} must be inside parameters", {"name": name})
        return given

    @property
    def prompt_field(self) -> str | None:
        """Field that errors of the prompt name. None for a string, whose errors need no field."""
        return None if isinstance(self.inputs, str) else "inputs"

    def parse(self, reader: PromptReader) -> Parse:
        """Return the function that parses the prompt. Raise InputError if `inputs` is an empty text."""
        options = PromptOptions(parse_special=self.parameters.parse_special if self.parameters else None)
        inputs = self.inputs
        if isinstance(inputs, str):
            if not inputs:
                raise InputError("inputs is empty", param="inputs")
            return lambda: TokenizeRequest(items=reader.text(inputs), chat=False, options=options)
        chat = self.chat_template is not False
        return lambda: TokenizeRequest(items=reader.items(inputs), chat=chat, options=options)


class InferBody(InputsBody):
    """POST /infer."""

    stream: bool | None = None


MindieFinishReason = Literal["length", "eos_token", "stop_sequence"]


class Details(Timed):
    """Details that all answers of MindIE's endpoints have."""

    finish_reason: MindieFinishReason
    generated_tokens: int
    seed: int | None


class InferDetails(Details):
    """Details of an answer of /infer that is not streamed."""

    generated_token_ids: list[int]


class InferAnswer(TypedDict):
    """The response of /infer."""

    generated_text: str
    details: NotRequired[InferDetails]


class InferToken(TypedDict):
    """The tokens that a step generated."""

    id: list[int]
    text: str | None
    """Text of the step, or None in the last event."""


class InferEvent(TypedDict):
    """An event of a streamed answer.

    The first event has the time until its arrival in `prefill_time`. Each later event has the time since the event
    before it in `decode_time`. Both times are in milliseconds.
    """

    prefill_time: float | None
    decode_time: float | None
    generated_text: NotRequired[str]
    """The whole text, only in the last event."""
    details: NotRequired[Details | None]
    """Details, only in the last event. They are None unless the request asks for them."""
    token: InferToken


@router.post("/infer", responses=streamed(InferEvent, whole=InferAnswer))
async def infer(body: InferBody, incoming: IncomingDep) -> Response:
    """Answer a string or a list of texts, images, videos and audio clips. Stream the answer on request."""
    parameters = body.parameters or InferParameters()
    inference = _Infer(incoming.call(body, parameters), body, parameters)
    return incoming.answered(inference, stream=body.stream, last=None, timeout_s=parameters.timeout)


@dataclass(frozen=True, slots=True)
class _Infer(Responder):
    body: InferBody
    parameters: InferParameters

    def prompts(self) -> AbstractAsyncContextManager[list[PromptSource]]:
        return self.call.prompts([self.body.parse(self.call.reader)], field=self.body.prompt_field)

    async def answer(self) -> InferAnswer:
        async with self.prompts() as sources:
            (choice,) = await self.call.choices(sources)
        answer: InferAnswer = {"generated_text": choice.text}
        if self.parameters.details:
            answer["details"] = {**details(self.call, choice), "generated_token_ids": choice.token_ids}
        return answer

    async def stream(self, send: SendEvent) -> None:
        """Send one event per delta, with times in milliseconds. The last event has the whole text."""
        last = time.perf_counter()
        choice = Answer()

        async def add(_: int, delta: Delta) -> None:
            nonlocal last
            now = time.perf_counter()
            elapsed_ms = round((now - last) * 1000, 3)
            last = now
            prefill_ms, decode_ms = (None, elapsed_ms) if choice.texts else (elapsed_ms, None)
            choice.add(delta)
            event: InferEvent = {
                "prefill_time": prefill_ms,
                "decode_time": decode_ms,
                "token": {"id": delta.token_ids, "text": delta.text},
            }
            if delta.finish_reason is not None:
                event = {
                    "prefill_time": prefill_ms,
                    "decode_time": decode_ms,
                    "generated_text": choice.text,
                    "details": details(self.call, choice) if self.parameters.details else None,
                    "token": {"id": delta.token_ids, "text": None},
                }
            send(event)

        async with self.prompts() as sources:
            await self.call.run(sources, add)


def details(call: Call, choice: Answer) -> Details:
    """Return the `details` of a finished answer for MindIE's endpoints."""
    return {
        "finish_reason": _finish_reason(choice),
        "generated_tokens": len(choice.token_ids),
        "seed": call.params.seed,
        **call.timings([choice]),
    }


def _finish_reason(choice: Answer) -> MindieFinishReason:
    """Return MindIE's name for the reason why `choice` ended."""
    if choice.finish_reason == "length":
        return "length"
    return "eos_token" if choice.stop_reason is None else "stop_sequence"
