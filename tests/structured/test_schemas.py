"""Tests that JSON schemas have the meaning that JSON Schema gives them."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mindie_mm.errors import InputError
from mindie_mm.structured import lark
from tests.structured.conftest import Takes

BYTES = LLTokenizer("byte")
BOUNDS = ("-1.5", "-1", "-0.5", "-0.25", "0", "0.25", "0.5", "1", "1.25", "1.5", "2", "10", "10.5")
NUMBERS = [
    *BOUNDS,
    *(
        "-3",
        "-2",
        "-1.6",
        "-1.25",
        "-1.0",
        "-0.75",
        "-0.6",
        "-0.3",
        "-0.1",
        "0.0",
        "0.00",
        "0.1",
        "0.250",
        "0.3",
        "0.6",
    ),
    *("0.9", "1.0", "1.00", "1.1", "1.3", "1.50", "1.75", "2.0", "2.5", "3", "9", "9.5", "10.0", "10.25", "10.50"),
    *("10.75", "12", "100"),
]


def accepted(schema: dict[str, Any], texts: list[str]) -> set[str] | None:
    """Return the texts that fit the compiled schema, or None if nothing fits it."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(lark.schema(json.dumps(schema))))
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    if matcher.is_error():
        assert "Unsatisfiable" in matcher.get_error(), matcher.get_error()
        return None
    found = set()
    for text in texts:
        one = matcher.deep_copy()
        if one.try_consume_tokens(list(text.encode())) == len(text) and one.is_accepting():
            found.add(text)
    return found


def test_the_bounds_of_numbers_hold_exactly() -> None:
    lows, highs = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    for kind in ("number", "integer", None):
        own = {} if kind is None else {"type": kind}
        for low, high in itertools.product((None, *BOUNDS), (None, *BOUNDS)):
            for below, above in itertools.product(lows, highs):
                given = {name: json.loads(bound) for name, bound in ((below, low), (above, high)) if bound is not None}
                schema = own | given

                def fits(text: str, kind: str | None = kind, given: dict[str, Any] = given) -> bool:
                    value = Decimal(text)
                    if kind == "integer" and "." in text:
                        return False
                    return (
                        value >= given.get("minimum", value)
                        and value > given.get("exclusiveMinimum", value - 1)
                        and value <= given.get("maximum", value)
                        and value < given.get("exclusiveMaximum", value + 1)
                    )

                found = accepted(schema, NUMBERS) or set()
                assert not [text for text in found if not fits(text)], schema
                # An inclusive bound that is an integer may be written in fewer ways than JSON allows.
                plain = {text for text in NUMBERS if fits(text) and text in BOUNDS}
                assert plain <= found | {"-0.0"}, (schema, plain - found)


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, ["0.25"], ["0", "0.75"]),
        (
            {"type": "number", "exclusiveMinimum": 1, "maximum": 2, "multipleOf": 0.5},
            ["1.5", "2"],
            ["1", "1.0", "1.25"],
        ),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1", "0.5"], ["0", "0.0", "-0"]),
        ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 0}]}, ["1", "2"], ["0"]),
        ({"type": ["number", "null"], "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "null"], ["0", "-0", "-0.0"]),
        ({"anyOf": [{"exclusiveMinimum": 0, "maximum": 0.5, "type": "number"}]}, ["0.4"], ["0"]),
        ({"enum": [0, 0.25, 1], "exclusiveMinimum": 0, "maximum": 0.5}, ["0.25"], ["0", "1"]),
        ({"type": "array", "uniqueItems": False, "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}, ["[1, 1]"], []),
        (
            {"properties": {"uniqueItems": {"const": False}}, "required": ["uniqueItems"]},
            ['{"uniqueItems": false}'],
            [],
        ),
    ],
)
def test_exactly_what_fits_a_schema_is_accepted(
    takes: Takes, schema: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    assert [text for text in fitting if not takes(text, json=json.dumps(schema))] == []
    assert [text for text in others if takes(text, json=json.dumps(schema))] == []


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("颜色", "#/$defs/颜色"),
        ("颜色", "#/$defs/%E9%A2%9C%E8%89%B2"),
        ('a b[int]|^`"<>{}', '#/$defs/a b[int]|^`"<>{}'),
        ("50%", "#/$defs/50%"),
        ("50%", "#/$defs/50%25"),
        ("a/b~c", "#/$defs/a~1b~0c"),
        ("é", "#/$defs/%C3%A9"),
    ],
)
def test_the_name_of_a_definition_may_have_any_characters(takes: Takes, name: str, reference: str) -> None:
    schema = {"$defs": {name: {"enum": ["红"]}}, "properties": {"c": {"$ref": reference}}, "required": ["c"]}
    assert takes('{"c": "红"}', json=json.dumps(schema))
    assert not takes('{"c": "绿"}', json=json.dumps(schema))


def test_a_demand_for_unique_items_is_refused(takes: Takes) -> None:
    with pytest.raises(InputError, match="uniqueItems"):
        takes("[]", json='{"type": "array", "uniqueItems": true}')


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"exclusiveMinimum": 1, "maximum": 1}, r"exclusiveMinimum \(1\) is equal to maximum \(1\)"),
        ({"exclusiveMinimum": 1, "maximum": 0}, r"exclusiveMinimum \(1\) is greater than maximum \(0\)"),
        ({"minimum": 0, "exclusiveMaximum": 0}, r"minimum \(0\) is equal to exclusiveMaximum \(0\)"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0}, r"exclusiveMinimum \(0\) is equal to exclusiveMaximum \(0\)"),
    ],
)
def test_a_refusal_names_the_bounds_as_given(takes: Takes, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        takes("1", json=json.dumps(schema | {"type": "number"}))


NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
ENDLESS: list[dict[str, Any]] = [
    NODE | {"required": ["n"]},
    {"anyOf": [NODE | {"required": ["n"]}, {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}]},
    {"allOf": [{"$ref": "#/$defs/m"}]},
]


@pytest.mark.parametrize("node", ENDLESS)
def test_a_schema_that_only_endless_values_match_is_refused(takes: Takes, node: dict[str, Any]) -> None:
    others = {"m": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}
    schema = {"$defs": {"n": node, **others}, "$ref": "#/$defs/n"}
    with pytest.raises(InputError, match="no output can match it"):
        takes("{}", json=json.dumps(schema))
    optional = {"$defs": schema["$defs"], "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert takes("{}", json=json.dumps(optional))
    assert not takes('{"a": {"n": {}}}', json=json.dumps(optional))


@pytest.mark.parametrize(
    "node",
    [
        NODE,
        NODE | {"required": ["n"], "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "object"}]}}},
        NODE | {"required": ["n"], "properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    ],
)
def test_a_recursive_schema_with_finite_values_is_accepted(takes: Takes, node: dict[str, Any]) -> None:
    finite = ['{"n": {}}', '{"n": []}']
    schema = json.dumps({"$defs": {"n": node}, "$ref": "#/$defs/n"})
    assert any(takes(text, json=schema) for text in finite)
