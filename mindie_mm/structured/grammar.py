"""Constraints on the tokens of an output, which llguidance computes from a description of the output."""

from __future__ import annotations

from collections import abc
from functools import cached_property

import numpy as np
from cachetools import LRUCache
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mindie_mm.errors import InputError, panics_as
from mindie_mm.structured.dead_rules import NO_OUTPUT, matches_nothing
from mindie_mm.structured.outputs import StructuredOutputs
from mindie_mm.structured.translate import grammar_of

# The limits for fuel and items bound the time for computing a mask. This time is typically 0.02 ms. It is at most 3 ms,
# or 45 ms for a recursive grammar of single characters. The limits do not apply to compilation.
_LIMITS = LLParserLimits(
    verbose_errors=False,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
)
_MAX_SAID = 300
_REHEARSED = 8
KEPT = 16
"""Number of recent descriptions that stay compiled. A description that is slow to compile may need 7 MiB of memory."""


class Constraint:
    """A constraint on the next token of one output."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def error(self) -> str:
        """Reason why the output can no longer be constrained, or an empty string."""
        return self.matcher.get_error()[:_MAX_SAID] if self.matcher.is_error() else ""

    def accept(self, token: int) -> str:
        """Append a sampled token, and return the new `error`."""
        self.matcher.consume_token(token)
        return self.error


class Grammars:
    """A compiler of constraints for the vocabulary of one checkpoint."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: abc.Sequence[int], num_threads: int = 1) -> None:
        """Read the vocabulary. This takes a second for 150,000 tokens.

        Args:
            tokenizer: Tokenizer of the checkpoint.
            eos_token_ids: End-of-sequence ids. They are allowed only after a complete output.
            num_threads: Number of threads that compute masks.

        """
        self._num_threads = num_threads
        self._unfit = ""
        self._compiled = LRUCache[StructuredOutputs, LLMatcher](KEPT)
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if i not in eos_token_ids}
        self._added = {token.content: i for i, token in added.items()}
        self._shown = {token.content: i for i, token in added.items() if not token.special}
        unfit = "structured outputs cannot be used with this checkpoint's tokenizer"
        try:
            with panics_as(InputError, unfit):  # a token is too long for llguidance
                self._vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=list(eos_token_ids))
        except ValueError as error:
            self._unfit = f"{unfit}: {error}"
        except InputError as error:
            self._unfit = str(error)

    def __contains__(self, wanted: StructuredOutputs) -> bool:
        """Return whether `wanted` has been compiled."""
        return wanted in self._compiled

    def constraint(self, wanted: StructuredOutputs) -> Constraint:
        """Return the constraint for an output that conforms to `wanted`.

        Compilation may take arbitrarily long. `SchemaCheck` refuses descriptions that take too long.

        Raises:
            InputError: `wanted` is not valid, or cannot be enforced with this vocabulary.

        """
        if self._unfit:
            raise InputError(self._unfit)
        if (matcher := self._compiled.get(wanted)) is None:
            matcher = self._compiled[wanted] = self._matcher(wanted)
        return Constraint(matcher.deep_copy())

    def rehearse(self, wanted: StructuredOutputs) -> None:
        """Compile `wanted`, and try it with a few random tokens, as at the beginning of an answer.

        Raises:
            InputError: `wanted` is not valid or cannot be enforced, or its output would soon exceed a limit.

        """
        constraint = self.constraint(wanted)
        rng = np.random.default_rng(0)
        for _ in range(_REHEARSED):
            (refused,) = self.refused([constraint], self._vocabulary.vocab_size)
            refused[self._vocabulary.eos_tokens] = True
            allowed = np.flatnonzero(~refused)
            if not len(allowed) or constraint.accept(int(rng.choice(allowed))):
                break
        if constraint.error:
            raise InputError(f"{wanted.noun} is not supported: {constraint.error}")

    def refused(self, constraints: abc.Sequence[Constraint], vocab_size: int) -> NDArray[np.bool_]:
        """Return a bool array [constraints, vocab_size] that is True for tokens that are not allowed next.

        If a constraint has an error, its row is False for all tokens.
        """
        num_known = self._vocabulary.vocab_size
        allowed = allocate_token_bitmask(len(constraints), num_known)
        fill_next_token_bitmask_par(
            self._executor, [(one.matcher, row) for row, one in enumerate(constraints)], allowed
        )
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, count=num_known, bitorder="little")
        refused = np.ones((len(constraints), vocab_size), np.bool_)  # ids above the vocabulary have no text
        refused[:, :num_known] = bits[:, :vocab_size] == 0
        refused[[one.matcher.is_error() for one in constraints]] = False
        return refused

    @cached_property
    def _executor(self) -> LLExecutor:
        # The executor is created on first use, because it starts threads. Most engines do not need these threads, and a
        # forked process would not have them.
        return LLExecutor(self._num_threads)

    def _matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        wanted.check()
        matcher = self._try(wanted)
        if wanted.grammar is not None and matches_nothing(matcher.get_error()):
            matcher = self._try(wanted, check_schemas=True)  # another part of the grammar may have output
        if not matcher.is_error():
            matcher.compute_logit_bias()  # llguidance reports only here that a schema refers only to itself
        if matcher.is_error():
            error = matcher.get_error()[:_MAX_SAID]
            if matches_nothing(error):
                error = f"{NO_OUTPUT}: {error}" if "Unsatisfiable" in error else NO_OUTPUT
            raise InputError(f"{wanted.noun} is not supported: {error}")
        return matcher

    def _try(self, wanted: StructuredOutputs, *, check_schemas: bool = False) -> LLMatcher:
        with panics_as(InputError, f"{wanted.noun} is not supported"):  # a matcher catches the panics of later calls
            grammar = grammar_of(wanted, self._added, self._shown, _LIMITS, check_schemas=check_schemas)
            return LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
