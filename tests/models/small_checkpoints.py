"""Parts of small random checkpoints: tokenizers, and transformers models with seeded weights."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CORPUS = ("What is in the image? Describe this picture. a red square, a blue circle. system user assistant",)
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "initializer_range": 0.2,  # large enough for images to change the logits
}
"""Configuration of a small CLIP or SigLIP tower."""
TEXT: Mapping[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
"""Configuration of a small Llama or Qwen2. Compiled steps of int8 need multiples of 64, and heads of 16."""


def save_tokenizer(out: Path, special_tokens: Sequence[str], **settings: Any) -> PreTrainedTokenizerFast:
    """Write a byte-level tokenizer of at most 400 tokens, the special tokens first.

    `settings` are arguments of PreTrainedTokenizerFast.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[*special_tokens]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    fast.save_pretrained(out)
    return fast


def save_unigram_tokenizer(out: Path, special_tokens: Sequence[str], **settings: Any) -> PreTrainedTokenizerFast:
    """Write a Unigram tokenizer like T5's, whose pieces begin with a space and include the special tokens.

    `special_tokens` must include <unk> and </s>. The tokenizer appends </s> to every text.
    """
    # The tokenizer is not trained, because training gives different pieces in each run.
    letters = ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    words = sorted({f"▁{word}" for text in CORPUS for word in text.split()})
    pieces = [(token, 0.0) for token in special_tokens]
    pieces += [(piece, -5.0 - index / 100) for index, piece in enumerate([*words, *letters])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=special_tokens.index("<unk>")))
    tokenizer.add_special_tokens([*special_tokens])
    tokenizer.normalizer = normalizers.NFKC()  # nearly the same as T5's own
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    end = ("</s>", special_tokens.index("</s>"))
    tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[end])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    fast.save_pretrained(out)
    return fast


def changed(path: Path, out: Path, file: str, change: Mapping[str, Any]) -> Path:
    """Copy the checkpoint `path`, and apply `change` to the JSON file `file`, such as config."""
    shutil.copytree(path, out)
    save_json(out, **{file: json.loads((out / f"{file}.json").read_text()) | change})
    return out


def without_token(path: Path, out: Path, token: str) -> Path:
    """Copy the checkpoint `path`, and replace `token` in tokenizer.json by a different token."""
    shutil.copytree(path, out)
    described = json.loads((out / "tokenizer.json").read_text())
    (added,) = (added for added in described["added_tokens"] if added["content"] == token)
    added["content"] = "<unused>"
    described["model"]["vocab"].pop(token, None)
    (out / "tokenizer.json").write_text(json.dumps(described))
    return out


_last_saved: dict[tuple[type[Any], Path, bytes], Any] = {}
"""The model that `save_model` wrote last, by its class, its directory and the contents of its config.json."""


def save_model(out: Path, cls: type[Any], config: Any, eos: int | Sequence[int], pad: int, seed: int = 0) -> None:
    """Write a model of class `cls` with random weights."""
    torch.manual_seed(seed)
    model = cls(config)
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = pad
    model.save_pretrained(out)
    _last_saved.clear()
    _last_saved[cls, out, (out / "config.json").read_bytes()] = model


def read_model(cls: type[Any], path: Path) -> Any:
    """Return the model of a checkpoint in float32. If `save_model` has just written it, do not read it from its files.

    A second call for the same checkpoint returns another model.
    """
    saved = _last_saved.pop((cls, path, (path / "config.json").read_bytes()), None)
    return cls.from_pretrained(path, dtype=torch.float32) if saved is None else saved


def save_json(out: Path, **files: Mapping[str, Any]) -> None:
    """Write each argument as a JSON file of that name, such as preprocessor_config."""
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content))
