"""A constraint over the embedded checkpoint's tokens, and what an engine without grammars says."""

import json
import time

import numpy as np
import pytest

from mindie_mm.engine.detokenizer import load_tokenizer
from mindie_mm.engine.grammar import MAX_SCHEMA_BYTES, Constraint, Grammars, check_schema
from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint import Checkpoint

VOCABULARY = 792


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    checkpoint = Checkpoint.open(None)
    return Grammars(lambda: load_tokenizer(checkpoint), (779, 777))


def walk(constraint: Constraint, seed: int, most: int = 200) -> list[int]:
    """Tokens drawn evenly from what is allowed, up to the first end-of-sequence token."""
    rng = np.random.default_rng(seed)
    drawn: list[int] = []
    while len(drawn) < most:
        allowed = np.flatnonzero(~constraint.refused(VOCABULARY))
        assert len(allowed)
        token = int(rng.choice(allowed))
        constraint.accept(token)
        assert not constraint.error
        if token in (779, 777):
            return drawn
        drawn.append(token)
    return drawn


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_drawn_fits(grammars: Grammars, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = load_tokenizer(Checkpoint.open(None)).decode(walk(grammars.constraint(json.dumps(schema)), seed))
    assert text in ('{"a": 1}', '{"a": 22}')


def test_ids_beyond_the_tokenizers_own_are_refused(grammars: Grammars) -> None:
    refused = grammars.constraint('{"type": "string"}').refused(VOCABULARY)
    assert refused.shape == (VOCABULARY,)
    assert refused[780:].all()
    assert len(grammars.constraint('{"type": "string"}').refused(500)) == 500


def test_a_token_that_does_not_fit_is_an_error(grammars: Grammars) -> None:
    constraint = grammars.constraint('{"type": "boolean"}')
    constraint.accept(90)
    assert constraint.error
    assert not constraint.refused(VOCABULARY).any()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a{1000}){1000}"},
        {"type": "string", "pattern": "((a|b)*c(a|b){900})*x"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "minItems": 10**9},
        {"anyOf": [{"enum": [f"v{i}"]} for i in range(1000)]},
        {"allOf": [{"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b*{j}"} for i in range(6)]} for j in range(6)]},
    ],
)
def test_schemas_made_to_hurt_are_bounded(grammars: Grammars, schema: dict[str, object]) -> None:
    started = time.process_time()
    try:
        constraint = grammars.constraint(json.dumps(schema))
    except InputError:
        pass
    else:
        constraint.refused(VOCABULARY)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "schema", ["", "{", "[]", "true", "5", '"x"', "x" * (MAX_SCHEMA_BYTES + 1), '{"x": "\\ud800"}']
)
def test_what_is_no_schema(schema: str) -> None:
    with pytest.raises(InputError):
        check_schema(schema)
