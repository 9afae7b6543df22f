"""Ids of the tokens that end a sequence, collected from the files of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint

_log = logging.getLogger(__name__)

_TEXT_MODELS = ("text_config", "llm_config", "language_config")


def eos_token_ids(checkpoint: Checkpoint, default: Collection[int] = ()) -> tuple[int, ...]:
    """Return the ids that end a sequence, from generation_config.json or config.json, and from the tokenizer.

    The generation_config.json of a chat model may contain the token that ends a text, while tokenizer_config.json
    contains the token that ends a turn. vLLM uses both tokens, too.

    Args:
        checkpoint: The checkpoint.
        default: Ids to return if the checkpoint's files name no such token. They come from the family's original code.

    Raises:
        UnsupportedCheckpoint: An id is not an integer.

    """
    ids = list(_stated(checkpoint))
    if (token_id := tokenizers_eos(checkpoint)) is not None and token_id not in ids:
        ids.append(token_id)
    ids = ids or list(default)
    if not ids:
        _log.warning(
            "%s has no end-of-sequence token in generation_config.json, config.json or tokenizer_config.json; "
            "outputs end only at max_tokens",
            checkpoint.path,
        )
    return tuple(ids)


def _stated(checkpoint: Checkpoint) -> Iterator[int]:
    """Yield the ids from the first configuration file or section that has any."""
    config = checkpoint.config
    texts = [text for name in _TEXT_MODELS if isinstance(text := config.get(name), Mapping)]
    for source in (checkpoint.json("generation_config.json"), config, *texts):
        if (value := source.get("eos_token_id")) is not None:
            yield from ids_of(value, checkpoint.path)
            return


def ids_of(value: Any, where: Path) -> tuple[int, ...]:
    """Return the ids in a value of eos_token_id. Raise UnsupportedCheckpoint if an id is not an integer."""
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise UnsupportedCheckpoint(f"{where}: eos_token_id={value!r} must be an integer or a list of integers")
    return tuple(ids)


def tokenizers_eos(checkpoint: Checkpoint) -> int | None:
    """Return the id of the tokenizer's end-of-sequence token, or None if the tokenizer has none.

    As in transformers, special_tokens_map.json takes precedence over a tokenizer_config.json of an older release. If
    neither file names a token, the default of the tokenizer's class applies.
    """
    settings = checkpoint.json("tokenizer_config.json")
    entry = checkpoint.json("special_tokens_map.json").get("eos_token")
    mapped = entry["content"] if isinstance(entry, Mapping) else entry
    stated = checkpoint.special_token("eos_token")
    token = (stated or mapped) if "added_tokens_decoder" in settings else (mapped or stated)
    if token is None:
        return None if "eos_token" in settings else _of_class(checkpoint)
    described = checkpoint.json("tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in described.get("added_tokens", ())}
    decoder = checkpoint.json("tokenizer_config.json").get("added_tokens_decoder") or {}
    added |= {entry["content"]: int(token_id) for token_id, entry in decoder.items()}
    end_id = {**_vocabulary(described), **checkpoint.json("added_tokens.json"), **added}.get(token)
    return None if end_id is None else int(end_id)


def _of_class(checkpoint: Checkpoint) -> int | None:
    """Return the id of the default end-of-sequence token of the tokenizer's class. Qwen2's class has such a default."""
    if not checkpoint.json("tokenizer_config.json").get("tokenizer_class"):
        return None
    from transformers import AutoTokenizer  # imported late: nearly all checkpoints name the token

    try:
        token_id: int | None = AutoTokenizer.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        ).eos_token_id
    except Exception:  # noqa: BLE001 - the class may be code in the checkpoint, or its files incomplete
        return None
    return token_id


def _vocabulary(described: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the id of each token in a tokenizer.json. Unigram models store a list of tokens and scores."""
    tokens = (described.get("model") or {}).get("vocab") or {}
    return tokens if isinstance(tokens, Mapping) else {token: at for at, (token, *_) in enumerate(tokens)}
