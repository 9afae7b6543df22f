"""Output that fits a JSON schema: which tokens may come next, by llguidance."""

from __future__ import annotations

from collections import abc
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mindie_mm.errors import InputError
from mindie_mm.structured.schema_numbers import with_exact_numbers

# A mask takes 0.4 ms mostly and 3 ms at worst, which is what the fuel bounds. Nothing here bounds compiling.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000, max_grammar_size=50_000, step_lexer_fuel=50_000)
_MAX_SAID = 300
KEPT = 16
"""Schemas that stay compiled: the last ones. One that takes long to compile takes 7 MiB, too."""
# As json.dumps writes; with free whitespace a small model may write nothing else.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """One output on its way: what may follow what it has."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str:
        """Why nothing more can be said of this output; empty as long as it can."""
        return self.matcher.get_error()[:_MAX_SAID] if self.matcher.is_error() else ""

    def accept(self, token: int) -> str:
        """Takes the token that was drawn; `error` after it."""
        self.matcher.consume_token(token)
        return self.error


class Grammars:
    """Makes constraints over one checkpoint's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: abc.Sequence[int], num_threads: int = 1) -> None:
        """Read the vocabulary, which takes a second for 150,000 tokens. `num_threads` compute masks."""
        self._num_threads = num_threads
        self._unfit = ""
        self._compiled: dict[str, LLMatcher] = {}
        """The last `KEPT` schemas', the latest at the end."""
        try:
            self._vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=list(eos_token_ids))
        except ValueError as error:
            self._unfit = f"this checkpoint's tokenizer takes no JSON schema: {error}"

    def __contains__(self, schema: str) -> bool:
        """Whether it is compiled already."""
        return schema in self._compiled

    def constraint(self, schema: str) -> Constraint:
        """For an output that fits `schema`; InputError where it is none, or cannot be enforced with these tokens.

        It may take for ever: `SchemaCheck` says beforehand which schema does.
        """
        if self._unfit:
            raise InputError(self._unfit)
        self._compiled[schema] = matcher = self._compiled.pop(schema, None) or self._matcher(schema)
        if len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return Constraint(matcher.deep_copy())

    def refused(self, constraints: abc.Sequence[Constraint], vocab_size: int) -> NDArray[np.bool_]:
        """Return the tokens that may not come next, bool [constraints, vocab_size].

        After an error of a constraint, its row refuses no token.
        """
        num_known = self._vocabulary.vocab_size
        allowed = allocate_token_bitmask(len(constraints), num_known)
        fill_next_token_bitmask_par(
            self._executor, [(one.matcher, row) for row, one in enumerate(constraints)], allowed
        )
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, count=num_known, bitorder="little")
        refused = np.ones((len(constraints), vocab_size), np.bool_)  # ids beyond the tokenizer's own are no text
        refused[:, :num_known] = bits[:, :vocab_size] == 0
        refused[[one.matcher.is_error() for one in constraints]] = False
        return refused

    @cached_property
    def _executor(self) -> LLExecutor:
        # Made at the first use: it starts threads, which most engines never need, and which a fork does not keep.
        return LLExecutor(self._num_threads)

    def _matcher(self, schema: str) -> LLMatcher:
        read = with_exact_numbers(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(read, defaults=_STYLE)  # type: ignore[arg-type] # a stub alone
        except ValueError as error:
            raise InputError(f"the JSON schema is not valid JSON: {str(error)[:_MAX_SAID]}") from error
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InputError(f"the JSON schema cannot be served: {matcher.get_error()[:_MAX_SAID]}")
        matcher.compute_logit_bias()
        if matcher.is_error():  # of one that refers to itself alone, llguidance says so no sooner
            raise InputError("the JSON schema cannot be served: nothing can begin an answer that fits it")
        return matcher
