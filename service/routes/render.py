"""POST /v1/chat/completions/render and /v1/completions/render, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.processes.tasks import in_thread, off_loop
from mindie_mm.tokenize.prompt import PlannedPrompt
from mindie_mm.tokenize.requests import TokenizeRequest
from service.render.answer import (
    GenerateRequest,
    Hashing,
    Tensors,
    features,
    hashes_of,
    like_vllm,
    num_bytes,
    require_no_pages,
    sampling_params,
)
from service.render.plans import KnownMedia
from service.request.admitted import WholeAnswer
from service.request.call import Call
from service.request.incoming import Incoming, IncomingDep
from service.request.prompts import Made, Parse
from service.request.stored_files import with_stored_files
from service.routes.chat import chat_of
from service.schemas.description import answered
from service.schemas.openai_types import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody

router = APIRouter()

Payload = Literal["tensors", "none"]


class RenderChatBody(ChatBody):
    """POST /v1/chat/completions/render. The other fields are those of /v1/chat/completions."""

    mm_payload: Payload = "tensors"
    """Tensors if the answer contains the preprocessed media, or none if it contains only their places and hashes."""


class RenderCompletionBody(CompletionBody):
    """POST /v1/completions/render. The other fields are those of /v1/completions."""

    mm_payload: Payload = "tensors"
    """Has the same meaning as in /v1/chat/completions/render."""


@router.post("/v1/chat/completions/render", responses=answered(GenerateRequest))
async def render_chat(body: RenderChatBody, incoming: IncomingDep) -> Response:
    """Return the token ids of a chat, and the places and hashes of its media."""
    require_scale_out(incoming)
    _require_renderable(body)
    body = body.model_copy(update={"messages": await with_stored_files(body.messages, incoming)})
    chat = chat_of(body, incoming)

    async def answer() -> GenerateRequest:
        rendering = _Rendering.of(chat.call, body, body.mm_payload)
        parse = rendering.parse(chat.parse())
        fill = rendering.tensors is not None
        async with chat.call.plans([parse], field="messages", known_media=rendering.known, fill=fill) as made:
            (rendered,) = await rendering.rendered(made)
        return rendered

    return WholeAnswer(answer, incoming.service.admission)


@router.post("/v1/completions/render", responses=answered(GenerateRequest))
async def render_completion(body: RenderCompletionBody, incoming: IncomingDep) -> Response:
    """Return the token ids of each prompt, as a list."""
    require_scale_out(incoming)
    _require_renderable(body)
    given = body.prompts()
    if body.embeddings():
        raise InputError("prompt_embeds are not supported by /render; send text or token ids", param="prompt_embeds")
    if not given or not all(given):
        raise InputError("prompt is empty", param="prompt")
    if len(given) > MAX_CHOICES:
        raise LimitExceeded(f"the request has {len(given)} prompts; the limit is {MAX_CHOICES}", param="prompt")
    call = incoming.call(body, body, prefix="cmpl-", n=body.n or 1)
    options = replace(
        body.prompt_options,
        add_special_tokens=body.add_special_tokens is not False,
        parse_special=body.parse_special,
    )

    def request(text: str) -> TokenizeRequest:
        return TokenizeRequest(items=call.reader.text(text), chat=False, options=options)

    async def answer() -> list[GenerateRequest]:
        rendering = _Rendering.of(call, body, body.mm_payload)
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) < len(given):
            ids = [ids for ids in given if not isinstance(ids, str)]
            return await rendering.rendered(await call.plans_of_ids(ids, options))
        parses = [rendering.parse(partial(request, text)) for text in texts]
        fill = rendering.tensors is not None
        async with call.plans(parses, known_media=rendering.known, fill=fill) as made:
            return await rendering.rendered(made)

    return WholeAnswer(answer, incoming.service.admission)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """How the prompts of one request are rendered."""

    call: Call
    body: GenerationBody
    hashing: Hashing
    known: KnownMedia | None
    """Media that were planned before. None if the plans of media are not kept, or if their tensors are sent."""
    tensors: Tensors | None
    """Which tensors of media are sent, if `mm_payload` asks for them."""

    @classmethod
    def of(cls, call: Call, body: GenerationBody, payload: Payload) -> _Rendering:
        """Return the rendering for a request. Raise InputError if its options of media are not valid."""
        service = call.service
        options = (getattr(body, name, None) for name in ("mm_processor_kwargs", "media_io_kwargs"))
        background = service.worker.config.media.rgba_background_color
        hashing = Hashing.of(service.model_id, background, *options)
        if payload == "tensors":
            tensors = Tensors.known(service.worker.tokenizer_stage.traits, service.worker.config.engine.dtype)
            return cls(call, body, hashing, None, tensors)
        known = None
        if service.config.plan_cache_bytes and not service.worker.config.media.isolate_requests:
            known = KnownMedia(service.shared, hashing, call.owner, call.params.cache_salt)
        return cls(call, body, hashing, known, None)

    def parse(self, parse: Parse) -> Parse:
        """Return the function that parses a prompt as the servers that get the answer would."""
        like = like_vllm if self.call.service.config.like == "vllm" else _unchanged
        return lambda: like(self._checked(require_no_pages(parse())))

    def _checked(self, request: TokenizeRequest) -> TokenizeRequest:
        """Return the prompt. Raise InputError if it has media whose tensors are requested, but not known."""
        if self.tensors is not None:
            self.tensors.require(request)
        return request

    async def rendered(self, made: Made[PlannedPrompt]) -> list[GenerateRequest]:
        """Return the answers for planned prompts."""
        several = len(made.results) > 1
        if (tensors := self.tensors) is not None:
            self.call.service.admission.hold_tensors(sum(tensors.num_bytes(plan) for plan in made.results))
        answers = []
        for index, (plan, media) in enumerate(zip(made.results, made.media, strict=True)):
            hashes = await off_loop(num_bytes(media), partial(hashes_of, plan, media, self.hashing))
            if self.known is not None and hashes:
                self.known.keep(index, plan, hashes)
            answer = partial(self._answer, plan, hashes, f"-{index}" if several else "")
            answers.append(answer() if self.tensors is None else await in_thread(answer))
        return answers

    def _answer(self, plan: PlannedPrompt, hashes: Sequence[str], suffix: str) -> GenerateRequest:
        call, body = self.call, self.body
        info = call.service.worker.engine.info
        room = info.max_model_len - len(plan) if info.max_output_len is None else info.max_output_len
        return {
            "request_id": call.id + suffix,
            "token_ids": msgspec.Raw(msgspec.json.encode(plan.plain_ids.tolist())),
            "token_offsets": None,
            "features": features(plan, hashes, self.tensors),
            "content_parts": None,
            "sampling_params": sampling_params(call.params, body.bad_words, room, call.n),
            "model": body.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": body.return_token_ids,
            "output_mode": "tokens",
            "stream": bool(body.stream),
            "stream_options": body.stream_options.model_dump() if body.stream_options else None,
            "cache_salt": body.cache_salt,
            "priority": call.params.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }


def _unchanged(request: TokenizeRequest) -> TokenizeRequest:
    return request


def require_scale_out(incoming: Incoming) -> None:
    """Raise HTTPException unless the setting `enable_scale_out` is on."""
    if not incoming.service.config.enable_scale_out:
        raise HTTPException(403, "this service does not serve this route; start it with --enable-scale-out")


def _require_renderable(body: GenerationBody) -> None:
    """Raise InputError for beam search, which a server of tokens does not know."""
    if body.use_beam_search:
        raise InputError("use_beam_search is not supported by /render; leave it out", param="use_beam_search")
