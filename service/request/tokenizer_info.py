"""Settings of the tokenizer for GET /tokenizer_info."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindie_mm.errors import UnsupportedCheckpoint, os_errors_as
from mindie_mm.nn.checkpoint.directory import Checkpoint

_FILE = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_PATHS = frozenset({"name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"})
"""Keys whose values may be paths on the machine that saved the checkpoint."""


def tokenizer_info(model: str | Path | None) -> dict[str, Any]:
    """Return the contents of a checkpoint's tokenizer_config.json. Add the tokenizer class and the chat template.

    Raises:
        UnsupportedCheckpoint: A file cannot be read.

    """
    checkpoint = Checkpoint.open(model)
    settings = {name: value for name, value in checkpoint.json(_FILE).items() if name not in _PATHS}
    template = settings.pop("chat_template", None) or _template(checkpoint)
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    return settings if template is None else {**settings, "chat_template": template}


def _template(checkpoint: Checkpoint) -> Any:
    """Return the chat template from a file other than tokenizer_config.json, or None."""
    file = checkpoint.path / _TEMPLATE
    with os_errors_as(UnsupportedCheckpoint, f"{file} cannot be read"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json"):
        if template := checkpoint.json(name).get("chat_template"):
            return template
    return None
