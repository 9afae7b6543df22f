"""Guesses of the next tokens of a request, which the engine checks together in one step.

Answers often repeat parts of the prompt or of themselves. The tokens that followed the last tokens at an earlier place
are therefore likely to follow again (Saxena, Prompt Lookup Decoding, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_GUESSES = 7
"""Default maximum number of guesses in a step: with the token before, as many tokens as cost little on the CPU."""
NGRAM = 3
"""Number of last tokens that are looked up. With fewer tokens, more guesses would be wrong."""
_RATE = 1 / 4
"""Weight of the newest guess in the accuracy. Guesses are checked after 2 right guesses, until at most 4 guesses in
succession are wrong."""
_LEAST = 0.4
"""Minimum probability that a guess that is checked is right. Checking it takes up to a seventh of the time of a step,
or more in models without compiled steps."""


class PromptLookup:
    """The places of all n-grams in the prompt and output of one request, and the accuracy of the latest guesses.

    The accuracy is measured even while no guess is checked, because comparing a guess with the token that is drawn
    next costs nothing.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        """Index of the token after the last occurrence of each n-gram."""
        self._num_known = 0
        """Number of tokens that have been looked at."""
        self._source: int | None = None
        """Index of the token that is the guess of the next token, or None if the last n-gram has not occurred before.
        While guesses are right, they come from the tokens that follow."""
        self._accuracy = 0.0
        """Average of the latest guesses, 1 for a right guess and 0 for a wrong guess."""

    def guess(self, ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most `most` guesses of the next tokens, as many as are worth checking.

        Args:
            ids: All tokens of prompt and output. Later calls add tokens.
            most: Maximum number of guesses.

        """
        self._compare(ids)
        self._record(ids)
        if self._source is None:
            self._source = self._places.get(tuple(ids[-NGRAM:]))
        number, probability = 0, self._accuracy
        while self._source is not None and number < most and probability >= _LEAST:
            number += 1
            probability *= self._accuracy
        if self._source is None or not number:
            return ()
        period = len(ids) - self._source  # the guesses may reach the end of the tokens, and then repeat themselves
        return tuple(ids[self._source + i % period] for i in range(number))

    def _compare(self, ids: Sequence[int]) -> None:
        """Compare the new tokens with their guesses, up to the first that is wrong."""
        for index in range(self._num_known, len(ids)):
            if self._source is None:
                break
            is_right = ids[index] == ids[self._source]
            self._accuracy += _RATE * (is_right - self._accuracy)
            self._source = self._source + 1 if is_right else None

    def _record(self, ids: Sequence[int]) -> None:
        """Record the places of the n-grams that have a next token."""
        for index in range(max(self._num_known, NGRAM), len(ids)):
            self._places[tuple(ids[index - NGRAM : index])] = index
        self._num_known = len(ids)
