"""Tests for response_format, which makes an answer fit a JSON schema."""

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion

from mindie_mm.errors import LimitExceeded
from service.schemas.closed_objects import closed
from service.schemas.openai_types import ChatBody
from tools.serving import RunningService
from training.questions import CHAT_ANSWERS

WHAT = "What is in the image?"
SCENE = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "shape": {"enum": ["circle", "square", "star"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 4},
    },
    "required": ["colour", "shape", "count"],
    "additionalProperties": False,
}


def fits(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def messages(url: str) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": WHAT}]}]


def ask(client: openai.OpenAI, url: str, schema: dict[str, Any], **changes: Any) -> ChatCompletion:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "response_format": fits(schema)} | changes
    return client.chat.completions.create(model="tiny", messages=messages(url), **settings)  # type: ignore[arg-type]


def test_an_answer_fits_its_schema(client: openai.OpenAI, red_square: str) -> None:
    answer = ask(client, red_square, SCENE)
    scene = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(scene, SCENE)
    assert answer.choices[0].finish_reason == "stop"
    assert scene["colour"] == "red", "what the model sees decides where the schema leaves it open"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        {"type": "string", "pattern": "^[a-c]{3}$"},
        {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 9}]},
        {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 2, "$defs": {"b": {"enum": ["x", 7]}}},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    ],
)
def test_sampled_answers_fit_their_schema(client: openai.OpenAI, red_square: str, schema: dict[str, Any]) -> None:
    answer = ask(client, red_square, schema, temperature=2.0, seed=3, n=4)
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), schema)
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


def test_json_object_accepts_any_object(client: openai.OpenAI, red_square: str) -> None:
    unsaid = {"type": "json_schema", "json_schema": {"name": "whatever"}}
    answer = ask(client, red_square, {}, response_format={"type": "json_object"}, max_tokens=128)
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    assert text == (ask(client, red_square, {}, response_format=unsaid, max_tokens=128).choices[0].message.content)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_streamed_answer_equals_the_whole_answer(client: openai.OpenAI, red_square: str) -> None:
    whole = ask(client, red_square, SCENE).choices[0].message.content
    chunks: Any = ask(client, red_square, SCENE, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


async def test_answers_without_a_schema_are_not_changed_by_neighbours_with_one(
    service: RunningService, red_square: str
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:

        async def one(constrained: bool) -> str:
            extra: dict[str, Any] = {"response_format": fits(SCENE)} if constrained else {}
            answer = await client.chat.completions.create(
                model="tiny",
                messages=messages(red_square) if constrained else [{"role": "user", "content": "Hello!"}],  # type: ignore[arg-type]
                temperature=0,
                max_tokens=64,
                **extra,
            )
            return answer.choices[0].message.content or ""

        alone = await one(constrained=True)
        answers = await asyncio.gather(*(one(constrained=index % 2 == 0) for index in range(12)))
    assert answers == [alone, CHAT_ANSWERS["hello"]] * 6


@pytest.mark.parametrize("strict", [True, False, None])
def test_objects_have_no_other_properties(client: openai.OpenAI, strict: bool | None) -> None:
    """A schema that does not mention additional properties, such as one that pydantic generates, forbids them."""
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "in": {"$ref": "#/$defs/In"}},
        "required": ["colour", "in"],
        "$defs": {"In": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}
    message: Any = {"role": "user", "content": "Hello!"}
    answer = client.chat.completions.create(model="tiny", messages=[message], response_format=form, max_tokens=40)
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert (found.keys(), found["in"].keys()) == ({"colour", "in"}, {"n"})


OPEN = {"properties": {"a": {}}}
SHUT = {**OPEN, "additionalProperties": False}
OTHER = {"properties": {"b": {}}}
BOTH = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}


