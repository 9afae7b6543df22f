"""Constraints that make output conform to a JSON schema, enforced with llguidance."""

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

# The fuel limits the time of a mask, which is typically 0.4 ms and at most 3 ms. These limits do not limit compilation.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000, max_grammar_size=50_000, step_lexer_fuel=50_000)
_MAX_SAID = 300
KEPT = 16
"""Number of recent schemas that stay compiled. A schema that is slow to compile also takes 7 MiB of memory."""
# The style of json.dumps. With flexible whitespace, a small model may write nothing but whitespace.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """A constraint on the next token of one output."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str:
        """Reason why the output can no longer be constrained, or an empty string."""
        return self.matcher.get_error()[:_MAX_SAID] if self.matcher.is_error() else ""

    def accept(self, token: int) -> str:
        """Append a drawn token, and return the `error` afterwards."""
        self.matcher.consume_token(token)
        return self.error


class Grammars:
    """A compiler of constraints over the vocabulary of one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: abc.Sequence[int], num_threads: int = 1) -> None:
        """Read the vocabulary, which takes a second for 150,000 tokens.

        Args:
            tokenizer: Tokenizer of the checkpoint.
            eos_token_ids: End-of-sequence ids, which may only follow a complete output.
            num_threads: Number of threads that compute masks.

        """
        self._num_threads = num_threads
        self._unfit = ""
        self._compiled: dict[str, LLMatcher] = {}
        """Matchers of the `KEPT` most recently used schemas, the latest last."""
        try:
            self._vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=list(eos_token_ids))
        except ValueError as error:
            self._unfit = f"JSON schemas cannot be used with this checkpoint's tokenizer: {error}"

    def __contains__(self, schema: str) -> bool:
        """Return whether `schema` is compiled already."""
        return schema in self._compiled

    def constraint(self, schema: str) -> Constraint:
        """Return the constraint for an output that conforms to `schema`.

        Compilation may take arbitrarily long. `SchemaCheck` refuses such schemas beforehand.

        Raises:
            InputError: `schema` is not a valid schema, or cannot be enforced with this vocabulary.

        """
        if self._unfit:
            raise InputError(self._unfit)
        self._compiled[schema] = matcher = self._compiled.pop(schema, None) or self._matcher(schema)
        if len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return Constraint(matcher.deep_copy())

    def refused(self, constraints: abc.Sequence[Constraint], vocab_size: int) -> NDArray[np.bool_]:
        """Return the tokens that may not come next, bool [constraints, vocab_size].

        The row of a constraint with an error refuses no token.
        """
        num_known = self._vocabulary.vocab_size
        allowed = allocate_token_bitmask(len(constraints), num_known)
        fill_next_token_bitmask_par(
            self._executor, [(one.matcher, row) for row, one in enumerate(constraints)], allowed
        )
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, count=num_known, bitorder="little")
        refused = np.ones((len(constraints), vocab_size), np.bool_)  # ids beyond the vocabulary have no text
        refused[:, :num_known] = bits[:, :vocab_size] == 0
        refused[[one.matcher.is_error() for one in constraints]] = False
        return refused

    @cached_property
    def _executor(self) -> LLExecutor:
        # Created on first use, because it starts threads. Most engines never need them, and a fork loses them.
        return LLExecutor(self._num_threads)

    def _matcher(self, schema: str) -> LLMatcher:
        read = with_exact_numbers(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(read, defaults=_STYLE)  # type: ignore[arg-type] # only the stub rejects it
        except ValueError as error:
            raise InputError(f"the JSON schema is not valid JSON: {str(error)[:_MAX_SAID]}") from error
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InputError(f"the JSON schema is not supported: {matcher.get_error()[:_MAX_SAID]}")
        matcher.compute_logit_bias()
        if matcher.is_error():  # llguidance only reports a schema that refers to nothing but itself at this point
            raise InputError("the JSON schema is not supported: no output can match it")
        return matcher
