"""POST /generate and /generate_stream, MindIE's variant of the API of text-generation-inference (docs/api.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, ClassVar, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.errors import InputError
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.worker.deltas import Answer, Delta
from mindie_mm.worker.retry import PromptSource
from service.request.admitted import SendEvent
from service.request.incoming import Incoming, IncomingDep, Responder
from service.routes.infer import Details, InferParameters, InputsBody, details
from service.schemas.body import WHOLE, Array, TokenIds, must_be
from service.schemas.description import answered, streamed
from service.schemas.message_types import AnyItem

router = APIRouter()

_NO_ADAPTER = "None"
_OF_TEXT = ("decoder_input_details", "truncate")
"""Parameters that are not supported for prompts with handles."""


class GenerateParameters(InferParameters):
    """The `parameters` of text-generation-inference 0.9.4 that MindIE supports."""

    decoder_input_details: bool | None = None
    """List the tokens of the prompt in the answer's `prefill`."""
    return_full_text: bool | None = None
    """Put the text of `inputs` before the answer."""
    truncate: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Maximum number of prompt tokens. If a prompt is longer, its oldest text and whole media items are dropped."""
    adapter_id: str | None = None
    """Only "None" is accepted. `model` selects an adapter."""


class GenerateBody(InputsBody):
    """POST /generate and /generate_stream."""

    of_parameters: ClassVar[Collection[str]] = GenerateParameters.model_fields

    inputs: Annotated[  # type: ignore[assignment] # a body is not changed, so it may allow more types than its base
        str | TokenIds | Array[AnyItem],
        must_be("a string, a list of dicts with one item each, or a list of token ids"),
    ]
    """A string or a `List[Dict]` as in /infer, or the token ids of the prompt, which are used unchanged."""
    stream: bool | None = None
    """/generate refuses true. /generate_stream ignores this field and always streams."""
    parameters: GenerateParameters | None = None

    @property
    def token_ids(self) -> list[int] | None:
        """Token ids of the prompt, or None if it is given in another form."""
        if isinstance(self.inputs, str) or not (self.inputs and isinstance(self.inputs[0], int)):
            return None
        return [one for one in self.inputs if isinstance(one, int)]


class GenerateDetails(Details):
    """Details of an answer, whether it is streamed or not."""

    prompt_tokens: int


class GenerateToken(TypedDict):
    """A token. `logprob` and `special` are null, as in MindIE."""

    id: int
    logprob: None
    special: None
    text: str


class WholeDetails(GenerateDetails):
    """Details of an answer that is not streamed."""

    prefill: list[GenerateToken]
    """Tokens of the prompt. The list is empty unless `decoder_input_details` is set."""
    tokens: list[GenerateToken]


class GenerateAnswer(TypedDict):
    """The response of /generate."""

    generated_text: str
    details: NotRequired[WholeDetails]


class StepTokens(TypedDict):
    """The tokens that a step generated."""

    id: list[int]
    text: str
    logprob: None
    special: None


class GenerateEvent(TypedDict):
    """An event of /generate_stream."""

    token: StepTokens
    generated_text: str | None
    """The whole text in the last event, or None in all other events."""
    details: GenerateDetails | None
    """Details, if the request asks for them. Only the last event has them; in all other events, they are None."""


@router.post("/generate", responses=answered(GenerateAnswer))
async def generate_text(body: GenerateBody, incoming: IncomingDep) -> Response:
    """Answer a string or a list of texts, images, videos and audio clips, in one response."""
    if body.stream:
        raise InputError("stream=true is not supported by /generate; use /generate_stream", param="stream")
    generation = _generation(body, incoming)
    return incoming.answered(generation, timeout_s=generation.parameters.timeout)


@router.post("/generate_stream", response_class=Response, responses=streamed(GenerateEvent))
async def generate_stream(body: GenerateBody, incoming: IncomingDep) -> Response:
    """Answer like `/generate`, as a stream. Each event has one or several tokens."""
    generation = _generation(body, incoming)
    if generation.parameters.decoder_input_details:
        message = "decoder_input_details=true is not supported in a stream; leave decoder_input_details out"
        raise InputError(message, param="parameters")
    return incoming.answered(generation, stream=True, last=None, timeout_s=generation.parameters.timeout)


def _generation(body: GenerateBody, incoming: Incoming) -> _Generate:
    parameters = body.parameters or GenerateParameters()
    call = incoming.call(body, parameters)
    if parameters.adapter_id not in (None, _NO_ADAPTER):
        message = f"adapter_id is {parameters.adapter_id!r}; give the name of a LoRA adapter as model beside inputs"
        raise InputError(message, param="parameters")
    if parameters.return_full_text and not isinstance(body.inputs, str):
        message = "return_full_text=true needs a string as inputs; send a string, or leave return_full_text out"
        raise InputError(message, param="parameters")
    return _Generate(call, body, parameters)


@dataclass(frozen=True, slots=True)
class _Generate(Responder):
    body: GenerateBody
    parameters: GenerateParameters

    def prompts(self) -> AbstractAsyncContextManager[list[PromptSource]]:
        if (ids := self.body.token_ids) is not None:
            options = PromptOptions(cut_to=self.parameters.truncate or 0)
            of_text = [name for name in _OF_TEXT if getattr(self.parameters, name)]
            return self.call.prompts_of_ids([ids], options, field="inputs", of_text=of_text)
        return self.call.prompts(
            [self.body.parse(self.call.reader)], self.parameters.truncate, field=self.body.prompt_field
        )

    async def answer(self) -> GenerateAnswer:
        async with self.prompts() as (source,):
            (choice,) = await self.call.choices([source])
            prompt = source.prompt
        answer: GenerateAnswer = {"generated_text": self._text(choice)}
        if self.parameters.details or self.parameters.decoder_input_details:
            answer["details"] = {
                **self._details(choice, len(prompt)),
                "prefill": self._tokens(prompt.plain_ids.tolist() if self.parameters.decoder_input_details else []),
                "tokens": self._tokens(choice.token_ids),
            }
        return answer

    async def stream(self, send: SendEvent) -> None:
        """Send one event per delta. The last event has the whole text."""
        choice = Answer()
        async with self.prompts() as (source,):

            async def add(_: int, delta: Delta) -> None:
                choice.add(delta)
                last = delta.finish_reason is not None
                event: GenerateEvent = {
                    "token": {"id": delta.token_ids, "text": delta.text, "logprob": None, "special": None},
                    "generated_text": self._text(choice) if last else None,
                    "details": self._details(choice, len(source.prompt)) if last and self.parameters.details else None,
                }
                send(event)

            await self.call.run([source], add)

    def _text(self, choice: Answer) -> str:
        return f"{self.body.inputs}{choice.text}" if self.parameters.return_full_text else choice.text

    def _details(self, choice: Answer, prompt_tokens: int) -> GenerateDetails:
        return {"prompt_tokens": prompt_tokens, **details(self.call, choice)}

    def _tokens(self, token_ids: Sequence[int]) -> list[GenerateToken]:
        text = self.call.service.tokens.text
        return [{"id": token, "logprob": None, "special": None, "text": text(token)} for token in token_ids]
