"""Scores of pairs of a query and a document: how the prompts are made, and how their results become scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import Item, Message, Text
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.worker.deltas import Answer
from mindie_mm.worker.embedding import Embedder, PoolingParams

Part = Sequence[Item]
"""A query or a document: texts and media in order."""
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the instruction for documents, in the order in which sentence-transformers looks for them."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """The way in which a checkpoint scores pairs.

    A reranker gets one prompt per pair, and the score is the difference of the logits of two tokens, or its sigmoid
    (LogitScore of sentence-transformers). With an embedding model, the score is the cosine of two embeddings.
    """

    embedder: Embedder

    @property
    def uses_pairs(self) -> bool:
        """True if a prompt contains a pair. Otherwise it contains a query or a document."""
        return self.embedder.modules.score is not None

    def sampling_params(self, priority: int = 0, cache_salt: str = "") -> SamplingParams:
        """Return the settings of the engine's requests.

        Raises:
            InputError: The checkpoint computes no scores.

        """
        if (score := self.embedder.modules.score) is None:
            return self.embedder.sampling_params(priority, cache_salt)
        if not self.embedder.chat:
            raise InputError("the checkpoint has no chat template, so pairs cannot be scored; add its chat template")
        return SamplingParams(
            max_tokens=1,
            temperature=0,
            logprobs=0,
            logprob_token_ids=(score.true_token_id, score.false_token_id),
            priority=priority,
            cache_salt=cache_salt,
        )

    def requests(
        self, pairs: Sequence[tuple[Part, Part]], instruction: str | None = None
    ) -> tuple[list[TokenizeRequest], list[tuple[int, int]]]:
        """Return the prompts for pairs, and the indices of each pair's prompts. Equal prompts occur only once.

        Args:
            pairs: Queries with their documents.
            instruction: Instruction in place of the checkpoint's own.

        """
        modules = self.embedder.modules
        if self.uses_pairs:
            system = self.embedder.system(self.embedder.instruction(None) if instruction is None else instruction)
            made = [
                TokenizeRequest(
                    messages=[*system, _message("query", query), _message("document", document)],
                    add_generation_prompt=modules.opens_turn,
                )
                for query, document in pairs
            ]
            return [self._named(one) for one in made], [(i, i) for i in range(len(made))]
        if instruction is not None:
            modules = replace(modules, prompts={**modules.prompts, "query": instruction})
        embedder = replace(self.embedder, modules=modules)
        of_document = next((name for name in _DOCUMENT_PROMPTS if name in modules.prompts), None)
        of_query = "query" if "query" in modules.prompts else None
        found: list[TokenizeRequest] = []
        places: dict[tuple[bool, int], int] = {}

        def place(part: Part, name: str | None, *, is_query: bool) -> int:
            key = is_query, id(part)
            if key not in places:
                places[key] = len(found)
                found.append(embedder.request(part, name))
            return places[key]

        indices = [
            (place(query, of_query, is_query=True), place(document, of_document, is_query=False))
            for query, document in pairs
        ]
        return found, indices

    def _named(self, request: TokenizeRequest) -> TokenizeRequest:
        """Return the request with the checkpoint's template for pairs."""
        options = replace(request.options, template=self.embedder.modules.template or "")
        return msgspec.structs.replace(request, options=options)

    def score(self, answers: tuple[Answer, Answer], activation: bool | None = None) -> float:
        """Return the score of a pair.

        Args:
            answers: The engine's answers to the pair's prompts.
            activation: Whether the score of a reranker is the sigmoid of the difference of logits. None means the
                checkpoint's own setting.

        """
        score = self.embedder.modules.score
        if score is None:
            query, document = (self.embedder.embedding(one.pooled, PoolingParams(normalize=True)) for one in answers)
            return float(np.dot(query, document))
        logprobs = dict(answers[0].logprobs[0].top)
        difference = logprobs[score.true_token_id] - logprobs[score.false_token_id]
        if score.is_sigmoid if activation is None else activation:
            return 0.5 * (1 + math.tanh(difference / 2))
        return difference


def _message(role: str, part: Part) -> Message:
    """Return a query or a document as a message. A single text is not wrapped in a list of parts."""
    text = part[0].text if len(part) == 1 and isinstance(part[0], Text) else None
    return Message(role, tuple(part) if text is None else text)
