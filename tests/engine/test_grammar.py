"""A constraint over the embedded checkpoint's tokens, and what an engine without grammars says."""

import json

import numpy as np
import pytest
import tokenizers

from mindie_mm.errors import InputError
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.structured.grammar import Constraint, Grammars
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.processor_time import processor_time_below

VOCABULARY = 792


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer(Checkpoint.open(None)), (779, 777))


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


def test_a_schema_is_compiled_once(grammars: Grammars) -> None:
    schema = '{"type": "integer", "multipleOf": 20011}'
    first = grammars.constraint(schema)
    with processor_time_below(0.5):  # compiling it 64 times takes seconds
        further = [grammars.constraint(schema) for _ in range(64)]
    assert walk(first, 0) == walk(further[0], 0)
    assert walk(further[1], 1) != walk(further[2], 2), "each goes its own way"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(\\w|\\d|\\p{L}){1,1000}x$"},
        {"anyOf": [{"type": "array", "items": {"type": "string", "pattern": f".*a.{{{i}}}"}} for i in range(200)]},
        {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}|.*b.{{{i + 3}}})$"} for i in range(1, 4)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}},
    ],
)
def test_what_a_step_takes_is_bounded(grammars: Grammars, schema: dict[str, object]) -> None:
    constraint = grammars.constraint(json.dumps(schema))
    rng = np.random.default_rng(0)
    for _ in range(100):
        with processor_time_below(0.5):
            allowed = np.flatnonzero(~constraint.refused(VOCABULARY))
        if constraint.error or constraint.accept(int(rng.choice(allowed))):
            break


@pytest.mark.parametrize("schema", ["", "{", "[]", "true", "5", '"x"', '{"x": "\\ud800"}', '{"$ref": "#"}'])
def test_what_is_no_schema(grammars: Grammars, schema: str) -> None:
    with pytest.raises(InputError):
        grammars.constraint(schema)


def test_a_tokenizer_of_no_known_kind() -> None:
    unfit = Grammars(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")), [0])
    with pytest.raises(InputError, match="tokenizer takes no JSON schema"):
        unfit.constraint("{}")
