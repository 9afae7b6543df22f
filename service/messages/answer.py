"""Translates the answer of a chat completion into a message or the events of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from typing_extensions import TypedDict

from service.request.admitted import SendEvent
from service.schemas.choices import Usage
from service.schemas.openai_answers import ChatCompletion

SIGNATURE = "unsigned"
"""Signature of each thinking block. Clients require one and send it back, and this service does not check it."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(TypedDict):
    """Numbers of tokens."""

    input_tokens: int
    """Tokens of the prompt that were not found in the prefix cache."""
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class Message(TypedDict):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types thinking, text and tool_use."""
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """An event of a streamed message."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class TokenCount(TypedDict):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


def message(completion: ChatCompletion, max_tokens: int) -> Message:
    """Return the message for a chat completion. `max_tokens` is the limit that the request states."""
    (choice,) = completion["choices"]
    said = choice["message"]
    content: list[dict[str, Any]] = []
    if said["reasoning"]:
        content.append({"type": "thinking", "thinking": said["reasoning"], "signature": SIGNATURE})
    if said["content"]:
        content.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls", ()):
        if (given := _input(call["function"]["arguments"])) is not None:
            name = call["function"]["name"]
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return {
        **_head(completion, content, completion["usage"]),
        **_end(choice["finish_reason"], choice["stop_reason"], completion["usage"], max_tokens),
    }


def _head(answer: Mapping[str, Any], content: list[dict[str, Any]], used: Usage) -> Message:
    return {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(used),
    }


def _usage(used: Usage) -> MessageUsage:
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "output_tokens": used["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _end(finish_reason: str | None, stop_reason: str | int | None, used: Usage, max_tokens: int) -> Any:
    reason: StopReason = "end_turn"
    if finish_reason == "tool_calls":
        reason = "tool_use"
    elif finish_reason == "length":
        reason = "max_tokens" if used["completion_tokens"] >= max_tokens else "model_context_window_exceeded"
    elif isinstance(stop_reason, str):
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_reason if reason == "stop_sequence" else None}


def _input(arguments: str) -> dict[str, Any] | None:
    """Return the input of a call. Return None if a limit cut off the call, so that no client runs it."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any]) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        return None


@dataclass(slots=True)
class MessageEvents:
    """Sends the events of a message for the chunks of a chat completion. One block is open at a time."""

    send: SendEvent
    max_tokens: int
    """Limit that the request states."""
    _has_begun: bool = False
    _open: str | None = None
    """Type of the block that is open."""
    _index: int = -1
    """Index of the last block."""
    _end: tuple[str | None, str | int | None] = (None, None)
    _usage: Usage | None = field(default=None)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Send the events for `chunk`."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            if not self._has_begun:
                self._has_begun = True
                assert self._usage is not None
                self.send({"type": "message_start", "message": _head(chunk, [], self._usage)})
                self.send({"type": "ping"})
            self._add_delta(choice["delta"])
            if choice["finish_reason"]:
                self._end = choice["finish_reason"], choice["stop_reason"]

    def finish(self) -> None:
        """Send the last events."""
        self._close()
        assert self._usage is not None
        end = _end(*self._end, self._usage, self.max_tokens)
        self.send({"type": "message_delta", "delta": end, "usage": _usage(self._usage)})
        self.send({"type": "message_stop"})

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        if text := delta.get("reasoning"):
            self._begin("thinking", {"thinking": "", "signature": ""})
            self._send_delta({"type": "thinking_delta", "thinking": text})
        if text := delta.get("content"):
            self._begin("text", {"text": ""})
            self._send_delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._close()
                self._begin("tool_use", {"id": call["id"], "name": call["function"]["name"], "input": {}})
            self._send_delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def _begin(self, kind: str, block: dict[str, Any]) -> None:
        """Open a block of type `kind`, unless one is open."""
        if self._open == kind:
            return
        self._close()
        self._open, self._index = kind, self._index + 1
        self.send({"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}})

    def _close(self) -> None:
        if self._open is None:
            return
        if self._open == "thinking":
            self._send_delta({"type": "signature_delta", "signature": SIGNATURE})
        self.send({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _send_delta(self, delta: dict[str, Any]) -> None:
        self.send({"type": "content_block_delta", "index": self._index, "delta": delta})
