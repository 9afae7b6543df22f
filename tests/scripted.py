"""Makes a checkpoint that writes given texts word for word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mindie_mm

TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
_OPENING = "<|im_start|>assistant\n"


def make_scripted(folder: Path, texts: Mapping[str, list[str]]) -> None:
    """Make a copy of the embedded checkpoint that answers with the text that `chat_template_kwargs` names.

    The copy has no attention and no MLPs, so each token decides the next one. `{"script": NAME}` starts the text
    `texts[NAME]`, whose pieces are one token each.
    """
    shutil.copytree(TINY, folder)
    tokenizer, settings, config = (_read(folder, name) for name in ("tokenizer", "tokenizer_config", "config"))
    number = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    follows: dict[int, int] = {}
    for name, pieces in texts.items():
        for index, content in enumerate((f"<|{name}|>", *pieces)):
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            token = {"content": content, **plain, "special": index == 0}
            tokenizer["added_tokens"].append({"id": number, **token})
            settings["added_tokens_decoder"][str(number)] = token
            follows[number] = number + 1 if index < len(pieces) else config["eos_token_id"]
            number += 1
    chosen = "".join("{% if script == '" + name + "' %}<|" + name + "|>{% endif %}" for name in texts)
    assert settings["chat_template"].count(_OPENING) == 1
    settings["chat_template"] = settings["chat_template"].replace(_OPENING, _OPENING + chosen)
    size = -(-number // 8) * 8
    config["text_config"]["vocab_size"] = size
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    save_file(_weights(follows, size), folder / "model.safetensors", metadata={"format": "pt"})
    for name, value in (("tokenizer", tokenizer), ("tokenizer_config", settings), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _read(folder: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return read


def _weights(follows: Mapping[int, int], size: int) -> dict[str, torch.Tensor]:
    weights = load_file(TINY / "model.safetensors")
    old = weights["model.embed_tokens.weight"]
    width, generator = old.shape[1], torch.Generator().manual_seed(0)
    assert len(follows) <= width, "each scripted token needs a direction of its own"
    rows = torch.nn.functional.normalize(torch.randn(size, width, generator=generator))
    rows[list(follows)] = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][: len(follows)]
    head = torch.zeros(size, width)
    for token, following in follows.items():
        head[following] += 60 * rows[token]
    for name, weight in weights.items():
        if name.startswith("model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weight)
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = rows.to(old.dtype), head.to(old.dtype)
    return weights
