"""Tests that required calls fit the schema of their tool in every format, and are refused if nothing fits it."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.structured.grammar import Constraint, Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from mindie_mm.tool_calls.raw_strings import _FORMATS
from mindie_mm.tool_calls.registry import FORMATS, parser_named
from mindie_mm.tool_calls.schemas import Tool
from tests.tool_calls.assembling import answer_of
from tests.tool_calls.test_broken_calls import ENDINGS

END = 779
VOCABULARY = 792
RAW = [name for name in ENDINGS if name not in ("pythonic", "lfm2")]
"""Formats in which strings are not JSON."""
KINDS = ["hermes", "pythonic", "deepseek_v3", "glm45", "qwen3_coder", "gemma4"]
"""Formats that differ in how they write names, arguments and strings."""
EVERY_FORMAT = [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in FORMATS]
SAID = "the grammar is not supported: no output can match it"


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(Checkpoint.open(None))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), [END])


def constraint(name: str, schema: Any, *, required: bool = True) -> Constraint:
    """Return the constraint of a call to the tool `f`, whose argument `s` has the schema."""
    tool = tool_of(schema, required=required)
    grammar = parser_named(name).grammar([tool], parallel=False, one_of=["f"], added_tokens={})
    return grammars().constraint(StructuredOutputs(grammar=grammar))


def tool_of(schema: Any, *, required: bool = True) -> Tool:
    if isinstance(schema, bool):
        own, definitions = schema, {}
    else:
        own = {key: value for key, value in schema.items() if key != "$defs"}
        definitions = schema.get("$defs", {})
    properties = {"properties": {"s": own}, "additionalProperties": False, "$defs": definitions}
    return Tool("f", properties | {"required": ["s"] if required else []})


def drawn(one: Constraint, seed: int, most: int = 300) -> str | None:
    """Draw a text that the constraint allows. Return None if it does not end within `most` tokens."""
    rng, ids = np.random.default_rng(seed), list[int]()
    while len(ids) < most:
        (refused,) = grammars().refused([one], VOCABULARY)
        allowed = np.flatnonzero(~refused)
        assert len(allowed), "the model is at a dead end"
        token = END if END in allowed else int(rng.choice(allowed))
        assert not one.accept(token), one.error
        if token == END:
            return str(tokenizer().decode(ids, skip_special_tokens=False))
        ids.append(token)
    return None


def called(name: str, schema: Any, seed: int, *, required: bool = True) -> Any:
    """Draw a call, and return its arguments. Return None if it is too long."""
    text = drawn(constraint(name, schema, required=required), seed)
    if text is None:
        return None
    (call,) = answer_of(parser_named(name)([tool_of(schema)]), [text], whole=True).calls
    assert call.complete
    return json.loads(call.arguments)


def takes(name: str, schema: Any, value: str) -> bool:
    """Return whether the grammar of a format allows a string as the value of the argument."""
    written = json.dumps(value, ensure_ascii=False)
    text = (
        ENDINGS[name].format(value=value)
        if name in RAW
        else f'<tool_call>\n{{"name": "f", "arguments": {{"s": {written}}}}}\n</tool_call>'
    )
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    try:
        one = constraint(name, schema)
    except InputError as error:
        assert str(error) == SAID  # noqa: PT017 - the caller asks only whether the value fits
        return False
    for token in (*ids, END):
        if grammars().refused([one], VOCABULARY)[0, token]:
            return False
        assert not one.accept(token)
    return True


FITTING: list[Any] = [
    {"type": "string", "enum": ["a", 1, None]},
    {"enum": ["a", "bb", 3], "minLength": 2},
    {"enum": ["a", "bb", "cc"], "pattern": "^b"},
    {"enum": ["2023-06-31", "2023-06-30", "x"], "format": "date"},
    {"enum": [1, 5, 7, 8], "minimum": 4, "exclusiveMaximum": 8, "multipleOf": 7},
    {"enum": [[1], ["a"]], "items": {"type": "string"}},
    {"enum": [1.5, 2], "type": "integer"},
    {"enum": [True, False, None], "type": ["boolean", "string"]},
    {"const": "ab", "enum": ["ab", "c"], "maxLength": 2},
    {"type": ["string", "integer"], "minimum": 10, "maximum": 99, "maxLength": 1},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["string", "null", "boolean"], "enum": ["x", None]},
    {"type": ["integer", "boolean", "null"], "minimum": 3, "maximum": 5},
    {"type": "boolean", "enum": [True]},
    {"enum": ["1", 1]},
    {"enum": ["12", 12, "ab"], "minimum": 20},
    {"anyOf": [{"type": "string", "enum": ["a", 1], "minLength": 1}, {"type": "null"}]},
    {"anyOf": [{"enum": ["abc"], "maxLength": 2}, {"const": 5}]},
    {"anyOf": [{"type": "string", "format": "date", "maxLength": 5}, {"enum": [1, 2]}]},
    {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 2}, {"enum": ["yes"]}]},
    {"type": "string", "pattern": "^a|b$", "maxLength": 3},
    {"type": "string", "pattern": r"^\d{2}\\d?$"},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"anyOf": [False, {"enum": ["x"]}]},
    {"$ref": "#/$defs/颜色", "$defs": {"颜色": {"enum": ["红", 2]}}},
]


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_arguments_fit_every_constraint_beside_enum_const_and_lists_of_types(name: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    num_ended = 0
    for schema in FITTING:
        for seed in range(2):
            arguments = called(name, schema, seed)
            if arguments is not None:
                num_ended += 1
                jsonschema.validate(arguments, tool_of(schema).schema, format_checker=checker)
    assert num_ended > len(FITTING)


NOTHING: list[Any] = [
    {"type": "string", "format": "date", "maxLength": 5},
    {"type": "string", "format": "date", "pattern": "^2023-06-31$"},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "string", "enum": [1, None]},
    {"enum": ["abc"], "maxLength": 2},
    {"const": "a", "enum": ["b"]},
    {"enum": []},
    False,
    {"anyOf": [False, {"enum": []}]},
    {"enum": [1], "minimum": 2},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"anyOf": [{"enum": ["abc"], "maxLength": 2}, {"type": "integer", "minimum": 5, "maximum": 4}]},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}},
    },
    {"$ref": "#/$defs/a", "$defs": {"a": False}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [2], "maximum": 1}}},
]


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_a_schema_without_output_is_refused_in_the_same_words(name: str) -> None:
    for schema in NOTHING:
        with pytest.raises(InputError) as caught:
            constraint(name, schema)
        assert str(caught.value) == SAID, schema


OVERLAPPING = (
    {"oneOf": [{"enum": ["a"]}, {"enum": ["a", "b"]}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^b"}]},
    {"anyOf": [{"oneOf": [{"type": "string"}, {"const": "a"}]}, {"type": "null"}]},
)
DISJOINT = (
    ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, {"type": ["string", "null"]}),
    ({"oneOf": [{"enum": ["a"]}, {"enum": ["b", 1]}]}, {"enum": ["a", "b", 1]}),
    ({"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}]}, {"enum": [0, 1, 2, 3, 4, 5]}),
)


@pytest.mark.parametrize("name", RAW)
def test_alternatives_that_one_value_may_fit_are_refused(name: str) -> None:
    for schema in OVERLAPPING:
        with pytest.raises(InputError, match=r"oneOf.*cannot enforce"):
            constraint(name, schema)
    for schema, fits in DISJOINT:
        for seed in range(3):
            if (text := drawn(constraint(name, schema), seed)) is not None:
                (call,) = answer_of(parser_named(name)([tool_of(schema)]), text).calls
                jsonschema.validate(json.loads(call.arguments)["s"], fits)


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_an_optional_argument_that_nothing_fits_is_left_out(name: str) -> None:
    for schema in NOTHING[:-3]:  # llguidance refuses a definition that nothing fits even if nothing needs it
        assert called(name, schema, 0, required=False) == {}, schema


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_a_required_argument_that_is_not_among_the_properties_fits_additional_properties(name: str) -> None:
    for others, fits in ((False, False), ({"enum": []}, False), (True, True), ({"enum": [7]}, True), (None, True)):
        schema = {"type": "object", "properties": {"s": {"const": 1}}, "required": ["s", "b"]}
        tool = Tool("f", schema if others is None else schema | {"additionalProperties": others})
        grammar = parser_named(name).grammar([tool], parallel=False, one_of=["f"], added_tokens={})
        if not fits:
            with pytest.raises(InputError, match=SAID):
                grammars().constraint(StructuredOutputs(grammar=grammar))
            continue
        text = drawn(grammars().constraint(StructuredOutputs(grammar=grammar)), 0)
        if text is None:  # the object has further properties with long names
            assert others != {"enum": [7]} or name not in ENDINGS
        else:
            (call,) = answer_of(parser_named(name)([tool]), [text], whole=True).calls
            jsonschema.validate(json.loads(call.arguments), tool.schema)


def test_a_tool_that_nothing_fits_is_not_called() -> None:
    for name in FORMATS:
        tools = [tool_of(NOTHING[0]), Tool("g")]
        grammar = parser_named(name).grammar(tools, parallel=False, one_of=["f", "g"], added_tokens={})
        for seed in range(2):
            text = drawn(grammars().constraint(StructuredOutputs(grammar=grammar)), seed)
            assert text is not None
            (call,) = answer_of(parser_named(name)(tools), [text], whole=True).calls
            assert (call.name, call.arguments) == ("g", "{}")


SAMPLES: Mapping[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2023-12-31"], ["2023-06-31", "2023-13-01", "2023-1-1", "2023-02-30", ""]),
    "time": (["23:59:60Z", "01:02:03.5+01:00"], ["24:00:00Z", "01:02:03", "1:02:03Z"]),
    "date-time": (["2024-02-29T01:02:03Z"], ["2024-02-30T01:02:03Z", "2024-02-29 01:02:03Z", "2024-02-29"]),
    "duration": (["P1Y2M3D", "PT1H", "P2W", "P1DT2M3S"], ["P", "1D", "P1Y2D", "PT", "P1D2W"]),
    "email": (["a.b+c@x-y.org", "a@[127.0.0.1]", "a@localhost"], ["a", "@b.c", "a..b@c.d", "a@-b.c", "a b@c.d"]),
    "hostname": (["a.b-c.example", "x"], ["-a", "a-", "a..b", "a_b", "a" * 64]),
    "ipv4": (["0.0.0.0", "255.249.199.99"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1::", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
        ["1:2:3", ":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "12345::", ":1"],
    ),
    "uri": (
        ["http://a.b/c?d=e#f", "urn:x:y", "mailto:a@b.c", "http://[::1]:80/", "x:", "a://u:p@h/%41"],
        ["a", "//a.b", "http://a b", "1x:a", "http://%4", "http://[::1", ""],
    ),
    "uuid": (["123E4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "g" * 36]),
    "unknown": (["any", ""], []),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_strings_have_the_same_formats_in_all_formats_of_calls(kind: str) -> None:
    fitting, others = SAMPLES[kind]
    schema = {"type": "string", "format": kind}
    for name in ("hermes", "qwen3_coder", "glm47", "gemma4"):
        assert [text for text in fitting if not takes(name, schema, text)] == [], name
        assert [text for text in others if takes(name, schema, text)] == [], name


def test_all_formats_of_strings_are_compared() -> None:
    assert SAMPLES.keys() == _FORMATS.keys()
    for text in SAMPLES["ipv6"][0]:
        ipaddress.IPv6Address(text)
    with pytest.raises(InputError, match="cannot enforce strings of format 'idn-email'"):
        constraint("glm47", {"type": "string", "format": "idn-email"})


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("a", ["a", "xax"], ["", "b"]),
        ("^(a|b)$", ["a", "b"], ["ab", "xa"]),
        (r"\$$", ["a$"], ["$a", "a"]),
        (r"a\\$", ["a\\"], ["a"]),
        (r"[|^$]x", ["|x", "a$x"], ["x"]),
        ("a/b", ["a/b"], ["ab"]),
        (r"^\d\\d$", ["1\\d"], ["11"]),
        (r"^\w+$", ["a_1"], ["é"]),
    ],
)
def test_patterns_have_the_same_meaning_in_all_formats_of_calls(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    for name in ("hermes", "qwen3_coder", "glm47", "gemma4"):
        assert [text for text in fitting if not takes(name, schema, text)] == [], name
        assert [text for text in others if takes(name, schema, text)] == [], name
