"""Tests that every request field for structured outputs has the same effect as vLLM's `structured_outputs`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mindie_mm.structured.schema_check import COMPILE_S
from tests.processor_time import processor_s
from tools.serving import RunningService

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
TEXT_OF_SCHEMA = json.dumps(SCHEMA)
REGEX = "[a-c]{3}-[0-9]{2}"
GBNF = 'root ::= "(" root ")" | [x-z]'
LARK = 'start: "(" start ")" | /[x-z]/'
CHOICE = ["one thing", "another"]
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<c>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</c>"},
}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<c>", "schema": SCHEMA, "end": "</c>"}],
    "triggers": ["<c"],
}
VLLMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICE},
    "gbnf": {"grammar": GBNF},
    "lark": {"grammar": LARK},
    "tag": {"structural_tag": json.dumps(TAG)},
    "older tag": {"structural_tag": json.dumps(OLDER_TAG)},
}
"""Values of vLLM's `structured_outputs`, one for each kind of description, by name."""
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("json", {"structured_outputs": {"json": TEXT_OF_SCHEMA}}),
    ("json", {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}}),
    ("json", {"guided_json": SCHEMA}),
    ("json", {"guided_json": TEXT_OF_SCHEMA}),
    ("json", {"json_schema": SCHEMA}),
    ("json", {"json_schema": TEXT_OF_SCHEMA}),
    ("json", {"grammar": {"type": "json", "value": SCHEMA}}),
    ("json", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    ("json", {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("json", {"response_format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}),
    ("json", {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}),
    ("json", {"response_format": {"type": "json_schema", "value": SCHEMA}}),
    ("json", {"response_format": {"type": "json", "value": SCHEMA}}),
    ("json", {"response_format": {"type": "json", "value": TEXT_OF_SCHEMA}}),
    ("json", {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    ("json", {"response_format": {"type": "json_object", "value": SCHEMA}}),
    ("json", {"response_format": {"type": "json", "value": SCHEMA}, "guided_json": SCHEMA}),
    ("json_object", {"response_format": {"type": "json_object"}}),
    ("json_object", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("regex", {"guided_regex": REGEX}),
    ("regex", {"regex": REGEX}),
    ("regex", {"response_format": {"type": "regex", "value": REGEX}}),
    ("regex", {"response_format": {"type": "regex", "pattern": REGEX}}),
    ("regex", {"response_format": {"type": "text"}, "regex": REGEX}),
    ("regex", {"grammar": {"type": "regex", "value": REGEX}}),
    ("choice", {"guided_choice": CHOICE}),
    ("gbnf", {"guided_grammar": GBNF}),
    ("gbnf", {"ebnf": GBNF}),
    ("gbnf", {"grammar": GBNF}),
    ("gbnf", {"response_format": {"type": "grammar", "grammar": GBNF}}),
    ("lark", {"guided_grammar": LARK}),
    ("lark", {"grammar": LARK}),
    ("tag", {"structural_tag": TAG}),
    ("tag", {"structural_tag": json.dumps(TAG)}),
    ("tag", {"structured_outputs": {"structural_tag": TAG}}),
    ("tag", {"response_format": TAG}),
    ("older tag", {"response_format": OLDER_TAG}),
]
FITTING = {
    "json": re.compile(r'\{"colour": "(red|blue)"\}'),
    "json_object": re.compile(r"\{.*", re.DOTALL),
    "regex": re.compile(REGEX),
    "choice": re.compile("one thing|another"),
    "gbnf": re.compile(r"\(*[x-z]\)*"),
    "lark": re.compile(r"\(*[x-z]\)*"),
    "tag": re.compile(r'<c>\{"colour": "(red|blue)"\}</c>'),
    "older tag": re.compile(r'([^<]|<(?!c)|<c>\{"colour": "(red|blue)"\}</c>)*'),
}


def asked(path: str, form: dict[str, Any], **changes: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hello!"}]} if path == CHAT else {"prompt": "Hello"}
    return {**prompt, "max_tokens": 40, "temperature": 0, **form, **changes}


def text(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.fixture(scope="module")
def answers(http: Any) -> dict[str, str]:
    """Return the answers to requests with each of `VLLMS`, by the name of the description."""
    found = {}
    for name, wanted in VLLMS.items():
        answer = http.post(CHAT, json=asked(CHAT, {"structured_outputs": wanted})).raise_for_status().json()
        found[name] = text(answer)
        if name != "json_object":
            assert answer["choices"][0]["finish_reason"] == "stop"
    return found


@pytest.mark.parametrize("name", VLLMS)
def test_an_answer_fits(answers: dict[str, str], name: str) -> None:
    assert FITTING[name].fullmatch(answers[name])


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_form_gives_the_same(http: Any, answers: dict[str, str], name: str, form: dict[str, Any]) -> None:
    assert text(http.post(CHAT, json=asked(CHAT, form)).raise_for_status().json()) == answers[name]


@pytest.mark.parametrize("name", VLLMS)
def test_drawn_completions_fit(http: Any, name: str) -> None:
    form = {"structured_outputs": VLLMS[name]}
    drawn = asked(TEXT, form, temperature=2, seed=5, n=3, max_tokens=120)
    choices = http.post(TEXT, json=drawn).raise_for_status().json()["choices"]
    ended = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended or name in ("json_object", "older tag")
    for one in ended:
        assert FITTING[name].fullmatch(one)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_gives_the_same(http: Any, path: str) -> None:
    for wanted in VLLMS.values():
        whole = text(http.post(path, json=asked(path, {"structured_outputs": wanted})).raise_for_status().json())
        streamed = http.post(path, json=asked(path, {"structured_outputs": wanted}, stream=True)).raise_for_status()
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        pieces = [choice for event in events for choice in event["choices"]]
        assert "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in pieces) == whole


async def test_a_batch_gives_the_same_as_each_alone(service: RunningService, answers: dict[str, str]) -> None:
    async with httpx2.AsyncClient(base_url=service.url, timeout=120) as client:

        async def one(name: str) -> str:
            answer = await client.post(CHAT, json=asked(CHAT, {"structured_outputs": VLLMS[name]}))
            return text(answer.raise_for_status().json())

        together = await asyncio.gather(*(one(name) for name in [*VLLMS] * 2))
    assert together == [*answers.values()] * 2


@pytest.mark.parametrize(
    ("form", "param", "said"),
    [
        ({"guided_json": SCHEMA, "regex": "a"}, "regex", "guided_json and regex describe different outputs"),
        ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json", "describe different"),
        ({"guided_regex": "a", "regex": "b"}, "regex", "give one of them"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "has json and regex"),
        ({"structured_outputs": {}}, "structured_outputs", "has none; give exactly one of json, regex"),
        ({"structured_outputs": {"whitespace_pattern": " ", "regex": "a"}}, "structured_outputs", "whitespace_pattern"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "must be a JSON schema"),
        ({"guided_json": 5}, "guided_json", "must be a JSON schema, as an object or a string"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_choice": "one"}, "guided_choice", "list"),
        ({"guided_choice": [1]}, "guided_choice", "string"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"regex": r"(a)\1"}, "regex", "backreferences"),
        ({"regex": "a\\"}, "regex", "ends with a single backslash"),
        ({"ebnf": "root ::= x"}, "ebnf", "there is no rule 'x'"),
        ({"ebnf": r'root ::= "\ud800"'}, "ebnf", "is not supported"),
        ({"grammar": {"type": "json"}}, "grammar", 'a "value" and the "type" "json" or "regex"'),
        ({"grammar": "start: nothing"}, "grammar", "the grammar is not supported"),
        (
            {"structural_tag": {"format": {"type": "token", "token": 5}}},
            "structural_tag",
            "'token', which is not supported",
        ),
        ({"structural_tag": "["}, "structural_tag", "not valid JSON"),
        ({"json_schema": {"$ref": "http://127.0.0.1:1/x.json"}}, "json_schema", "not present"),
        ({"json_schema": {"not": {}}}, "json_schema", "Unimplemented"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "has format None"),
        ({"regex": "a", "ignore_eos": True}, None, "determines the end of the output"),
        ({"regex": "\ud800"}, None, "lone surrogate"),
        ({"guided_choice": ["\ud800"]}, None, "lone surrogate"),
    ],
)
def test_requests_that_are_refused(http: Any, form: dict[str, Any], param: str | None, said: str) -> None:
    for path in (CHAT, TEXT):
        for stream in (False, True):
            raw = json.dumps(asked(path, form, stream=stream))
            answer = http.post(path, content=raw, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert said in error["message"]
            assert error["param"] == param or param is None


@pytest.mark.parametrize("off", [None, False, [], ""])
@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "json_schema", "regex", "grammar"])
def test_an_unused_field_may_be_sent(http: Any, name: str, off: Any) -> None:
    assert text(http.post(CHAT, json=asked(CHAT, {name: off}, max_tokens=2)).raise_for_status().json())


INTERSECTION = " & ".join(f"/(.*a.{{{i}}}|.*b.{{{i + 3}}})/" for i in range(60))
SLOW = {"type": "integer", "multipleOf": 1000003}
ABUSE: dict[str, dict[str, Any]] = {
    "regex of many alternatives": {"regex": "|".join(f"(?i)[a-{chr(98 + i % 24)}]{{{i}}}x{i}" for i in range(1500))},
    "nested regex": {"regex": "(" * 10_000 + "a" + ")" * 10_000},
    "10,000 choices": {"guided_choice": [f"choice {i}" for i in range(10_000)]},
    "a long choice": {"guided_choice": ["x" * 100_000]},
    "GBNF in itself": {"ebnf": "root ::= root"},
    "GBNF often in itself": {"ebnf": "root ::= " + '(root|"a")? ' * 2000},
    "nested GBNF": {"ebnf": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
    "GBNF of many rules": {"ebnf": "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} | "{i}"\n' for i in range(1200))},
    "GBNF that a few letters make too ambiguous": {"ebnf": 'root ::= [^x] root | "a" root | root "b" | .'},
    "an intersection": {"grammar": f"start: X\nX: {INTERSECTION}"},
    "an intersection after reasoning": {"grammar": f"start: THINK X\nTHINK: /.*/\nX: {INTERSECTION}"},
    "Lark in itself": {"grammar": "start: start | start start"},
    "nested JSON in Lark": {"grammar": "start: %json " + '{"items": ' * 3000 + "{}" + "}" * 3000},
    "slow JSON in Lark": {"grammar": f"start: %json {json.dumps(SLOW)}"},
    "slow JSON in a tag": {"structural_tag": {"format": {"type": "json_schema", "json_schema": SLOW}}},
    "nested tag": {"structural_tag": '{"format": ' * 5000 + "{}" + "}" * 5000},
    "a large schema": {"guided_json": {"enum": ["x"] * 100_000}},
    "a large schema as a text": {"guided_json": json.dumps({"enum": ["x"] * 100_000})},
    "a large tag": {"structural_tag": {"format": {"type": "or", "elements": [{"type": "any_text"}] * 50_000}}},
    "NUL bytes": {"grammar": "\x00" * 1000},
}
SERVED: dict[str, dict[str, Any]] = {
    "regex that repeats": {"regex": "(x{1000}){1000}"},
    "regex with overlaps": {"regex": "(.*a.{500}|.*b.{503}|.*c.{507})*(.*d.{511})"},
    "GBNF that repeats": {"ebnf": 'root ::= (("a"{1000}){1000}){1000}'},
    "ambiguous Lark": {"grammar": 'start: start start start | "a" | ""'},
    "1,000 choices": {"guided_choice": [f"choice {i}" for i in range(1000)]},
}
"""Descriptions that look expensive, but whose compilation and masks take limited time."""


@pytest.fixture
def regex_is_served(http: Any, answers: dict[str, str]) -> Any:
    """Check after the test that the service still answers correctly."""
    yield
    answer = http.post(CHAT, json=asked(CHAT, {"structured_outputs": VLLMS["regex"]})).raise_for_status().json()
    assert text(answer) == answers["regex"]


@pytest.mark.usefixtures("regex_is_served")
@pytest.mark.parametrize("name", ABUSE)
def test_abuse_is_refused_soon(http: Any, service: RunningService, name: str) -> None:
    before = processor_s(service.process.pid)
    answers = [http.post(CHAT, json=asked(CHAT, ABUSE[name], n=64, stream=stream)) for stream in (False, True)]
    assert processor_s(service.process.pid) - before < 0.5 + COMPILE_S
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert len(answer.json()["error"]["message"]) < 1000


@pytest.mark.usefixtures("regex_is_served")
@pytest.mark.parametrize("name", SERVED)
def test_supported_descriptions_cost_little(http: Any, service: RunningService, name: str) -> None:
    before = processor_s(service.process.pid)
    http.post(CHAT, json=asked(CHAT, SERVED[name])).raise_for_status()
    assert processor_s(service.process.pid) - before < 2


def test_the_page_shows_forms_that_are_served(http: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/structured-outputs.md").read_text()
    shown = [json.loads(one.replace("\\|", "|")) for one in re.findall(r"^\|.*\| `(\{.*\})` \|$", page, re.MULTILINE)]
    assert {field for form in shown for field in form} == {field for _, form in FORMS for field in form}
    for form in shown:
        answer = http.post(CHAT, json=asked(CHAT, form)).raise_for_status().json()
        assert text(answer) or "structures" in str(form)