def test_an_object_that_several_schemas_describe_has_no_other_properties(client: openai.OpenAI) -> None:
    def one(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}

    for schema in (
        {"allOf": [{"$ref": "#/$defs/base"}, one("b")], "$defs": {"base": one("a")}},
        {"$ref": "#/$defs/base", **one("b"), "$defs": {"base": one("a")}, "required": ["a", "b"]},
        {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"b": {"enum": [True]}}, "required": ["b"]}
        | {"$defs": {"base": one("a")}},
    ):
        message: Any = {"role": "user", "content": "Hello!"}
        form: Any = fits(schema)
        answer = client.chat.completions.create(model="tiny", messages=[message], response_format=form, max_tokens=60)
        assert answer.choices[0].finish_reason == "stop", schema
        assert json.loads(answer.choices[0].message.content or "").keys() == {"a", "b"}, schema


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (OPEN, SHUT),
        ({"type": "object"}, {"type": "object"}),
        (OPEN | {"additionalProperties": True}, OPEN | {"additionalProperties": True}),
        (OPEN | {"additionalProperties": OPEN}, OPEN | {"additionalProperties": SHUT}),
        ({"properties": {"properties": OPEN}}, {"properties": {"properties": SHUT}, "additionalProperties": False}),
        ({"const": OPEN, "enum": [OPEN], "default": OPEN}, {"const": OPEN, "enum": [OPEN], "default": OPEN}),
        ({"items": OPEN, "prefixItems": [OPEN]}, {"items": SHUT, "prefixItems": [SHUT]}),
        ({"patternProperties": {"x": OPEN}}, {"patternProperties": {"x": SHUT}}),
        ({"anyOf": [OPEN, {"items": OPEN}]}, {"anyOf": [SHUT, {"items": SHUT}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPEN}}, {"$ref": "#/$defs/x", "$defs": {"x": SHUT}}),
        ({"allOf": [OPEN]}, {"allOf": [SHUT]}),
        ({"allOf": [OPEN, {"required": ["a"]}]}, {"allOf": [SHUT, {"required": ["a"]}]}),
        (OPEN | {"anyOf": [{"required": ["a"]}]}, SHUT | {"anyOf": [{"required": ["a"]}]}),
        # In these cases, several schemas describe one object together. The schema that combines them is closed.
        ({"allOf": [OPEN, OTHER]}, {"allOf": [OPEN, OTHER], **BOTH}),
        (OTHER | {"oneOf": [OPEN]}, {"oneOf": [OPEN], "properties": {"b": {}, "a": {}}, "additionalProperties": False}),
        (OPEN | {"allOf": [{"items": OPEN}, OTHER]}, {"allOf": [{"items": SHUT}, OTHER], **BOTH}),
        (
            {"allOf": [{"$ref": "#/$defs/x"}, OTHER], "$defs": {"x": OPEN, "y": OPEN}},
            {"allOf": [{"$ref": "#/$defs/x"}, OTHER], "$defs": {"x": OPEN, "y": SHUT}, **BOTH},
        ),
        (
            OPEN | {"$ref": "#/$defs/%C3%A9", "$defs": {"é": OTHER}},
            OPEN | {"$ref": "#/$defs/%C3%A9", "$defs": {"é": OTHER}} | BOTH,
        ),
        (
            {"allOf": [{"$ref": "#/$defs/x"}, OTHER], "items": {"$ref": "#/$defs/x"}, "$defs": {"x": OPEN}},
            {
                "allOf": [{"$ref": "#/$defs/x"}, OTHER],
                "items": {"$ref": "#/$defs/x"} | SHUT,
                "$defs": {"x": OPEN},
                **BOTH,
            },
        ),
        # A part of the object says that it may have other properties.
        (
            {"allOf": [OPEN | {"additionalProperties": True}, OTHER]},
            {"allOf": [OPEN | {"additionalProperties": True}, OTHER]},
        ),
        ({"allOf": [OPEN, OTHER | {"patternProperties": {}}]}, {"allOf": [OPEN, OTHER | {"patternProperties": {}}]}),
        (
            {"allOf": [{"$ref": 3}, {"$ref": "#/x"}, {"type": "string"}]},
            {"allOf": [{"$ref": 3}, {"$ref": "#/x"}, {"type": "string"}]},
        ),
        ([OPEN], [SHUT]),
        (True, True),
    ],
)
def test_which_objects_are_closed(given: Any, expected: Any) -> None:
    assert closed(given) == expected


