"""Sampling parameters of the rows of a batch, and answers in the format of OpenAI's Batch API."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from pydantic import ValidationError

from mindie_mm.batch.input.request import CHAT
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.worker.answer_file import Line, Requests, batch_id
from mindie_mm.worker.deltas import Answer
from service.http.errors import mistakes_in_words
from service.schemas.openai_types import ChatBody, CompletionBody


class BatchLines(Requests):
    """Reads the requests of rows with the same rules as the service.

    A row that is a line of OpenAI's Batch API gets a line in that format. Other rows get the lines of `Requests`.
    """

    def __init__(self, params: SamplingParams, model: str) -> None:
        """Take the sampling parameters of rows that do not state their own, and the name of the model."""
        super().__init__(params)
        self._model = model

    def params(self, row: ShardRow) -> SamplingParams:
        if row.request is None:
            return self.default
        request = msgspec.json.decode(row.request)
        try:
            if request.get("url", CHAT) == CHAT:
                body: ChatBody | CompletionBody = ChatBody(messages=[], **request["body"])
            else:
                body = CompletionBody(prompt="", **request["body"])
        except ValidationError as error:
            mistakes = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
            raise InputError(mistakes_in_words(mistakes)) from None
        params, structure = body.sampling_params(self.default), body.structure(close=True)
        return params if structure is None else params.stating(structured_outputs=structure.wanted)

    def line(self, row: ShardRow, answer: Answer) -> Line:
        request = _batch_request(row)
        if request is None:
            return super().line(row, answer)
        is_chat = request["url"] == CHAT
        assert row.prompt is not None
        used = len(row.prompt), len(answer.token_ids)
        said = {"message": {"role": "assistant", "content": answer.text}} if is_chat else {"text": answer.text}
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.row}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request["body"].get("model") or self._model,
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}],
            "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
        }
        response = {"status_code": 200, "request_id": batch_id(row.row), "body": body}
        return {"id": batch_id(row.row), "custom_id": _custom_id(row, request), "response": response, "error": None}

    def error_line(self, row: ShardRow, why: str) -> Line:
        request = _batch_request(row)
        if request is None:
            return super().error_line(row, why)
        code, _, message = why.partition(": ")
        error = {"code": code, "message": message or why}
        return {"id": batch_id(row.row), "custom_id": _custom_id(row, request), "response": None, "error": error}


def _batch_request(row: ShardRow) -> dict[str, Any] | None:
    request: dict[str, Any] = {} if row.request is None else msgspec.json.decode(row.request)
    return request if "custom_id" in request else None


def _custom_id(row: ShardRow, request: dict[str, Any]) -> str | None:
    """Return the `custom_id` of a line, or None if it is not a string."""
    return row.id if isinstance(request["custom_id"], str) else None
