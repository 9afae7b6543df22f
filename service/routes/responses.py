"""/v1/responses, OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.errors import InputError
from service.http.errors import error_object
from service.http.json_response import JSONResponse
from service.request.admitted import SendEvent
from service.request.incoming import IncomingDep, Responder
from service.request.paging import Page, page_of
from service.request.translated import Translated
from service.responses.answer import ResponseEvent, ResponseEvents, ResponseObject, begun
from service.responses.body import CustomTool, ResponsesBody
from service.responses.chat import chat_body, translated
from service.responses.conversation import conversation
from service.responses.stored_files import with_stored_files
from service.routes.chat import Chat, chat_of
from service.schemas.body import pass_over_fields
from service.schemas.description import answered, streamed

router = APIRouter()


class DeletedResponse(TypedDict):
    """The response of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: bool


@router.post("/v1/responses", responses=streamed(ResponseEvent, whole=ResponseObject))
async def responses(body: ResponsesBody, incoming: IncomingDep) -> Response:
    """Answer a conversation in the format of OpenAI's Responses API. Stream the answer on request."""
    pass_over_fields(body.unknown, strict=incoming.service.config.strict)
    store = incoming.service.responses
    talk = conversation(body, store, incoming.owner)
    late = incoming.service.chat_dialect.traits.takes_late_system
    items = await with_stored_files(talk.items, incoming)
    given = translated(body.instructions, items, takes_late_system=late)
    prefix = f"resp_{incoming.service.replica}_" if incoming.service.replica else "resp_"
    with given.naming_places():
        chat = chat_of(chat_body(body, given.messages), incoming, prefix=prefix, cut_max_tokens=True)
    stored = store.is_on and body.store is not False
    response = begun(body, chat.call.id, int(time.time()), chat.call.model_name, stored=stored)
    _require_text([response, talk.new])
    custom = [tool.name for tool in body.tools or () if isinstance(tool, CustomTool)]
    events = ResponseEvents(response, body.summarizes, custom)
    return incoming.answered(
        _Response(chat.call, chat, given, talk.new, events), stream=body.stream, last=None, named=True
    )


def _require_text(echoed: Any) -> None:
    """Raise InputError if values that the answer repeats cannot be written as JSON."""
    try:
        msgspec.json.encode(echoed)
    except (UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise InputError("the request contains a lone surrogate, or is nested too deeply") from error


@dataclass(frozen=True, slots=True)
class _Response(Responder):
    chat: Chat
    given: Translated
    new_items: Sequence[dict[str, Any]]
    """Items of the request's input."""
    events: ResponseEvents

    async def answer(self) -> ResponseObject:
        with self.given.naming_places():
            completion = await self.chat.answer()
        (choice,) = completion["choices"]
        self.events.add_message(choice["message"], choice["logprobs"])
        self.events.finish(choice["finish_reason"], completion["usage"])
        self._store()
        return self.events.response

    async def stream(self, send: SendEvent) -> None:
        """Send the events of the response, until it ends or its client cancels it."""
        self.events.send = send
        with self.call.service.responses.running(self.call.owner, self.events.response) as cancelled:
            answering = asyncio.create_task(self.chat.stream(self.events.add))
            waiting = asyncio.create_task(cancelled.wait())
            try:
                await asyncio.wait([answering, waiting], return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    with self.given.naming_places():
                        await answering
                    self.events.finish()
                else:
                    answering.cancel()
                    await asyncio.wait([answering])  # it may add another delta before it ends
                    self.events.cancel()
            finally:
                for task in (answering, waiting):
                    task.cancel()
                await asyncio.gather(answering, waiting, return_exceptions=True)
        self._store()

    def failed(self, error: Exception) -> Mapping[str, object]:
        """Store the response as failed, because its client has its id. Return the last event."""
        event = self.events.fail(error_object(error)["error"]["message"])
        self._store()
        return event

    def _store(self) -> None:
        response = self.events.response
        if response["store"]:
            self.call.service.responses.put(self.call.owner, dict(response), self.new_items)


@router.get("/v1/responses/{response_id}", responses=answered(ResponseObject))
async def retrieve(response_id: str, incoming: IncomingDep, *, stream: bool = False) -> Response:
    """Return a response that is stored or being streamed."""
    if stream:
        raise InputError(
            "stream=true is not supported for stored responses, which are returned as a whole; leave stream out",
            param="stream",
        )
    return JSONResponse(incoming.service.responses.found(incoming.owner, response_id))


@router.delete("/v1/responses/{response_id}", responses=answered(DeletedResponse))
async def delete(response_id: str, incoming: IncomingDep) -> Response:
    """Remove a stored response."""
    store = incoming.service.responses
    store.require(incoming.owner, response_id)
    store.delete(incoming.owner, response_id)
    return JSONResponse(DeletedResponse(id=response_id, object="response", deleted=True))


@router.post("/v1/responses/{response_id}/cancel", responses=answered(ResponseObject))
async def cancel(response_id: str, incoming: IncomingDep) -> Response:
    """Stop a response that is being streamed. Its stream ends with a response of the status `cancelled`."""
    store = incoming.service.responses
    if (running := store.cancel(incoming.owner, response_id)) is not None:
        return JSONResponse({**running, "status": "cancelled"})
    status = store.require(incoming.owner, response_id).decoded()["status"]
    raise InputError(
        f"the response {response_id!r} has the status {status}; only a response that is being streamed can be cancelled"
    )


@router.get("/v1/responses/{response_id}/input_items", responses=answered(Page[dict[str, Any]]))
async def input_items(
    response_id: str,
    incoming: IncomingDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Return the items that precede the output of a stored response."""
    store, owner = incoming.service.responses, incoming.owner
    stored = store.require(owner, response_id)
    earlier = [] if stored.previous_id is None else store.conversation(owner, stored.previous_id, whole=False)
    items = [*earlier, *stored.input_items()]
    if order == "desc":
        items.reverse()
    return JSONResponse(page_of(items, after, limit))
