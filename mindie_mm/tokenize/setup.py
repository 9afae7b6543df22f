"""Settings of a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mindie_mm.settings.config import ContentFormat, MediaCaps, Switch, WorkerConfig
from mindie_mm.settings.limits import PromptLimits


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a tokenizer. A tokenizer process gets them as JSON. `WorkerConfig` describes the fields."""

    model: str
    """Directory of the checkpoint."""
    family: str | None = None
    num_decoders: int = 0
    """Number of decoder processes. With 0, the tokenizer decodes in its own process."""
    arena_bytes: int
    """Capacity of the arena, and maximum total size of the arrays of one item in decoder processes."""
    arena_request_bytes: int | None = None
    arena_wait_s: float = 0.0
    preprocessed_cache_bytes: int = 0
    chat_template_content_format: ContentFormat = "auto"
    parse_special: Switch = "on"
    media: MediaCaps
    limit_mm_per_prompt: PromptLimits = {}
    bound_device: str | None = None
    """Device to whose CPUs the tokenizer process binds itself, or None."""
    states_sizes: bool = False
    """True if the traits of the tokenizer contain sizes, which only a worker without an engine needs."""

    @classmethod
    def of(cls, model: Path, config: WorkerConfig, *, states_sizes: bool = False) -> Setup:
        """Return the settings for the checkpoint directory `model`. `config.model` is not used."""
        given: dict[str, Any] = {"model": str(model), "states_sizes": states_sizes}
        return cls(**given, **{name: getattr(config, name) for name in cls.__struct_fields__ if name not in given})
