"""Output that fits a JSON schema: which tokens may come next, by llguidance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mindie_mm.errors import InputError

MAX_SCHEMA_BYTES = 32768
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000, max_grammar_size=50_000)
_MAX_SAID = 300
# As json.dumps writes; with free whitespace a small model may write nothing else.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_schema(schema: str) -> None:
    """InputError where `schema` is too large, no JSON schema, or holds what cannot be enforced. Takes milliseconds."""
    if (num_bytes := len(schema.encode())) > MAX_SCHEMA_BYTES:
        raise InputError(f"the JSON schema has {num_bytes} bytes, the limit is {MAX_SCHEMA_BYTES}")
    if said := LLMatcher.validate_grammar(_grammar(schema), limits=_LIMITS):
        raise InputError(f"the JSON schema cannot be served: {said[:_MAX_SAID]}")
    begun = LLMatcher(LLTokenizer("byte"), _grammar(schema), log_level=0, limits=_LIMITS)
    begun.compute_logit_bias()
    if begun.is_error():  # of one that refers to itself alone, llguidance says so no sooner
        raise InputError("the JSON schema cannot be served: nothing can begin an answer that fits it")


class Constraint:
    """One output on its way: what may follow what it has."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why nothing more can be said of this output; empty as long as it can."""
        return self._matcher.get_error()[:_MAX_SAID] if self._matcher.is_error() else ""

    def refused(self, vocab_size: int) -> NDArray[np.bool_]:
        """bool [vocab_size]: the tokens that may not come next; none of them after an error."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        if self.error:
            return np.zeros(vocab_size, np.bool_)
        refused = np.ones(vocab_size, np.bool_)  # ids beyond the tokenizer's own are no text
        refused[: len(allowed)] = allowed[:vocab_size] == 0
        return refused

    def accept(self, token: int) -> str:
        """Takes the token that was drawn; `error` after it."""
        self._matcher.consume_token(token)
        return self.error


class Grammars:
    """Makes constraints over one checkpoint's vocabulary, which is read for the first of them."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocabulary: LLTokenizer | None = None

    def constraint(self, schema: str) -> Constraint:
        """For an output that fits `schema`; InputError as check_schema, or where the tokenizer is of no known kind."""
        check_schema(schema)
        if self._vocabulary is None:
            try:
                self._vocabulary = LLTokenizer(self._tokenizer().to_str(), eos_token=list(self._eos_token_ids))
            except ValueError as error:
                raise InputError(f"this checkpoint's tokenizer takes no JSON schema: {error}") from error
        found = Constraint(LLMatcher(self._vocabulary, _grammar(schema), log_level=0, limits=_LIMITS))
        if found.error:
            raise InputError(f"the JSON schema cannot be served: {found.error}")
        return found


def _grammar(schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_STYLE)  # type: ignore[arg-type] # a stub alone
    except ValueError as error:
        raise InputError(f"the JSON schema is no JSON: {str(error)[:_MAX_SAID]}") from error
