"""Tokenizers from vocabularies in tiktoken's format, whose own code would have to be run otherwise."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.folder_errors import check_pointer


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ids of the BPE tokens. Raise UnsupportedCheckpoint unless they are 0 to n - 1."""
    check_pointer(file)
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
        data = file.read_bytes()
    try:
        pairs = [line.split() for line in data.splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{file.parent} has an unreadable {file.name}: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UnsupportedCheckpoint(
            f"{file.parent}: the ranks in {file.name} are not the numbers from 0 to {len(ranks) - 1}"
        )
    return ranks


def bpe_tokenizer(ranks: dict[bytes, int], pattern: str) -> Any:
    """Return a `tokenizers.Tokenizer` with the BPE tokens of `ranks`, which splits texts by `pattern` first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    # List all splits of a token into two other tokens, lowest rank first. tiktoken merges tokens in the same order.
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