def test_closing_a_schema_takes_bounded_time() -> None:
    base = {"properties": {f"p{i}": {} for i in range(2000)}}
    with pytest.raises(LimitExceeded, match="combines schemas with more than 131072 parts and properties"):
        closed(
            {
                "$defs": {"x": base},
                "properties": {f"q{i}": {"allOf": [{"$ref": "#/$defs/x"}, OPEN]} for i in range(100)},
            }
        )


def test_the_schema_then_strict_then_the_setting_decide_on_other_properties() -> None:
    """`additionalProperties` in the schema takes precedence over `strict`, and `strict` over the service's setting."""

    def made(schema: dict[str, Any], strict: bool | None, *, close: bool) -> Any:
        named = {"schema": schema, "strict": strict}
        forms = [
            {"type": "json_schema", **named},
            *({"type": "json_schema", at: named} for at in ("json_schema", "value")),
        ]
        structures = {ChatBody(messages=[], response_format=form).structure(close=close) for form in forms}
        (structure,) = structures
        return json.loads((structure and structure.wanted.json) or "")

    for strict, close in ((True, False), (True, True), (None, True), (False, True)):
        assert made(OPEN, strict, close=close) == SHUT
        assert made(OPEN | {"additionalProperties": True}, strict, close=close)["additionalProperties"] is True
    for strict in (None, False):
        assert made(OPEN, strict, close=False) == OPEN
    vllms = {"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}
    structure = ChatBody(messages=[], **vllms).structure(close=False)
    assert structure is not None
    assert json.loads(structure.wanted.json or "") == SHUT


@pytest.mark.parametrize(
    "given",
    [
        {"type": "text", "json_schema": None, "strict": None},
        {"type": "json_object", "schema": None, "json_schema": None},
        {"type": "json_schema", "schema": None, "json_schema": {"name": None, "schema": {"enum": [1]}, "type": None}},
    ],
)
def test_null_equals_an_absent_key(http: Any, given: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "response_format": given}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "json_object", "scheme": SCENE}, "response_format.scheme: Extra inputs"),
        (
            {"type": "json_schema", "schema": SCENE, "value": SCENE},
            "is 'json_schema', and response_format has schema and value",
        ),
        ({"type": "regex", "schema": SCENE}, "is 'regex', and response_format has schema"),
        ({"type": "regex", "value": SCENE}, "response_format.value must be a string"),
        (
            {"type": "json_object", "json_schema": {"schema": SCENE}},
            "is 'json_object', and response_format has json_schema",
        ),
        ({"type": "text", "json_schema": {"schema": SCENE}}, "is 'text', and response_format has json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "json_schema": SCENE}}, "json_schema.json_schema: Extra"),
    ],
)
def test_a_misplaced_schema_is_refused(http: Any, given: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "response_format": given}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_type_text_leaves_the_answer_unconstrained(client: openai.OpenAI, red_square: str) -> None:
    answer = ask(client, red_square, {}, response_format={"type": "text"})
    assert answer.choices[0].message.content == "red square"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "wat"}, "Invalid type"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "not present"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#"}, "no output can match it"),
        ({"not": {"type": "string"}}, "Unimplemented"),
        ({"enum": ["x" * 40_000]}, "the limit is 32768"),
        ({"const": 1234567890123456789}, "has 1234567890123456789 in const"),
        ({"type": "string", "minimum": float("inf")}, "JSON"),
    ],
)
def test_invalid_and_unsupported_schemas_are_refused(http: Any, schema: dict[str, Any], message: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "response_format": fits(schema)}
    for stream in (False, True):
        raw = json.dumps(body | {"stream": stream})
        answer = http.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("levels", [40, 200, 2000])
def test_deeply_nested_schemas_end_no_process(http: Any, levels: int) -> None:
    schema: Any = '{"type": "object", "properties": {"a": ' * levels + "{}" + "}}" * levels
    raw = (
        '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "response_format": {"type": "json_schema", '
    )
    raw += '"json_schema": {"name": "x", "schema": ' + schema + "}}}"
    answer = http.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == (200 if levels == 40 else 400), answer.text
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("change", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_options_that_contradict_a_schema_are_refused(http: Any, change: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}} | change
    assert http.post("/v1/chat/completions", json=body).status_code == 400
