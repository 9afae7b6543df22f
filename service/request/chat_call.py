"""Prepares the answer to a chat request: its structured output, and the rules for its messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from mindie_mm.errors import InputError, blaming
from mindie_mm.structured.lark import any_text, or_json
from mindie_mm.structured.outputs import MAX_STRUCTURE_BYTES, StructuredOutputs
from mindie_mm.tokenize.prompt import Prompt
from mindie_mm.tokenize.text.detokenizer import StopScope
from mindie_mm.tool_calls.history import num_calls, with_tool_calls
from mindie_mm.tool_calls.schemas import Tool
from service.request.call import OutputRules
from service.request.chat_dialect import ChatDialect
from service.request.message import MessageRules
from service.schemas.tool_types import ToolUse

Rules = TypeVar("Rules", bound=OutputRules)
_TAIL = 32
"""Number of tokens at the end of a prompt that are searched for the marker that starts the reasoning."""


def chat_call(
    call: Rules,
    use: ToolUse,
    messages: Sequence[Any],
    *,
    include_reasoning: bool,
    separate_reasoning: bool,
    stream_reasoning: bool,
    reasoning_tokens: int | None,
) -> Rules:
    """Return the call for a chat request, with the rules for its messages.

    Raises:
        InputError: The tool calls cannot be enforced.

    """
    service, dialect = call.service, call.service.chat_dialect
    parser = dialect.parser if dialect.reads_calls(use) else None
    tools = use.tools(close=service.config.json_additional_properties == "close")
    shown = dialect.shown_tokens(parser, dialect.reasoning)
    rules = MessageRules(
        dialect.reasoning,
        shows_reasoning=include_reasoning,
        separates_reasoning=separate_reasoning,
        streams_reasoning=stream_reasoning,
        parser=parser,
        tools=tools,
        num_earlier_calls=num_calls(with_tool_calls(messages)) if parser else 0,
        parallel=use.parallel,
        holds_calls=bool(call.params.stop_token_ids),
        as_function=use.is_deprecated,
        hidden=tuple(shown),
    )
    call = replace(call, message=rules, reasoning_tokens=reasoning_tokens)
    if shown:
        without_text = dialect.special if call.params.skip_special_tokens else frozenset[int]()
        call = replace(call, silent=without_text.difference(dialect.added_tokens[token] for token in shown))
    if parser is not None:
        call = replace(call, stop_scope=StopScope(openings=parser.openings, starts=parser.starts))
        with blaming(use.field):
            wanted = _wanted(call.params.structured_outputs, use, tools, dialect)
        if wanted != call.params.structured_outputs:
            call = _kept_to(call, wanted, use.field)
    return call


async def after_prompt(call: Rules, prompt: Prompt) -> Rules:
    """Return a chat's call adapted to the tokenized prompt, which may already start or end the reasoning.

    Raises:
        InputError: The structured output is not supported.

    """
    reasoning = call.message.reasoning
    if reasoning is None:
        return call
    tokenizer = call.service.worker.tokenizer
    tail = tokenizer.decode(prompt.plain_ids[-_TAIL:].tolist(), skip_special_tokens=False)
    opened = reasoning.is_opened_by(tail)
    call = replace(call, message=replace(call.message, opened=opened))
    if tail.rstrip().endswith(reasoning.end.rstrip()):
        return call
    if call.message.separates_reasoning:
        scope = call.stop_scope or StopScope()
        scope = replace(scope, reasoning=(reasoning.start, reasoning.end), opened=opened)
        call = replace(call, stop_scope=scope)
    wanted = call.params.structured_outputs
    if wanted is None and call.reasoning_tokens is None:
        return call
    opening = None if opened else reasoning.start
    if wanted is None:
        with blaming("thinking_token_budget"):
            wanted = _anything(call.service.chat_dialect, opening)
    wanted = msgspec.structs.replace(
        wanted, after=reasoning.end, opening=opening, reasoning_tokens=call.reasoning_tokens
    )
    call = _kept_to(call, wanted, call.structure_field or "thinking_token_budget")
    await call.check_structure()
    return call


def _kept_to(call: Rules, wanted: StructuredOutputs | None, field: str) -> Rules:
    params = msgspec.structs.replace(call.params, structured_outputs=wanted)
    with blaming(field):
        params = params.check(call.service.worker.engine.info.vocab_size)
    return replace(call, params=params, structure_field=field)


def _wanted(
    given: StructuredOutputs | None, use: ToolUse, tools: Sequence[Tool], dialect: ChatDialect
) -> StructuredOutputs | None:
    """Return the structured output for an answer that may contain tool calls.

    `given` is the structured output that other fields of the request describe. A required call replaces `given`,
    because the answer then has no content. If the model may decide and `given` is a schema, the answer is either tool
    calls or a JSON value that fits the schema.
    """
    if use.mode == "required":
        return StructuredOutputs(grammar=_grammar(use, tools, dialect))
    schema = _schema(given)
    if given is not None and schema is None:
        return given
    if schema is not None:
        return StructuredOutputs(grammar=or_json(_grammar(use, tools, dialect), schema))
    if use.is_strict and any(opening in dialect.added_tokens for opening in dialect.parser.openings):
        return StructuredOutputs(grammar=_grammar(use, tools, dialect, with_text=True))
    return None


def _grammar(use: ToolUse, tools: Sequence[Tool], dialect: ChatDialect, *, with_text: bool = False) -> str:
    names = use.callable_names
    for tool in tools:
        if tool.name in names and (kind := tool.schema["type"]) != "object":
            raise InputError(
                f"the parameters of the tool {tool.name!r} are of type {kind!r}; they must be of type object"
            )
    try:
        grammar = dialect.parser.grammar(
            tools, parallel=use.parallel, one_of=names, added_tokens=dialect.added_tokens, with_text=with_text
        )
    except RecursionError as error:
        raise InputError("the parameters of a tool are nested too deeply") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise InputError(f"the parameters of a tool are not a valid JSON schema: {error}") from error
    if (num_bytes := len(grammar.encode(errors="replace"))) > MAX_STRUCTURE_BYTES:
        raise InputError(
            f"the grammar for calls to {len(names)} tools has {num_bytes} bytes; the limit is "
            f"{MAX_STRUCTURE_BYTES}. Offer fewer tools, or let the model decide (tool_choice 'auto', without strict)"
        )
    return grammar


def _schema(given: StructuredOutputs | None) -> dict[str, Any] | None:
    """Return the JSON schema of a structured output, or None if no schema describes it."""
    if given is None:
        return None
    if given.json_object:
        return {"type": "object"}
    try:
        schema = json.loads(given.json) if given.json is not None else None
    except (ValueError, RecursionError):  # the check of the structured output reports it
        return None
    return schema if isinstance(schema, dict) else None


def _anything(dialect: ChatDialect, opening: str | None) -> StructuredOutputs:
    """Return a structured output that allows any text. Added tokens in `opening`, which starts reasoning, are excluded.

    Raises:
        InputError: `opening` contains no added token, so ordinary text could start the reasoning.

    """
    excluded = [token for token in dialect.added_tokens if opening and token and token in opening]
    if opening and not excluded:
        raise InputError(
            f"the reasoning cannot be limited, because the vocabulary has no token {opening.strip()}, which starts it"
        )
    allowed = [index for token, index in dialect.added_tokens.items() if token not in excluded]
    return StructuredOutputs(grammar=any_text(allowed))
