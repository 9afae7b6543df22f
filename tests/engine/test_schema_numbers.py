"""Tests for JSON schemas with numbers that float64 cannot represent. No answer may contain a rounded number instead."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.structured.schema_text import rewritten
from mindie_mm.tokenize.text.detokenizer import load_tokenizer

VOCABULARY = 792
EOS = 779
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(Checkpoint.open(None))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, (EOS,))


def takes(grammars: Grammars, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    constraint = grammars.constraint(StructuredOutputs(json=schema if isinstance(schema, str) else json.dumps(schema)))
    for token in [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]:
        if grammars.refused([constraint], VOCABULARY)[0, token]:
            return False
        constraint.accept(token)
    return True


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"const": 2**53}, [2**53], [2**53 - 1, 2**53 + 1]),
        ({"const": 2**60}, [2**60], [2**60 + 1, 1152921504606847000]),
        ({"enum": [2**53, -(2**53), "a"]}, [2**53, -(2**53)], [2**53 + 1]),
        ({"type": "integer"} | INT64, [0, 2**63 - 1, 1024 - 2**63, -1], [2**63, -(2**63) - 1]),
        ({"type": ["integer", "null"]} | INT64, [0, 2**63 - 1], [2**63]),
        ({"anyOf": [{"type": "null"}, {"type": "integer"} | INT64]}, [0, 2**63 - 1], [2**63]),
        ({"$defs": {"id": {"type": "integer"} | INT64}, "$ref": "#/$defs/id"}, [0, 2**63 - 1], [2**63]),
        ({"allOf": [{"type": "integer"}, INT64]}, [0, 2**62], [2**63, -(2**63) - 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [2**64, -1]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, [2**53 + 2], [2**53, 2**53 + 4]),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 3}, [2**53 + 2], [2**53, 2**53 + 4]),
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2, 2**70], [2**53]),
        ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**54}, [2**53 + 2], [2**53]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**53 + 1}, [2**53], [2**53 + 1, 2**53 + 2]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63 - 1}, [2**62], [2**63 - 1]),
        ({"type": "integer", "minimum": 10**18}, [10**18, 2**63 - 1], [1]),
        ({"type": "integer", "maximum": -(10**18)}, [-(10**18)], [-1]),
        ({"type": "number", "maximum": 1234567890123456768}, [1234567890123456000], [1234567890123456769]),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e300}, [0, 0.5, 10**18], []),
        ({"type": "integer", "multipleOf": 10**8}, [0, 3 * 10**8], [10**7]),
        ({"type": "string", "maxLength": 2**63 - 1}, ['"a"'], []),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ['"aa"'], ['"a"', '"aaaa"']),
        ({"type": "array", "items": {"type": "integer"} | INT64, "maxItems": 2**64}, [[1, 2]], [[2**63]]),
        ({"properties": {"const": {"type": "integer"} | INT64}, "required": ["const"]}, [{"const": 2**62}], [{}]),
        ({"default": {"const": 2**53 + 1}, "examples": [2**53 + 1], "enum": [1]}, [1], [2]),
    ],
)
def test_exactly_the_numbers_that_fit_the_schema_are_accepted(
    grammars: Grammars, tokenizer: Tokenizer, schema: Any, fitting: list[Any], others: list[Any]
) -> None:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    assert [value for value in fitting if not takes(grammars, tokenizer, schema, text(value))] == []
    assert [value for value in others if takes(grammars, tokenizer, schema, text(value))] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 1234567890123456789}, "has 1234567890123456789 in const;"),
        ({"enum": [9007199254740993]}, "has 9007199254740993 in enum"),
        ({"const": -(2**63)}, "has -9223372036854775808 in const"),
        ({"const": 2**64 - 1}, "has 18446744073709551615 in const"),
        ({"type": "integer", "const": 1e300}, "has 1e+300 in const"),
        ({"type": "integer", "const": 1.2345678901234568e18}, "in const"),
        ('{"const": 9007199254740993.0}', "has 9007199254740992.0 in const"),
        ({"const": {"a": [2**53 + 1]}}, "has 9007199254740993 in const"),
        ({"anyOf": [{"type": "null"}, {"const": 2**53 + 1}]}, "has 9007199254740993 in const"),
        ({"items": {"properties": {"a": {"enum": [2**53 + 1]}}}}, "has 9007199254740993 in enum"),
        ({"x": {"y": {"const": 2**53 + 1}}, "$ref": "#/x/y"}, "has 9007199254740993 in const"),
        ({"type": "integer", "minimum": 2**53 + 2, "maximum": 2**53 + 1}, "no output can match it: Unsatisfiable"),
        (
            {"type": "integer", "minimum": 2**63},
            "has the bound 9223372036854775808; the limits are -9223372036854774784 and 9223372036854774784",
        ),
        ({"type": "number", "maximum": -1e300}, "has the bound -1e+300"),
        (
            {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
            "has minimum 9007199254740993 and maximum 9007199254740993, but no exact number lies between them",
        ),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "has multipleOf 9007199254740993; the limit is 429496729"),
        ({"type": "string", "minLength": 2**40}, "has minLength 1099511627776; the limit is"),
        ('{"maximum": 1e400}', "1e400 is not a finite number"),
        ('{"maximum": NaN}', "NaN is not a finite number"),
        ('{"const": 1%s}' % ("0" * 4200), "has <integer of 13953 bits> in const"),
        ('{"const": 1%s}' % ("0" * 5000), "is not valid JSON: an integer has more than 4300 digits"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
    ],
)
def test_a_number_that_would_be_rounded_is_refused(grammars: Grammars, schema: Any, message: str) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(InputError) as caught:
        grammars.constraint(StructuredOutputs(json=text))
    assert message in str(caught.value)
    # This passes, because only compiling the schema reports the error.
    SamplingParams(json_schema=text).check(VOCABULARY)


def test_other_schemas_are_unchanged() -> None:
    schema = {"type": "object", "properties": {"é": {"minimum": 0.1, "exclusiveMaximum": 5}}, "required": ["é"]}
    assert rewritten(json.dumps(schema)) == schema
