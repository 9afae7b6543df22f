"""Small checkpoints for which vLLM's answers are stored."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'video' %}VIDEO"
    "{% elif p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_MARKS = {
    "llava": ("<image>\n", ""),
    "llava_next": ("<image>\n", ""),
    "llava_onevision": ("<image>\n", "<video>\n"),
    "gemma3": ("<start_of_image>", ""),
    "idefics3": ("<image>", ""),
    "molmo2": ("<|image|>", "<|video|>"),
}
"""Texts of an image and of a video in the chat template, for families whose small checkpoint has no such template."""

_PUBLISHED = {
    "llava_onevision": [(name, "anyres_max_3", "anyres_max_9") for name in ("config.json", "processor_config.json")],
    "molmo2": [("config.json", '"max_position_embeddings": 2048', '"max_position_embeddings": 36864')],
    "qwen3_vl": [("video_preprocessor_config.json", '"max_frames": 24', '"max_frames": 768')],
}
"""Files, settings in the small checkpoint, and settings of all published checkpoints, which vLLM assumes."""


_WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes of a text model with heads of 32 numbers, the fewest that vLLM runs on the CPU."""


def write(family: str, out: Path, *, is_run: bool = False) -> Path:
    """Write the checkpoint that the tests for a family use, with a chat template, to the folder `out`.

    With `is_run`, vLLM can also run the model of a family whose text model is that of most small checkpoints.
    """
    if family == "qwen2vl":
        from tools.random_checkpoint import write_checkpoint

        return write_checkpoint(out, "wide")
    out.mkdir()
    module = import_module(f"tests.models.test_{family}")
    contract = next(
        one
        for one in vars(module).values()
        if inspect.isclass(one) and one.__module__ == module.__name__ and hasattr(one, "write_checkpoint")
    )
    with patch.object(module, "TEXT", {**module.TEXT, **_WIDE}) if is_run else nullcontext():
        contract.write_checkpoint(out)
    if is_run:
        _rename_tower(out / "model.safetensors")
    for name, own, published in _PUBLISHED.get(family, ()):
        (out / name).write_text((out / name).read_text().replace(own, published))
    if family == "gemma3":  # as in the published tokenizer
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        tokenizer.add_tokens(["\n" * number for number in range(1, 5)])
        tokenizer.save(str(out / "tokenizer.json"))
    if family == "molmo2":  # vLLM reads ids that transformers' class leaves out, but published checkpoints state
        config, tokenizer = (
            json.loads((out / "config.json").read_text()),
            Tokenizer.from_file(str(out / "tokenizer.json")),
        )
        ids = {"image_col_id": tokenizer.token_to_id("<im_col>"), "image_low_res_id": tokenizer.token_to_id("<im_low>")}
        (out / "config.json").write_text(json.dumps(config | ids))
    if family in _MARKS:
        image, video = _MARKS[family]
        (out / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", image).replace("VIDEO", video))
    return out


def _rename_tower(path: Path) -> None:
    """Give the weights of a CLIP or SigLIP tower their names in published checkpoints, which vLLM expects."""
    weights = load_file(path)
    if any(name.startswith("vision_tower.embeddings.patch_embedding.") for name in weights):
        weights = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): one for name, one in weights.items()}
        save_file(weights, path, {"format": "pt"})
