"""Tests for structural tags, in xgrammar's format and in the older format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from mindie_mm.errors import InputError
from mindie_mm.structured.grammar import Grammars
from tests.structured.conftest import Takes, takes_ids

BOOLEAN = {"type": "json_schema", "json_schema": {"type": "boolean"}}
TAGS = [
    {"type": "tag", "begin": "<f=a>", "content": BOOLEAN, "end": "</f>"},
    {
        "type": "tag",
        "begin": "<f=b>",
        "content": {"type": "json_schema", "json_schema": {"type": "null"}},
        "end": "</f>",
    },
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
ANY_TEXT = {"type": "any_text"}
A, B = "<f=a>true</f>", "<f=b>null</f>"


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def think(end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": "<t>", "content": ANY_TEXT, "end": end}


@pytest.mark.parametrize(
    ("given", "fitting", "others"),
    [
        (TRIGGERED, ["", "hi", f"x{A} and {B}.", A + B, "a <f"], ["a <f=c", "<f=b>true</f>", "<f=a>true"]),
        (TRIGGERED | {"at_least_one": True}, [A, f"{A}x{B}y"], ["", "hi", f"x{A}"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "hi", f"x{A}"], [f"{A}.", A + B]),
        (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, [A, B], ["", f"x{A}", f"{A}."]),
        (TRIGGERED | {"triggers": ["<f=a>", "<f=b>"]}, [f"x{A}{B}", "<f=c"], ["<f=a>null</f>"]),
        (TRIGGERED | {"excludes": ["no"]}, [f"x{A}"], [f"no{A}", "no"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ", "}, ["", A, f"{A}, {B}, {A}"], [A + B, "x"]),
        (
            {
                "type": "tags_with_separator",
                "tags": TAGS,
                "separator": "",
                "at_least_one": True,
                "stop_after_first": True,
            },
            [A, B],
            ["", A + B],
        ),
        (const('a"/\\b'), ['a"/\\b'], ["a", ""]),
        (sequence(const("A: "), {"type": "regex", "pattern": "[a-z ]*"}, const("foo")), ["A: a foofoo"], ["A: fo"]),
        (sequence(const("A: "), BOOLEAN), ["A: true"], ["A: 1", "true"]),
        ({"type": "or", "elements": [const("t"), BOOLEAN]}, ["t", "true"], ["a"]),
        ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
        ({"type": "plus", "content": BOOLEAN}, ["true", "truefalse"], [""]),
        ({"type": "optional", "content": BOOLEAN}, ["", "true"], ["truetrue"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": BOOLEAN}, ["true", "truefalse"], ["", "true" * 3]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("x")}, ["xx", "xxxxx"], ["x"]),
        (think("</t>"), ["<t></t>", "<t>a<b\n</t>"], ["<t>a</t>b</t>", "a</t>", "<t>a"]),
        (think(["</t>", "</s>"]), ["<t>a</s>", "<t>a</t>"], ["<t>a</s></t>"]),
        (ANY_TEXT | {"excludes": ["foo"]}, ["", "a fo\n"], ["a foo"]),
        (sequence(think("</t>"), TRIGGERED), [f"<t>hm {A}</t>x{A}", "<t></t>"], [A, "x"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a"]),
        (sequence({"type": "grammar", "grammar": "root ::= [a-z]*"}, const("foo")), ["foo", "afoofoo", "fofoo"], ["a"]),
        (sequence({"type": "grammar", "grammar": 'start: "a" start | "b"'}, const("."), BOOLEAN), ["ab.true"], ["b"]),
        (
            {"type": "tag", "begin": "<r>", "content": {"type": "regex", "pattern": ".*"}, "end": "</r>"},
            ["<r>a</r>", "<r>a</r></r>"],
            ["<r>"],
        ),
    ],
)
def test_a_structural_tag_allows_exactly_its_texts(
    takes: Takes, given: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    tag = json.dumps({"type": "structural_tag", "format": given})
    assert [text for text in fitting if not takes(text, structural_tag=tag)] == []
    assert [text for text in others if takes(text, structural_tag=tag)] == []


def test_a_tag_in_the_older_format_allows_exactly_its_texts(takes: Takes) -> None:
    structures = [
        {"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<f=b>", "end": "</f>"},
    ]
    older = json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<f="]})
    for text in ("", "hi", f"x{A} and {A}.", 'so <f=b>{"any": [1]}</f>'):
        assert takes(text, structural_tag=older), text
    for text in ("<f=a>null</f>", "<f=c>", "<f=b>x"):
        assert not takes(text, structural_tag=older), text


@pytest.mark.parametrize("written", ["hi<tool_call>\ntrue\n</tool_call>.", "hi<tool_call>x", "hi"])
def test_an_added_token_may_be_written_as_the_token_or_by_its_letters(tokenizer: Tokenizer, written: str) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens(["<tool_call>", "</tool_call>"])
    grammars = Grammars(extended, (779, 777))
    tag = {"type": "tag", "begin": "<tool_call>\n", "content": BOOLEAN, "end": "\n</tool_call>"}
    wanted = json.dumps({"format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}})
    spelled = tokenizer.encode(written, add_special_tokens=False).ids
    tokens = extended.encode(written, add_special_tokens=False).ids
    assert (spelled == tokens) is (written == "hi")
    for ids in (spelled, tokens):
        assert takes_ids(grammars, ids, structural_tag=wanted) is (written != "hi<tool_call>x")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "not valid JSON"),
        ("[" * 100_00, "is nested too deeply|not valid JSON"),
        ("[]", "not a JSON object"),
        ({}, "has format None"),
        ({"format": {"type": 3}}, "has type 3"),
        ({"format": {"type": "dispatch", "rules": []}}, "'dispatch', which is not supported"),
        ({"format": {"type": "token", "token": 3}}, "'token', which is not supported"),
        ({"format": BOOLEAN | {"style": "qwen_xml"}}, "style or any_order, which are not supported"),
        ({"format": BOOLEAN | {"any_order": True}}, "style or any_order, which are not supported"),
        ({"format": ANY_TEXT | {"max_tokens": 3}}, "has the key max_tokens, which is not supported"),
        ({"format": sequence()}, "elements in the structural tag must be a list"),
        ({"format": {"type": "const_string"}}, "has value None"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": BOOLEAN}}, "a repeat with min 2 and max 1"),
        ({"format": {"type": "repeat", "min": 0, "max": 10**9, "content": BOOLEAN}}, "the limit for both is 1000"),
        ({"format": sequence(ANY_TEXT, BOOLEAN)}, "put a const_string between them"),
        (
            {"format": sequence({"type": "grammar", "grammar": "root ::= [a-z]*"}, BOOLEAN)},
            "put a const_string between",
        ),
        ({"format": sequence(TRIGGERED, const("x"))}, "triggered_tags before another format"),
        (
            {"format": TRIGGERED | {"triggers": ["<g"]}},
            "a tag with begin '<f=a>', which starts with none of the triggers",
        ),
        ({"format": TRIGGERED | {"triggers": ["<f=", "<g"]}}, "the trigger '<g', but no tag begins with it"),
        ({"format": TRIGGERED | {"triggers": []}}, "triggers in the structural tag must be a list"),
        ({"structures": [], "triggers": ["a"]}, "structures in the structural tag must be a list"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "there is no rule 'x'"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "structural tag is not supported"),
    ],
)
def test_invalid_and_unsupported_tags_are_refused(takes: Takes, given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        takes("", structural_tag=given if isinstance(given, str) else json.dumps(given))


def test_the_nesting_depth_of_a_tag_is_limited(takes: Takes) -> None:
    given: dict[str, Any] = const("x")
    for _ in range(33):
        given = {"type": "optional", "content": given}
    with pytest.raises(InputError, match="deeper than the limit of 32"):
        takes("", structural_tag=json.dumps({"format": given}))
    for _ in range(25):
        given = given["content"]
    assert takes("x", structural_tag=json.dumps({"format": given}))
