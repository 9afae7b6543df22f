"""POST /infer: MindIE's own form of request and answer (docs/api.md has both, and where ours differ)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from secrets import randbits
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.tokenize.messages import TokenizeRequest
from service.body import INT32_MAX, OFF, Array, Body, Fields, MaxTokens, NotServed, RepetitionPenalty, TopP
from service.choices import Choice, Clock, collect, timings
from service.json_response import JSONResponse
from service.line import generate, tokenized
from service.openai_types import NOT_SERVED
from service.sse import STREAMED, EventStream
from service.state import Arrived, RequestId, Service, ServiceDep

router = APIRouter()

DEFAULT_NEW_TOKENS = 20
_SEED_BITS = 63


class InferParameters(Fields):
    """MindIE's `parameters`. `typical_p`, `watermark` and `priority` are taken and do nothing, as in MindIE."""

    not_served: ClassVar[NotServed] = {
        **NOT_SERVED,
        **dict.fromkeys(("grammar", "ignore_eos", "logit_bias", "response_format", "stop_token_ids"), OFF),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), (None, 0, 0.0)),
        **dict.fromkeys(("min_tokens", "top_n_tokens"), (None, 0)),
        **dict.fromkeys(("best_of", "n"), (None, 1)),
    }

    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: TopP | None = None
    max_new_tokens: MaxTokens | None = None
    do_sample: bool | None = None
    """None: sampled if temperature, top_k or top_p is given."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: str | Array[str] | None = None
    details: bool | None = None
    timeout: Annotated[int, Field(ge=1, le=3600)] | None = None
    """Seconds."""
    timings: bool | None = None
    """Ours: say where the request's time went, in the details."""

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not the likeliest taken."""
        if self.do_sample is None:
            return any(value is not None for value in (self.temperature, self.top_k, self.top_p))
        return self.do_sample

    def sampling_params(self) -> SamplingParams:
        """As the engine takes them."""
        given: dict[str, Any] = {
            "max_tokens": self.max_new_tokens or DEFAULT_NEW_TOKENS,
            "temperature": self.temperature if self.draws else 0.0,
            "top_k": self.top_k,
            "top_p": self.top_p,
            # the answer names the seed, whoever chose it
            "seed": randbits(_SEED_BITS) if self.seed is None and self.draws else self.seed,
            "repetition_penalty": self.repetition_penalty,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop and tuple(self.stop),
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class InputsBody(Body):
    """What MindIE's forms share."""

    inputs: str | Array[dict[str, Any]]
    """A text, taken as it is; or a `List[Dict]`, one user turn of a chat."""
    chat_template: bool = True
    """False: the items of a list follow one another with no template around them."""

    def request(self) -> TokenizeRequest:
        """What there is to tokenise; InputError where it is empty."""
        if isinstance(self.inputs, str):
            if not self.inputs:
                raise InputError("inputs is empty")
            return TokenizeRequest(text=self.inputs)
        return TokenizeRequest(items=self.inputs, chat=self.chat_template)


class InferBody(InputsBody):
    """POST /infer."""

    stream: bool | None = None
    parameters: InferParameters | None = None


@router.post("/infer", responses=STREAMED)
async def infer(
    body: InferBody, request: Request, service: ServiceDep, request_id: RequestId, arrived: Arrived
) -> Response:
    """Answers a text, or a list of texts, images and videos; streamed on request."""
    service.check_model(body.model)
    parameters = body.parameters or InferParameters()
    params = parameters.sampling_params().check(service.worker.engine.info.vocab_size)
    call = _Infer(service, body, parameters, params, request_id, Clock(arrived))
    if body.stream:
        return EventStream(call.events, service.admission, last=b"", timeout_s=parameters.timeout)
    async with service.admission.admit(request.receive, parameters.timeout):
        return JSONResponse(await call.answer())


@dataclass(frozen=True, slots=True)
class _Infer:
    """One request."""

    service: Service
    body: InferBody
    parameters: InferParameters
    params: SamplingParams
    id: str
    clock: Clock

    def request(self) -> TokenizeRequest:
        return self.service.worker.limited(self.body.request(), self.params)

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        async with tokenized(self.service, self.request(), self.clock) as source:
            (choice,) = await collect(generate(self.service, [source], self.params, 1, self.id, self.clock), 1)
        answer: dict[str, Any] = {"generated_text": choice.text}
        if self.parameters.details:
            answer["details"] = self._details(choice) | {"generated_token_ids": choice.token_ids}
        return answer

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """One event a step, the last with the whole text; times in milliseconds."""
        last = time.perf_counter()
        choice = Choice(0)
        async with (
            tokenized(self.service, self.request(), self.clock) as source,
            aclosing(generate(self.service, [source], self.params, 1, self.id, self.clock)) as deltas,
        ):
            async for _, delta in deltas:
                now = time.perf_counter()
                elapsed_ms = round((now - last) * 1000, 3)
                last = now
                first = not choice.texts
                choice.add(delta)
                event: dict[str, Any] = {
                    "prefill_time": elapsed_ms if first else None,
                    "decode_time": None if first else elapsed_ms,
                }
                if delta.finish_reason is None:
                    yield {**event, "token": {"id": delta.token_ids, "text": delta.text}}
                else:
                    yield {
                        **event,
                        "generated_text": choice.text,
                        "details": self._details(choice) if self.parameters.details else None,
                        "token": {"id": delta.token_ids, "text": None},
                    }

    def _details(self, choice: Choice) -> dict[str, Any]:
        details: dict[str, Any] = {
            "finish_reason": finish_reason(choice),
            "generated_tokens": len(choice.token_ids),
            "seed": self.params.seed,
        }
        return details | ({"timings": timings(self.clock, [choice])} if self.parameters.timings else {})


def finish_reason(choice: Choice) -> str:
    """Why it ended, in MindIE's words."""
    if choice.finish_reason == "length":
        return "length"
    return "eos_token" if choice.stop_reason is None else "stop_sequence"
