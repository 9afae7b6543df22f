"""Tests for grammar constraints, with the vocabulary of the embedded checkpoint."""

import json

import numpy as np
import pytest
import tokenizers
import torch

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig
from mindie_mm.structured.grammar import Constraint, Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.processor_time import processor_time_below

VOCABULARY = 792


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer(Checkpoint.open(None)), (779, 777), num_threads=2)


def fits(schema: str) -> StructuredOutputs:
    return StructuredOutputs(json=schema)


def walk(grammars: Grammars, constraint: Constraint, seed: int, most: int = 200) -> list[int]:
    """Draw allowed tokens uniformly until an end-of-sequence token is drawn. Return the tokens before it."""
    rng = np.random.default_rng(seed)
    drawn: list[int] = []
    while len(drawn) < most:
        allowed = np.flatnonzero(~grammars.refused([constraint], VOCABULARY)[0])
        assert len(allowed)
        token = int(rng.choice(allowed))
        constraint.accept(token)
        assert not constraint.error
        if token in (779, 777):
            return drawn
        drawn.append(token)
    return drawn


@pytest.mark.parametrize("seed", range(8))
def test_every_draw_matches_the_schema(grammars: Grammars, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = load_tokenizer(Checkpoint.open(None)).decode(
        walk(grammars, grammars.constraint(fits(json.dumps(schema))), seed)
    )
    assert text in ('{"a": 1}', '{"a": 22}')


def test_ids_beyond_the_tokenizer_are_refused(grammars: Grammars) -> None:
    constraint = grammars.constraint(fits('{"type": "string"}'))
    refused = grammars.refused([constraint], VOCABULARY)
    assert refused.shape == (1, VOCABULARY)
    assert refused[0, 780:].all()
    assert (grammars.refused([constraint], 500) == refused[:, :500]).all()


def test_a_token_that_breaks_the_schema_is_an_error(grammars: Grammars) -> None:
    constraint = grammars.constraint(fits('{"type": "boolean"}'))
    constraint.accept(90)
    assert constraint.error
    assert not grammars.refused([constraint], VOCABULARY).any()


def test_each_constraint_masks_only_its_own_row(grammars: Grammars) -> None:
    """A mask does not depend on the order and number of the rows, even if one of the constraints has an error."""
    schemas = ['{"type": "boolean"}', '{"type": "string"}', '{"enum": ["x", "yz"]}', "{}"]
    constraints = [grammars.constraint(fits(schema)) for schema in schemas for _ in range(8)]
    walk(grammars, constraints[9], 0, most=3)
    constraints[2].accept(90)
    alone = [grammars.refused([constraint], VOCABULARY)[0] for constraint in constraints]
    assert len({row.tobytes() for row in alone}) > len(schemas)
    for order in (range(32), range(31, -1, -1), range(1, 32, 3)):
        together = grammars.refused([constraints[i] for i in order], VOCABULARY)
        assert (together == np.stack([alone[i] for i in order])).all()


def test_a_batch_of_rows_with_and_without_a_schema_is_drawn_as_alone(grammars: Grammars, device: str) -> None:
    model = load_model(None, device=device)
    settings = (None, '{"type": "boolean"}', None, '{"enum": ["x", "yz"]}')
    logits = torch.randn(4, model.spec.vocab_size, generator=torch.Generator().manual_seed(0)).to(model.spec.device)

    def drawn(rows: list[int]) -> list[tuple[int, list[TokenLogprob] | None] | None]:
        engine = Engine(model, EngineConfig(), kv_cache_bytes=2**22)
        engine.grammars = grammars
        for row in rows:
            params = SamplingParams(temperature=0, logprobs=1, json_schema=settings[row])
            assert engine.add(Add(str(row), np.arange(5, dtype=np.int64).tobytes(), params)) is None
        return engine._draw(logits[rows].clone(), [*engine._requests.values()]).wait()

    whole = drawn([0, 1, 2, 3])
    assert [drawn([row]) for row in range(4)] == [[draw] for draw in whole]
    assert drawn([3, 2, 1, 0]) == whole[::-1]
    tokens = [draw[0] for draw in whole if draw]
    free = logits.argmax(dim=1).tolist()
    assert [token == likeliest for token, likeliest in zip(tokens, free, strict=True)] == [True, False, True, False]
    for row in (1, 3):
        refused = grammars.refused([grammars.constraint(fits(settings[row] or ""))], model.spec.vocab_size)[0]
        assert tokens[row] == logits[row].cpu().masked_fill(torch.from_numpy(refused), -torch.inf).argmax()


def test_a_schema_is_compiled_once(grammars: Grammars) -> None:
    schema = '{"type": "integer", "multipleOf": 20011}'
    first = grammars.constraint(fits(schema))
    with processor_time_below(0.5):  # 64 compilations would take seconds
        further = [grammars.constraint(fits(schema)) for _ in range(64)]
    assert walk(grammars, first, 0) == walk(grammars, further[0], 0)
    assert walk(grammars, further[1], 1) != walk(grammars, further[2], 2), "each constraint has its own state"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(\\w|\\d|\\p{L}){1,1000}x$"},
        {"anyOf": [{"type": "array", "items": {"type": "string", "pattern": f".*a.{{{i}}}"}} for i in range(200)]},
        {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}|.*b.{{{i + 3}}})$"} for i in range(1, 4)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}},
    ],
)
def test_the_time_of_a_step_is_bounded(grammars: Grammars, schema: dict[str, object]) -> None:
    constraint = grammars.constraint(fits(json.dumps(schema)))
    rng = np.random.default_rng(0)
    for _ in range(100):
        with processor_time_below(0.5):
            allowed = np.flatnonzero(~grammars.refused([constraint], VOCABULARY)[0])
        if constraint.error or constraint.accept(int(rng.choice(allowed))):
            break


@pytest.mark.parametrize("schema", ["", "{", "[]", "true", "5", '"x"', '{"x": "\\ud800"}', '{"$ref": "#"}'])
def test_an_invalid_schema_is_refused(grammars: Grammars, schema: str) -> None:
    with pytest.raises(InputError):
        grammars.constraint(fits(schema))


def test_a_tokenizer_of_an_unsupported_kind_is_refused() -> None:
    unfit = Grammars(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")), [0])
    with pytest.raises(InputError, match="structured outputs cannot be used with this checkpoint's tokenizer"):
        unfit.constraint(fits("{}"))
