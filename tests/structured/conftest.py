"""Fixtures that check which texts a structured output allows, with the vocabulary of the embedded checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.structured.grammar import Grammars
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.tokenize.text.detokenizer import load_tokenizer

END = 779
VOCABULARY = 792

Takes = Callable[..., bool]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(Checkpoint.open(None))


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, (END, 777))


def takes_ids(grammars: Grammars, ids: Sequence[int], **wanted: Any) -> bool:
    """Return whether the masks allow an answer with these ids and an end token after them."""
    constraint = grammars.constraint(StructuredOutputs(**wanted))
    for token in (*ids, END):
        if grammars.refused([constraint], VOCABULARY)[0, token]:
            return False
        assert not constraint.accept(token)
    return True


@pytest.fixture(scope="session")
def takes(grammars: Grammars, tokenizer: Tokenizer) -> Takes:
    def takes(text: str, **wanted: Any) -> bool:
        return takes_ids(grammars, tokenizer.encode(text, add_special_tokens=False).ids, **wanted)

    return takes


@pytest.fixture(scope="session")
def drawn(grammars: Grammars, tokenizer: Tokenizer) -> Callable[..., str]:
    """Return a function that draws a text from the outputs that a description allows.

    Each token is drawn uniformly, and the text ends as soon as the description allows its end. If this is not within
    the limit, the function raises AssertionError.
    """

    def drawn(seed: int, most: int = 400, **wanted: Any) -> str:
        constraint = grammars.constraint(StructuredOutputs(**wanted))
        rng = np.random.default_rng(seed)
        ids: list[int] = []
        while len(ids) < most:
            allowed = np.flatnonzero(~grammars.refused([constraint], VOCABULARY)[0])
            token = END if END in allowed else int(rng.choice(allowed))
            assert not constraint.accept(token)
            if token == END:
                return str(tokenizer.decode(ids, skip_special_tokens=False))
            ids.append(token)
        raise AssertionError(tokenizer.decode(ids))

    return drawn
