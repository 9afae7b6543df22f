"""Translates the answer of a chat completion into a response or the events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from typing_extensions import TypedDict

from service.request.admitted import SendEvent
from service.responses.body import ResponsesBody
from service.responses.chat import CUSTOM_INPUT
from service.schemas.body import Fields
from service.schemas.choices import Usage

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(TypedDict):
    """Details of the number of prompt tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Details of the number of generated tokens."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(TypedDict):
    """A response. Fields without a description repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    """Items of the types reasoning, message, function_call and custom_tool_call."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    """True if later requests may refer to the response."""
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: None


class ResponseEvent(TypedDict):
    """An event of a streamed response."""

    type: str
    sequence_number: int


@dataclass(slots=True)
class ResponseEvents:
    """Collects the items of a response from the chunks of a chat completion, and sends their events.

    An answer that is not streamed is the same response without events.
    """

    response: ResponseObject
    summarizes: bool
    """True if reasoning is sent as a summary."""
    custom_tools: Collection[str]
    """Names of the tools whose input is text."""
    send: SendEvent = lambda _: None
    _sequence_number: int = 0
    _arguments: str = ""
    """Arguments so far of the call that is open."""
    _open: str | None = None
    """Type of the item that is open."""
    _reason: str | None = None
    _usage: Usage | None = field(default=None)

    def begin(self) -> None:
        """Send the first events."""
        for name in ("created", "in_progress"):
            self.event(f"response.{name}", response=self.response)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Send the events for a chunk."""
        self._usage = chunk.get("usage") or self._usage
        if not self._sequence_number:
            self.begin()
        for choice in chunk["choices"]:
            self.add_message(choice["delta"], choice["logprobs"])
            self._reason = choice["finish_reason"] or self._reason

    def add_message(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> None:
        """Add a delta, or a whole message."""
        if text := delta.get("reasoning"):
            self._begin("reasoning", "rs", summary=[], encrypted_content=None, **self._no_content())
            self._write(text, "summary" if self.summarizes else "reasoning")
        if text := delta.get("content"):
            self._begin("message", "msg", role="assistant", content=[])
            self._write(text, "output", _logprobs(logprobs))
        elif self._open == "message" and not delta.get("tool_calls") and (likely := _logprobs(logprobs)):
            self._write("", "output", likely)  # the token that ends an answer has no text
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self._close()
                self._begin_call(call["id"], call["function"]["name"])
            self._arguments += call["function"]["arguments"]
            if self._open == "function_call":
                self._item_event("response.function_call_arguments.delta", delta=call["function"]["arguments"])

    def finish(self, reason: str | None = None, used: Usage | None = None) -> None:
        """Close the last item, and send the last event.

        Args:
            reason: Reason why an answer that is not streamed has ended.
            used: Usage of an answer that is not streamed.

        """
        is_cut = (reason or self._reason) == "length"
        self._close("incomplete" if is_cut else "completed")
        self.response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        if (usage := used or self._usage) is not None:
            self.response["usage"] = _usage(usage)
        self.event(f"response.{self.response['status']}", response=self.response)

    def cancel(self) -> None:
        """Close the last item of a response that the client has cancelled, and send the last event."""
        self._close("incomplete")
        self.response["status"] = "cancelled"
        self.event("response.incomplete", response=self.response)

    def fail(self, message: str) -> dict[str, Any]:
        """Return the last event of a response that failed. No event precedes it, because the stream has ended."""
        event = {"type": "response.failed", "sequence_number": self._sequence_number, "response": self.response}
        self.send = lambda _: None
        self._close("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": message}
        return event

    def event(self, kind: str, /, **given: Any) -> None:
        """Send an event of type `kind`."""
        self.send({"type": kind, "sequence_number": self._sequence_number, **given})
        self._sequence_number += 1

    def _no_content(self) -> dict[str, Any]:
        return {} if self.summarizes else {"content": []}

    @property
    def _item(self) -> dict[str, Any]:
        return self.response["output"][-1]

    def _item_event(self, kind: str, /, **given: Any) -> None:
        self.event(kind, item_id=self._item["id"], output_index=len(self.response["output"]) - 1, **given)

    def _begin(self, kind: str, prefix: str, **given: Any) -> None:
        """Open an item of type `kind`, unless one is open."""
        if self._open == kind:
            return
        self._close()
        self._open = kind
        output, suffix = self.response["output"], self.response["id"].removeprefix("resp_")
        output.append({"id": f"{prefix}_{suffix}_{len(output)}", "type": kind, "status": "in_progress", **given})
        self.event("response.output_item.added", output_index=len(self.response["output"]) - 1, item=self._item)

    def _begin_call(self, call_id: str, name: str) -> None:
        self._arguments = ""
        if name in self.custom_tools:
            self._begin("custom_tool_call", "ctc", call_id=call_id, name=name, input="")
        else:
            self._begin("function_call", "fc", call_id=call_id, name=name, arguments="")

    def _write(self, text: str, kind: str, logprobs: list[Any] | None = None) -> None:
        """Add `text` to the only part of the open item. `kind` is "output", "reasoning" or "summary"."""
        place = "summary" if kind == "summary" else "content"
        of_kind = {"logprobs": logprobs or []} if kind == "output" else {}
        index = {f"{place}_index": 0}
        if not self._item[place]:
            part = {"type": f"{kind}_text", "text": "", **({"annotations": [], "logprobs": []} if of_kind else {})}
            self._item_event(self._part_event("added"), **index, part=part)
            self._item[place].append(part)
        part = self._item[place][0]
        part["text"] += text
        if logprobs:
            part["logprobs"] = [*part["logprobs"], *logprobs]
        self._item_event(self._text_event("delta"), **index, delta=text, **of_kind)

    def _part_event(self, what: str) -> str:
        return f"response.reasoning_summary_part.{what}" if self._is_summary else f"response.content_part.{what}"

    def _text_event(self, what: str) -> str:
        if self._open == "message":
            return f"response.output_text.{what}"
        return f"response.reasoning_summary_text.{what}" if self._is_summary else f"response.reasoning_text.{what}"

    @property
    def _is_summary(self) -> bool:
        return self._open == "reasoning" and self.summarizes

    def _close(self, status: str = "completed") -> None:
        """Close the open item, if there is one."""
        if self._open is None:
            return
        item = self._item
        if self._open == "function_call":
            item["arguments"] = self._arguments
            self._item_event("response.function_call_arguments.done", name=item["name"], arguments=self._arguments)
        elif self._open == "custom_tool_call":
            item["input"] = _custom_input(self._arguments)
            self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
            self._item_event("response.custom_tool_call_input.done", input=item["input"])
        else:
            place = "summary" if self._is_summary else "content"
            part, index = item[place][0], {f"{place}_index": 0}
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            self._item_event(self._text_event("done"), **index, text=part["text"], **logprobs)
            self._item_event(self._part_event("done"), **index, part=part)
        item["status"] = status
        self.event("response.output_item.done", output_index=len(self.response["output"]) - 1, item=item)
        self._open = None


def begun(body: ResponsesBody, response_id: str, created: int, model: str, *, stored: bool) -> ResponseObject:
    """Return the response to `body` before the model has answered. `stored` says whether it will be stored."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **_echoed(body.reasoning)},
        "service_tier": "default",
        "store": stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_echoed(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _echoed(given: Fields | None) -> dict[str, Any]:
    """Return the fields that a request states. JSON in them is not copied, because it may be nested deeply."""
    return {
        name: _echoed(value) if isinstance(value, Fields) else value for name, value in given or () if value is not None
    }


def _usage(used: Usage) -> ResponseUsage:
    cached = used["prompt_tokens_details"]["cached_tokens"]
    reasoning = used.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning["reasoning_tokens"]},
        "total_tokens": used["total_tokens"],
    }


def _logprobs(logprobs: Mapping[str, Any] | None) -> list[Any]:
    return [] if logprobs is None else msgspec.json.decode(logprobs["content"]) or []


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool. Arguments that were cut off are no JSON, and are returned as they are."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = given.get(CUSTOM_INPUT)
    return text if isinstance(text, str) else arguments
