"""Answers to the rows of a batch with the same rules as in the service, also in the format of OpenAI's Batch API."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from pydantic import ValidationError

from mindie_mm.batch.input.request import CHAT
from mindie_mm.batch.output.shard_row import ShardRow
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.worker.answer_file import Line, Requests, batch_id
from mindie_mm.worker.retry import PromptSource
from mindie_mm.worker.worker import Worker
from service.http.errors import mistakes_in_words
from service.request.call import OutputRules
from service.request.chat_call import after_prompt, chat_call
from service.request.chat_dialect import ChatDialect
from service.request.message import MessageParts, ReasoningCount
from service.request.state import Served
from service.schemas.body import pass_over_fields
from service.schemas.openai_types import ChatBody, CompletionBody


class BatchLines(Requests):
    """Reads the requests of rows with the same rules as the service.

    A row that is a line of OpenAI's Batch API gets a line in that format. Other rows get the lines of `Requests`.
    """

    def __init__(self, params: SamplingParams, model: str) -> None:
        """Take the sampling parameters of rows that do not state their own, and the name of the model."""
        super().__init__(params)
        self._model = model
        self._served: Served | None = None

    async def line(self, worker: Worker, row: ShardRow, source: PromptSource) -> Line:
        if row.request is None:
            return await super().line(worker, row, source)
        request = msgspec.json.decode(row.request)
        is_chat, is_line = request.get("url", CHAT) == CHAT, "custom_id" in request
        body = _body(request["body"], is_chat=is_chat)
        pass_over_fields(body.unknown, strict=False)
        rules = self._rules(worker, body)
        if is_line and isinstance(body, ChatBody):
            rules = await _of_chat(rules, body, source)
        answer = await worker.generate_whole(
            source, rules.params, str(row.row), silent=rules.silent, stop_scope=rules.stop_scope
        )
        if not is_line:
            return self.text_line(row, answer)
        used = len(source.prompt), len(answer.token_ids)
        usage: dict[str, Any] = {
            "prompt_tokens": used[0],
            "completion_tokens": used[1],
            "total_tokens": sum(used),
        }
        if rules.message.reasoning:
            count = ReasoningCount(worker.tokenizer, rules.message, rules.silent)
            count.push(answer.token_ids)
            usage["completion_tokens_details"] = {"reasoning_tokens": count.num_tokens}
        parts = MessageParts.of(answer, rules.message)
        said = {"message": parts.message(rules.message)} if is_chat else {"text": answer.text}
        reason = parts.finish_reason(answer.finish_reason, rules.message)
        completion = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.row}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request["body"].get("model") or self._model,
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": batch_id(row.row), "body": completion}
        return {"id": batch_id(row.row), "custom_id": _custom_id(row, request), "response": response, "error": None}

    def _rules(self, worker: Worker, body: ChatBody | CompletionBody) -> OutputRules:
        if self._served is None:
            config = ServiceConfig()
            self._served = Served(worker, config, ChatDialect.of(worker, config))
        params, structure = body.sampling_params(self.default), body.structure(close=True)
        if structure is None:
            return OutputRules(service=self._served, params=params)
        params = params.stating(structured_outputs=structure.wanted)
        return OutputRules(service=self._served, params=params, structure_field=structure.field)

    def error_line(self, row: ShardRow, why: str) -> Line:
        request = _batch_request(row)
        if request is None:
            return super().error_line(row, why)
        code, _, message = why.partition(": ")
        error = {"code": code, "message": message or why}
        return {"id": batch_id(row.row), "custom_id": _custom_id(row, request), "response": None, "error": error}


def _body(stated: dict[str, Any], *, is_chat: bool) -> ChatBody | CompletionBody:
    """Return the body of a request without its prompt. Raise InputError if a field is wrong."""
    try:
        return ChatBody(messages=[], **stated) if is_chat else CompletionBody(prompt="", **stated)
    except ValidationError as error:
        mistakes = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
        raise InputError(mistakes_in_words(mistakes)) from None


async def _of_chat(rules: OutputRules, body: ChatBody, source: PromptSource) -> OutputRules:
    """Return the rules for a chat, whose tokenized prompt is known. The route of chats applies the same rules."""
    budget = body.thinking_token_budget
    rules = chat_call(
        rules,
        body.tool_use(body.parallel_tool_calls),
        (),
        include_reasoning=body.include_reasoning is not False,
        separate_reasoning=body.separate_reasoning is not False,
        stream_reasoning=True,
        reasoning_tokens=None if budget == -1 else budget,
    )
    await rules.check_structure()
    return await after_prompt(rules, source.prompt)


def _batch_request(row: ShardRow) -> dict[str, Any] | None:
    request: dict[str, Any] = {} if row.request is None else msgspec.json.decode(row.request)
    return request if "custom_id" in request else None


def _custom_id(row: ShardRow, request: dict[str, Any]) -> str | None:
    """Return the `custom_id` of a line, or None if it is not a string."""
    return row.id if isinstance(request["custom_id"], str) else None
