"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from service.http.errors import error_object, status_of
from service.messages.answer import Message, MessageEvent, MessageEvents, TokenCount, message
from service.messages.body import MessagesBody, PromptBody
from service.messages.chat import chat_body, prompt_fields, translated
from service.messages.front import RESPONSES, error_event
from service.request.admitted import SendEvent, WholeAnswer
from service.request.incoming import IncomingDep, Responder
from service.request.translated import Translated
from service.routes.chat import Chat, chat_of
from service.routes.tokens import TokenizeBody, tokenizing
from service.schemas.body import pass_over_fields
from service.schemas.description import answered, streamed

router = APIRouter(responses=RESPONSES)

_PREFIX = "msg_"


@router.post("/v1/messages", responses=streamed(MessageEvent, whole=Message))
async def messages(body: MessagesBody, incoming: IncomingDep) -> Response:
    """Answer a chat in the format of Anthropic's Messages API. Stream the answer on request."""
    pass_over_fields(body.unknown, strict=incoming.service.config.strict)
    given = translated(body, takes_late_system=incoming.service.chat_dialect.traits.takes_late_system)
    with given.naming_places():
        chat = chat_of(chat_body(body, given.messages), incoming, prefix=_PREFIX, cut_max_tokens=True)
    if body.max_tokens == 0:  # a chat completion has no such limit
        chat = replace(chat, call=replace(chat.call, params=msgspec.structs.replace(chat.call.params, max_tokens=0)))
    responder = _Message(chat.call, chat, body, given)
    return incoming.answered(responder, stream=body.stream, last=None, named=True)


@router.post("/v1/messages/count_tokens", responses=answered(TokenCount))
async def count_tokens(body: PromptBody, incoming: IncomingDep) -> Response:
    """Return the number of tokens of a prompt in the format of Anthropic's Messages API."""
    pass_over_fields(body.unknown, strict=incoming.service.config.strict)
    given = translated(body, takes_late_system=incoming.service.chat_dialect.traits.takes_late_system)
    with given.naming_places():
        fields = {"model": body.model} | prompt_fields(body, given.messages)
        count = tokenizing(TokenizeBody.model_validate(fields), incoming)

    async def answer() -> TokenCount:
        with given.naming_places():
            return {"input_tokens": (await count())["count"]}

    return WholeAnswer(answer, incoming.service.admission)


@dataclass(frozen=True, slots=True)
class _Message(Responder):
    chat: Chat
    body: MessagesBody
    given: Translated

    async def answer(self) -> Message:
        with self.given.naming_places():
            return message(await self.chat.answer(), self.body.max_tokens)

    async def stream(self, send: SendEvent) -> None:
        events = MessageEvents(send, self.body.max_tokens)
        with self.given.naming_places():
            await self.chat.stream(events.add)
        events.finish()

    def failed(self, error: Exception) -> Mapping[str, object]:
        return error_event(error_object(error), status_of(error), self.call.id.removeprefix(_PREFIX))
