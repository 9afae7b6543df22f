"""Tokens of words that must not be generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from mindie_mm.errors import InputError, panics_as


def bad_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the token sequences that encode each word at the beginning of the text and after a space.

    vLLM drops the second sequence if it is longer or shorter than the first. The model could then generate the word
    after a space.

    Raises:
        InputError: A word has no tokens.

    """
    for word in words:
        bare = word.lstrip()
        with panics_as(InputError, f"bad_words contains {word!r}, which the tokenizer cannot encode"):
            plain, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (bare, f" {bare}"))
        if not plain:
            raise InputError(f"bad_words contains {word!r}, which has no tokens; leave it out", param="bad_words")
        yield plain
        if spaced[-len(plain) :] != plain:
            yield spaced
