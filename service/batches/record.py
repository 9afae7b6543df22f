"""The description of a batch, in OpenAI's format."""

from __future__ import annotations

from typing import Literal

import msgspec
from typing_extensions import TypedDict

from service.batches.answers import AnswerLine

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class Counts(TypedDict):
    """Number of requests in a batch."""

    total: int
    completed: int
    failed: int


class Mistake(TypedDict):
    """A reason why a batch has failed."""

    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the line in the input file, from 1."""


class Mistakes(TypedDict):
    """The reasons why a batch has failed."""

    object: Literal["list"]
    data: list[Mistake]


class CachedTokens(TypedDict):
    """Details of the tokens of prompts."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """Details of the tokens of answers."""

    reasoning_tokens: int


class BatchUsage(TypedDict):
    """Number of tokens of all answered requests of a batch."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(TypedDict):
    """A batch. Times are Unix times."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: Mistakes | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    usage: BatchUsage
    metadata: dict[str, str] | None


class Batch(msgspec.Struct, kw_only=True):
    """A batch, as it is stored. Only the process that holds the batch's lock changes it."""

    id: str
    endpoint: str
    model: str
    """Name of the model of the service that created the batch."""
    input_file_id: str
    completion_window: str
    created: float
    """Unix time. Lists have this order."""
    expires_at: int
    metadata: dict[str, str] | None
    output_expires_after_s: int
    """Time in seconds after which the files of the output are removed."""
    status: Status = "validating"
    outcome: Status = "completed"
    """Status after `finalizing`."""
    times: dict[str, int] = {}
    """Unix times at which the batch got its statuses."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    mistakes: list[Mistake] = []
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """True if the batch will not change any more."""
        return self.status in ENDED

    def described(self) -> BatchObject:
        """Return the batch in OpenAI's format."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.mistakes} if self.mistakes else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.has_ended else None,
            "error_file_id": self.error_file_id if self.has_ended else None,
            "created_at": int(self.created),
            "in_progress_at": self.times.get("in_progress"),
            "expires_at": self.expires_at,
            "finalizing_at": self.times.get("finalizing"),
            "completed_at": self.times.get("completed"),
            "failed_at": self.times.get("failed"),
            "expired_at": self.times.get("expired"),
            "cancelling_at": self.times.get("cancelling"),
            "cancelled_at": self.times.get("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata,
        }

    def note(self, code: str, message: str) -> None:
        """Add a reason why the batch has failed, or is not complete."""
        self.mistakes = [*self.mistakes, {"code": code, "message": message, "param": None, "line": None}]

    def count(self, line: AnswerLine) -> None:
        """Count a line of the output."""
        response = line.response
        if response is None or response.status_code != 200:
            self.failed += 1
            return
        self.completed += 1
        usage = (response.body and response.body.usage) or {}
        self.input_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        given = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        made = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.cached_tokens += given.get("cached_tokens") or 0
        self.reasoning_tokens += made.get("reasoning_tokens") or 0
