"""POST /rerank and /score, also under /v1 and /v2: scores of pairs of a query and a document."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.inputs import Item, MediaDefaults, Text, media_defaults, template_variables, type_of
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.scoring import Part, Scorer
from service.request.admitted import WholeAnswer
from service.request.call import Call
from service.request.incoming import Incoming, IncomingDep
from service.schemas.choices import Timed, Usage, usage
from service.schemas.description import answered
from service.schemas.embedding_types import MAX_INPUTS, PoolingBody
from service.schemas.rerank_types import Given, RankedDocument, RerankAnswer, RerankBody, ScoreAnswer, ScoreBody

router = APIRouter()

MAX_CHARACTERS = 2**24
"""Maximum number of characters in all pairs of a request. Each pair repeats its query."""


@router.post("/rerank", responses=answered(RerankAnswer))
@router.post("/v1/rerank", responses=answered(RerankAnswer))
@router.post("/v2/rerank", responses=answered(RerankAnswer))
async def rerank(body: RerankBody, incoming: IncomingDep) -> Response:
    """Score documents by their relevance to a query, and sort them."""
    scoring = _Scoring.of(body, incoming, "rerank-", body.instruction, body.use_activation)

    async def answer() -> RerankAnswer:
        if not body.documents:
            raise InputError("documents is empty", param="documents")
        _require_few_pairs(len(body.documents), "documents")
        query = scoring.part(body.query, "query")
        documents = [scoring.part(one, f"documents[{i}]") for i, one in enumerate(body.documents)]
        kept = await scoring.cut(documents, body.max_tokens_per_doc or 0)
        scored = await scoring.scores([(query, one) for one in kept], "documents")
        best = sorted(range(len(kept)), key=lambda index: -scored.scores[index])[: body.top_n or None]
        return {
            "id": scoring.call.id,
            "model": scoring.call.model_name,
            "usage": scored.usage,
            "results": [
                {
                    "index": index,
                    "document": None if body.return_documents is False else _shown(body.documents[index]),
                    "relevance_score": scored.scores[index],
                }
                for index in best
            ],
            **scored.timings,
        }

    return WholeAnswer(answer, incoming.service.admission)


@router.post("/score", responses=answered(ScoreAnswer))
@router.post("/v1/score", responses=answered(ScoreAnswer))
async def score(body: ScoreBody, incoming: IncomingDep) -> Response:
    """Score pairs of a query and a document, in order."""
    scoring = _Scoring.of(body, incoming, "score-", body.instruction, body.use_activation)

    async def answer() -> ScoreAnswer:
        queries, documents = body.sides()
        _require_few_pairs(len(documents), "text_2")
        given = {id(one): scoring.part(one, "text_1") for one in queries}  # a single query has one part for all pairs
        pairs = [
            (given[id(query)], scoring.part(one, f"text_2[{i}]"))
            for i, (query, one) in enumerate(zip(queries, documents, strict=True))
        ]
        scored = await scoring.scores(pairs, "text_2")
        return {
            "id": scoring.call.id,
            "object": "list",
            "created": int(time.time()),
            "model": scoring.call.model_name,
            "data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scored.scores)],
            "usage": scored.usage,
            **scored.timings,
        }

    return WholeAnswer(answer, incoming.service.admission)


@dataclass(frozen=True, slots=True)
class _Scored:
    scores: list[float]
    usage: Usage
    timings: Timed


@dataclass(frozen=True, slots=True)
class _Scoring:
    """One request for scores."""

    call: Call
    body: PoolingBody
    scorer: Scorer
    defaults: MediaDefaults
    instruction: str | None
    activation: bool | None

    @classmethod
    def of(
        cls, body: PoolingBody, incoming: Incoming, prefix: str, instruction: str | None, activation: bool | None
    ) -> _Scoring:
        """Check the request's settings. Raise InputError if one is not valid, or the checkpoint computes no scores."""
        scorer = Scorer(incoming.service.worker.embedder)
        call = incoming.call(body, body, prefix=prefix)
        params = scorer.sampling_params(call.params.priority, call.params.cache_salt)
        params = msgspec.structs.replace(params, lora=call.params.lora)
        defaults = media_defaults(body.mm_processor_kwargs, body.media_io_kwargs)
        return cls(replace(call, params=params), body, scorer, defaults, instruction, activation)

    def part(self, given: Given, where: str) -> Part:
        """Parse a query or a document. Raise InputError if it is empty or not valid."""
        if isinstance(given, dict):
            content = given.get("content", given.get("text"))
            if not isinstance(content, str | list):
                message = f"{where}.content is {type_of(content)}; it must be a list of content parts or a string"
                raise InputError(message, param=where.partition("[")[0])
            given = content if isinstance(content, str) else ""
            if isinstance(content, list) and content:
                (message_,) = self.call.reader.messages([{"role": "user", "content": content}], self.defaults)
                return message_.content if isinstance(message_.content, tuple) else [Text(message_.content or "")]
        if not given:
            raise InputError(f"{where} is empty", param=where.partition("[")[0])
        return [Text(given)]

    async def cut(self, documents: Sequence[Part], max_tokens: int) -> Sequence[Part]:
        """Return the documents. Texts are cut to `max_tokens` tokens, unless it is 0."""
        if not max_tokens:
            return documents
        _require_few(sum(map(_size, documents)), "documents")
        tokenizer = self.call.service.worker.tokenizer

        def cut(part: Part) -> Part:
            if len(part) != 1 or not isinstance(part[0], Text):
                return part
            offsets = tokenizer.encode(part[0].text, add_special_tokens=False).offsets[:max_tokens]
            return [Text(part[0].text[: offsets[-1][1]])] if offsets else part

        return await asyncio.to_thread(lambda: [*map(cut, documents)])

    async def scores(self, pairs: Sequence[tuple[Part, Part]], field: str) -> _Scored:
        """Return the score of each pair. Raise LimitExceeded if there are too many characters."""
        _require_few(sum(_size(part) for pair in pairs for part in pair), field)
        requests, indices = self.scorer.requests(pairs, self.instruction)
        variables = template_variables(self.body.chat_template_kwargs, None, None)
        parse = [lambda one=one: _with(one, variables) for one in requests]
        async with self.call.prompts(parse, field=field) as sources:
            for source in sources:
                self.scorer.embedder.check_length(source.prompt)
            choices = await self.call.choices(sources)
        return _Scored(
            [self.scorer.score((choices[a], choices[b]), self.activation) for a, b in indices],
            usage([source.prompt for source in sources], choices),
            self.call.timings(choices),
        )


def _with(request: TokenizeRequest, variables: dict[str, object]) -> TokenizeRequest:
    return msgspec.structs.replace(request, chat_template_kwargs=variables) if request.messages else request


def _require_few_pairs(num_pairs: int, field: str) -> None:
    if num_pairs > MAX_INPUTS:
        raise LimitExceeded(f"the request has {num_pairs} pairs; the limit is {MAX_INPUTS}", param=field)


def _require_few(num_characters: int, field: str) -> None:
    """Raise LimitExceeded if there are too many characters."""
    if num_characters > MAX_CHARACTERS:
        raise LimitExceeded(
            f"the pairs have {num_characters} characters, with the query in each; the limit is {MAX_CHARACTERS}. "
            "Send fewer documents in one request",
            param=field,
        )


def _size(part: Sequence[Item]) -> int:
    return sum(len(item.text) for item in part if isinstance(item, Text))


def _shown(given: Given) -> RankedDocument:
    if isinstance(given, str):
        return {"text": given}
    content = given.get("content", given.get("text"))
    return {"text": content} if isinstance(content, str) else {"multi_modal": list(content or ())}
