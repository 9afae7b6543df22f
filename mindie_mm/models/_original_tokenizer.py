"""The tokenizer of checkpoints that were translated from their authors' layouts, for several families."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mindie_mm.nn.checkpoint.directory import Checkpoint


def original_tokenizer(checkpoint: Checkpoint, tags: Collection[str] = ()) -> Any:
    """Return the tokenizer of a tokenizer.json, in which the added tokens `tags` are not special.

    If there is no tokenizer.json, return `Checkpoint.fast_tokenizer`.
    """
    if not checkpoint.json("tokenizer.json"):
        return checkpoint.fast_tokenizer()
    from transformers import PreTrainedTokenizerFast  # imported late: the import takes a second

    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    template = checkpoint.path / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=checkpoint.tokenizer(lambda token: token["special"] and token["content"] not in tags),
        model_max_length=checkpoint.json("tokenizer_config.json").get("model_max_length"),
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        **{name: token for name in names if (token := checkpoint.special_token(name)) is not None},
    )
