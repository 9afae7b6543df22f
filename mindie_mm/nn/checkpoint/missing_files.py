"""Files that are missing in a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "qwen.tiktoken", "tiktoken.model"),
)
"""Files that transformers can build a tokenizer from, in order of precedence."""
_ONE_OF = (
    ("config.json",),
    VOCABULARIES,
    ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files of a checkpoint. It needs one file of each group, and the first one is the usual one."""
_SHOWN = 12
"""Maximum number of files that a message names."""


def missing_files(root: Path) -> list[str]:
    """Return the names of the usual files that a checkpoint directory does not have.

    Weight files count as missing if an index lists them.
    """
    missing = [names[0] for names in _ONE_OF if not any((root / name).is_file() for name in names)]
    for index in root.glob("*.index.json"):
        try:
            shards = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # loading reports a damaged index
            continue
        missing += sorted(str(shard) for shard in shards if not (root / str(shard)).is_file())
    return missing


def also_missing(root: Path, *named: str) -> str:
    """Return the end of an error message, which lists the missing files that the message has not mentioned yet."""
    others = [name for name in missing_files(root) if name not in named]
    return f". The folder also lacks {listed(others)}" if others else ""


def listed(names: list[str]) -> str:
    """Return the first `_SHOWN` of `names`, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
