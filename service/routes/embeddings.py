"""POST /v1/embeddings. An input is a string, a list of token ids, or a chat that may contain images."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import pybase64
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.responses import Response

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Text, media_defaults, template_variables
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.embedding import Embedder, PoolingParams
from mindie_mm.worker.retry import PromptSource
from service.request.admitted import WholeAnswer
from service.request.call import Call
from service.request.incoming import IncomingDep
from service.request.prompts import Parse
from service.request.token_text import in_turns
from service.schemas.choices import usage
from service.schemas.description import answered
from service.schemas.embedding_types import EmbeddingAnswer, EmbeddingBody, EmbeddingEntry
from service.schemas.openai_types import opens_turn

router = APIRouter()

MAX_VALUES = 2**22
"""Maximum number of values in an answer. As numbers in JSON, each takes about 20 bytes."""


@router.post("/v1/embeddings", responses=answered(EmbeddingAnswer))
async def embeddings(body: EmbeddingBody, incoming: IncomingDep) -> Response:
    """Return the embedding of each text, list of token ids or chat."""
    embedder = incoming.service.worker.embedder
    call = incoming.call(body, body, prefix="embd-")
    params = embedder.sampling_params(call.params.priority, call.params.cache_salt)
    call = replace(call, params=msgspec.structs.replace(params, lora=call.params.lora))
    wanted = PoolingParams(dimensions=body.dimensions, normalize=body.normalizes, prompt_name=body.prompt_name)
    embedding = _Embeddings(call, body, embedder, embedder.check(wanted))
    return WholeAnswer(embedding.answer, incoming.service.admission)


@dataclass(frozen=True, slots=True)
class _Embeddings:
    call: Call
    body: EmbeddingBody
    embedder: Embedder
    wanted: PoolingParams

    async def answer(self) -> EmbeddingAnswer:
        async with self.sources() as sources:
            for source in sources:
                self.embedder.check_length(source.prompt)
            choices = await self.call.choices(sources)
        data: list[EmbeddingEntry] = []
        async for part in in_turns(choices, self.wanted.dimensions or self.embedder.size):
            data += [
                {
                    "object": "embedding",
                    "index": choice.index,
                    "embedding": self._encoded(self.embedder.embedding(choice.pooled, self.wanted)),
                }
                for choice in part
            ]
        return {
            "id": self.call.id,
            "object": "list",
            "created": int(time.time()),
            "model": self.call.model_name,
            "data": data,
            "usage": usage([source.prompt for source in sources], choices),
            **self.call.timings(choices),
        }

    @asynccontextmanager
    async def sources(self) -> AsyncIterator[list[PromptSource]]:
        """Yield the prompts, and free the shared memory of their images at exit.

        Raise InputError if an input is not valid, and LimitExceeded if there are too many.
        """
        texts, ids, chats = self.body.inputs()
        self._require_few(len(texts) + len(ids) + len(chats))
        options = self.body.prompt_options
        prompts: AbstractAsyncContextManager[list[PromptSource]]
        if ids:
            prompts = self.call.prompts_of_ids(ids, options, field="input")
        else:
            parse: list[Parse] = [partial(self._of_text, text) for text in texts]
            parse += [partial(self._of_chat, chat) for chat in chats]
            prompts = self.call.prompts(parse, field="messages" if self.body.input is None else "input")
        async with prompts as sources:
            yield sources

    def _require_few(self, num_inputs: int) -> None:
        size = self.wanted.dimensions or self.embedder.size
        if num_inputs * size > MAX_VALUES:
            raise LimitExceeded(
                f"the answer would have {num_inputs} embeddings of {size} values; the limit is {MAX_VALUES} values in "
                "total. Send fewer inputs in one request, or lower dimensions",
                param="input",
            )

    def _of_text(self, text: str) -> TokenizeRequest:
        request = self.embedder.request([Text(text)], self.wanted.prompt_name)
        return msgspec.structs.replace(request, options=self.body.prompt_options)

    def _of_chat(self, chat: list[dict[str, Any]]) -> TokenizeRequest:
        """Parse a chat. The checkpoint's instruction precedes it unless it has a system message."""
        body, defaults = self.body, media_defaults(self.body.mm_processor_kwargs, self.body.media_io_kwargs)
        messages = self.call.reader.messages(chat, defaults)
        if not any(message.role == "system" for message in messages):
            messages = [*self.embedder.system(self.embedder.instruction(self.wanted.prompt_name)), *messages]
        opens = self.embedder.modules.opens_turn and not body.continue_final_message
        if body.add_generation_prompt is not None:
            opens = opens_turn(body.add_generation_prompt, body.continue_final_message)
        return TokenizeRequest(
            messages=messages,
            add_generation_prompt=opens,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=template_variables(body.chat_template_kwargs, None, None),
            options=replace(body.prompt_options, parse_special=None),
        )

    def _encoded(self, values: NDArray[Any]) -> msgspec.Raw:
        if self.body.encoding_format == "base64":
            return msgspec.Raw(b'"' + pybase64.b64encode(values.astype("<f4").tobytes()) + b'"')
        return msgspec.Raw(msgspec.json.encode(values.tolist()))
