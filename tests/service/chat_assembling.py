"""Assembles the chunks of a streamed chat answer, and asserts the rules that clients depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Assembled:
    """One choice of an answer, which may have been streamed."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each call."""
    ids: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """Kinds of the parts that were streamed, in order. Parts of the same kind in a row are listed once."""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    """Tokens with log-probabilities."""
    usage: Any = None


def whole(answer: Any, index: int = 0) -> Assembled:
    """Return choice `index` of a `ChatCompletion`."""
    choice = answer.choices[index]
    message = choice.message
    calls = message.tool_calls or []
    assert message.tool_calls != []
    assert all(call.type == "function" for call in calls)
    return Assembled(
        content=message.content or "",
        reasoning=getattr(message, "reasoning_content", None) or "",
        calls=[(call.function.name, call.function.arguments) for call in calls],
        ids=[call.id for call in calls],
        finish_reason=choice.finish_reason,
        tokens=[one.token for one in choice.logprobs.content] if choice.logprobs else [],
        usage=answer.usage,
    )


def assembled(chunks: Iterable[Any], index: int = 0) -> Assembled:
    """Assemble choice `index` from the chunks of a stream."""
    made = Assembled()
    for chunk in chunks:
        made.usage = chunk.usage or made.usage
        for choice in chunk.choices:
            if choice.index == index:
                _add(made, choice)
    assert made.finish_reason is not None
    return made


def _add(made: Assembled, choice: Any) -> None:
    assert made.finish_reason is None, "the finish reason comes last"
    delta = choice.delta
    if reasoning := getattr(delta, "reasoning_content", None):
        assert delta.reasoning == reasoning
        made.reasoning += reasoning
        _note(made, "reasoning")
    if delta.content:
        made.content += delta.content
        _note(made, "content")
    for call in delta.tool_calls or ():
        _note(made, "call")
        if call.id is not None:
            assert (call.index, call.type, call.function.arguments) == (len(made.calls), "function", "")
            made.calls.append((call.function.name, ""))
            made.ids.append(call.id)
        else:
            assert call.index == len(made.calls) - 1
            assert call.function.name is None
            name, arguments = made.calls[-1]
            made.calls[-1] = (name, arguments + call.function.arguments)
    if choice.logprobs:
        made.tokens += [one.token for one in choice.logprobs.content]
    made.finish_reason = choice.finish_reason


def _note(made: Assembled, kind: str) -> None:
    if made.kinds[-1:] != [kind]:
        made.kinds.append(kind)
