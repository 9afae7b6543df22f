"""Bodies and answers of the routes that score pairs of a query and a document."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from mindie_mm.errors import InputError
from service.schemas.body import INT32_MAX, WHOLE, Array, NotServed, must_be
from service.schemas.choices import Timed, Usage
from service.schemas.embedding_types import PoolingBody

_FORM = "a string, or an object with a list of content parts or a string"


class Parts(TypedDict, total=False):
    """A query or a document with media, as in vLLM."""

    content: list[dict[str, Any]]
    """Content parts, as in a chat message."""
    text: str
    """A string in place of `content`."""


Given = str | dict[str, Any]
Document = Annotated[
    Given, must_be(_FORM), WithJsonSchema({"anyOf": [{"type": "string"}, TypeAdapter(Parts).json_schema()]})
]
Documents = Annotated[Given | Array[Given], must_be(f"{_FORM}, or a list of them")]


class RerankBody(PoolingBody):
    """POST /rerank."""

    not_served: ClassVar[NotServed] = {**PoolingBody.not_served, "rank_fields": (None, [], ["text"])}

    query: Document
    """A text, or `{"content": [...]}` with content parts of a chat message."""
    documents: Array[Document]
    """Texts, or objects with content parts."""
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    """Maximum number of results. 0 and null mean all."""
    instruction: str | None = None
    """Instruction in place of the checkpoint's own."""
    return_documents: bool | None = None
    """True if results contain the documents. Default: true."""
    max_tokens_per_doc: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    """Number of tokens to keep at the beginning of a longer text document. 0 and null mean all."""
    use_activation: bool | None = None
    """True if a reranker's score is the sigmoid of the difference of logits. Default: the checkpoint's setting."""


class ScoreBody(PoolingBody):
    """POST /score. The two sides are `text_1` and `text_2`, or have one of the other names."""

    text_1: Documents | None = None
    """One query for all documents, or one query per document."""
    text_2: Documents | None = None
    """One document or several."""
    queries: Documents | None = None
    """Another name of `text_1`."""
    documents: Documents | None = None
    """Another name of `text_2`."""
    data_1: Documents | None = None
    """Another name of `text_1`."""
    data_2: Documents | None = None
    """Another name of `text_2`."""
    items: Documents | None = None
    """Another name of `text_2`."""
    instruction: str | None = None
    """Instruction in place of the checkpoint's own."""
    use_activation: bool | None = None
    """Has the same meaning as in /rerank."""

    def sides(self) -> tuple[list[Given], list[Given]]:
        """Return the queries and the documents, as many of one as of the other.

        Raises:
            InputError: A side is missing, empty or given twice, or the sides have different lengths.

        """
        queries = self._side("text_1", "queries", "data_1")
        documents = self._side("text_2", "documents", "data_2", "items")
        if len(queries) not in (1, len(documents)):
            raise InputError(
                f"there are {len(queries)} queries for {len(documents)} documents; give one query, or one for each "
                "document",
                param="text_1",
            )
        return queries * (len(documents) // len(queries)), documents

    def _side(self, *names: str) -> list[Given]:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(f"the request must have exactly one of {', '.join(names)}", param=names[0])
        value = getattr(self, given[0])
        several: list[Given] = value if isinstance(value, list) else [value]
        if not several:
            raise InputError(f"{given[0]} is empty", param=given[0])
        return several


class RankedDocument(TypedDict, total=False):
    """A document as the request gave it."""

    text: str
    multi_modal: list[dict[str, Any]]
    """The content parts of a document that is not a string."""


class Ranked(TypedDict):
    """The score of a document."""

    index: int
    """Index of the document in the request."""
    document: RankedDocument | None
    relevance_score: float


class RerankAnswer(Timed):
    """The response of /rerank. The best results come first."""

    id: str
    model: str
    usage: Usage
    results: list[Ranked]


class ScoreEntry(TypedDict):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Timed):
    """The response of /score."""

    id: str
    object: Literal["list"]
    created: int
    """Unix time in seconds."""
    model: str
    data: list[ScoreEntry]
    usage: Usage
