"""Tests for `MessageReader`, which turns a model's text into a message. The text arrives in pieces of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from mindie_mm.tool_calls.events import Content, Reasoning
from mindie_mm.tool_calls.reasoning import reasoning_named
from mindie_mm.tool_calls.registry import parser_named
from mindie_mm.tool_calls.schemas import Tool
from service.request.message import MessageParts, MessageReader, MessageRules, ReasoningCount, delta_of
from tests.service.conftest import TINY
from tests.tool_calls.assembling import TOOLS as CALLED
from tests.tool_calls.assembling import texts_of_all_formats

TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("now"),
]
THOUGHT = "The user wants <tool_call>\nno, just a plan.\n"
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln </tool_call>", "days": 2}}\n</tool_call>'
TEXTS: dict[str, tuple[dict[str, Any], str, str, str, list[tuple[str, Any]]]] = {
    "reasoning, content and two calls": (
        {"reasoning": "qwen3", "parser": "hermes"},
        f'<think>\n{THOUGHT}</think>\n\nI look it up.\n\n{HERMES}\n<tool_call>\n{{"name": "now"}}\n</tool_call>',
        THOUGHT.strip(),
        "I look it up.",
        [("get_weather", {"city": "Köln </tool_call>", "days": 2}), ("now", {})],
    ),
    "reasoning that the prompt opened": (
        {"reasoning": "deepseek_r1", "opened": True},
        f"{THOUGHT}</think>\n\nFine.",
        THOUGHT.strip(),
        "Fine.",
        [],
    ),
    "no reasoning": ({"reasoning": "qwen3"}, "<thin ice> and </think>?", "", "<thin ice> and </think>?", []),
    "reasoning that is cut": ({"reasoning": "mistral"}, "[THINK]I wonder", "I wonder", "", []),
    "one call of several": (
        {"parser": "mistral", "parallel": False},
        'Two.[TOOL_CALLS]get_weather[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}',
        "",
        "Two.",
        [("get_weather", {"city": "x"})],
    ),
    "typed text": (
        {"parser": "qwen3_coder"},
        "<tool_call><function=get_weather><parameter=days>\n3\n</parameter></function></tool_call>",
        "",
        "",
        [("get_weather", {"days": 3})],
    ),
    "a marker without a call": (
        {"parser": "mistral", "hidden": ("[TOOL_CALLS]",)},
        "a [TOOL_CALLS]? b",
        "",
        "a ? b",
        [],
    ),
}


def rules_of(given: dict[str, Any]) -> MessageRules:
    made = dict(given)
    for key, named in (("reasoning", reasoning_named), ("parser", parser_named)):
        if key in made:
            made[key] = named(made[key])  # type: ignore[operator]
    return MessageRules(tools=TOOLS, **made)


def read(rules: MessageRules, pieces: list[str], *, whole: bool = True, by_token: bool = False) -> MessageParts:
    reader, parts = MessageReader(rules), MessageParts()
    for piece in pieces:
        parts.add(reader.push(piece))
    parts.add(reader.finish(whole=whole, by_token=by_token))
    return parts


@pytest.mark.parametrize("name", TEXTS)
def test_no_split_of_a_text_changes_its_message(name: str) -> None:
    given, text, reasoning, content, calls = TEXTS[name]
    rules, rng = rules_of(given), random.Random(name)
    for attempt in range(200):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(attempt % 12)) if attempt else range(len(text))
        pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        parts = read(rules, pieces)
        found = [(call.name, json.loads(call.arguments)) for call in parts.answer.calls]
        assert (parts.reasoning, parts.answer.content, found) == (reasoning, content, calls), pieces
    message = parts.message(rules)
    assert ("tool_calls" in message, message["reasoning"] or "") == (bool(calls), reasoning)
    assert parts.finish_reason("stop", rules) == ("tool_calls" if calls else "stop")
    assert parts.finish_reason("length", rules) == "length"


@pytest.mark.parametrize("name", TEXTS)
def test_reasoning_may_be_part_of_the_content(name: str) -> None:
    given, text, reasoning, content, calls = TEXTS[name]
    rules = rules_of(given | {"separates_reasoning": False})
    plan = text[: text.index("</think>\n\n") + len("</think>\n\n")] if "</think>\n\n" in text else ""
    if name == "reasoning that is cut":
        plan = text
    for pieces in ([text], list(text)):
        parts = read(rules, pieces)
        found = [(call.name, json.loads(call.arguments)) for call in parts.answer.calls]
        assert (parts.reasoning, parts.answer.content, found) == ("", plan + content, calls)
    assert bool(plan) == bool(reasoning)


@pytest.mark.parametrize("name", TEXTS)
def test_reasoning_may_be_read_at_once(name: str) -> None:
    given, text, reasoning, content, _ = TEXTS[name]
    reader = MessageReader(rules_of(given | {"streams_reasoning": False}))
    found = [part for character in text for part in reader.push(character)] + reader.finish(whole=True)
    assert [part.text for part in found if isinstance(part, Reasoning)] == ([reasoning] if reasoning else [])
    assert "".join(part.text for part in found if isinstance(part, Content)) == content
    assert not reasoning or isinstance(found[0], Reasoning)


def test_a_call_that_is_cut_is_not_finished() -> None:
    rules = rules_of({"parser": "hermes"})
    for stop in range(len("<tool_call>"), len(HERMES)):
        parts = read(rules, [HERMES[:stop]], whole=False)
        assert "tool_call" not in parts.answer.content, HERMES[:stop]
        for call in parts.answer.calls:
            assert HERMES.find(call.arguments) > 0
        complete = any(call.complete for call in parts.answer.calls)
        assert complete is ("}}" in HERMES[:stop])
        assert (parts.finish_reason("stop", rules) == "tool_calls") is complete


def test_the_deltas_of_a_call_have_its_id_and_name_once() -> None:
    rules = rules_of({"parser": "hermes"})
    reader = MessageReader(rules)
    parts = [part for character in HERMES for part in reader.push(character)] + reader.finish(whole=True)
    deltas: list[Any] = [delta for part in parts if (delta := delta_of(part, rules))]
    (first,) = deltas[0]["tool_calls"]
    assert (first["index"], first["type"], first["function"]) == (
        0,
        "function",
        {"name": "get_weather", "arguments": ""},
    )
    assert all(delta["tool_calls"][0].keys() == {"index", "function"} for delta in deltas[1:])
    sent = "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas)
    assert json.loads(sent) == {"city": "Köln </tool_call>", "days": 2}


@pytest.mark.parametrize(
    ("opened", "text", "tokens"),
    [
        (False, "<think>seven</think>blue", "<think>seven"),
        (True, "seven</think>blue", "seven"),
        (True, "seven", "seven"),
        (False, "blue</think>", ""),
        (False, "<thin", "<thin"),
    ],
)
def test_the_tokens_of_the_reasoning_are_counted(opened: bool, text: str, tokens: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_tokens(["</think>"])
    rules = MessageRules(reasoning_named("qwen3"), opened=opened)
    for step in (1, 3, 100):
        count, ids = ReasoningCount(tokenizer, rules, None), tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids), step):
            count.push(ids[start : start + step])
        assert count.num_tokens == len(tokenizer.encode(tokens, add_special_tokens=False).ids)


@pytest.mark.parametrize(("name", "text"), texts_of_all_formats())
def test_a_call_that_a_stop_token_cuts_off_is_text(name: str, text: str) -> None:
    """The message does not depend on the pieces, because a call is held back until it is complete."""
    rules = MessageRules(parser=parser_named(name), tools=CALLED, holds_calls=True)
    for length in range(len(text) + 1):
        for pieces in ([text[:length]], list(text[:length]))[: 2 if length % 16 == 0 else 1]:
            parts = read(rules, pieces, by_token=True)
            for call in parts.answer.calls:
                assert call.complete
                assert isinstance(json.loads(call.arguments), dict), text[:length]
            if not parts.answer.calls:
                assert parts.answer.content == text[:length]
                assert parts.finish_reason("stop", rules) == "stop"
    assert len(parts.answer.calls) == len(read(rules, [text]).answer.calls)


def test_a_second_call_that_is_not_allowed_is_dropped_also_if_a_stop_token_cuts_it_off() -> None:
    rules = MessageRules(parser=parser_named("hermes"), tools=CALLED, holds_calls=True, parallel=False)
    for length in range(len("<tool_call>"), len(HERMES)):
        parts = read(rules, [HERMES + HERMES[:length]], by_token=True)
        assert (parts.answer.content.strip(), len(parts.answer.calls)) == ("", 1), HERMES[:length]
