"""A note about the tasks of the embedded checkpoint, for users who ask it about something else."""

from __future__ import annotations

from pathlib import Path

from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.settings.paths import absolute

REAL_MODEL = "Qwen/Qwen2-VL-2B-Instruct"
"""Name of a small checkpoint on the Hugging Face Hub that understands photographs."""


def demo_note(model: Path | None, command: str = "mindie-mm serve") -> str | None:
    """Return the tasks of the embedded checkpoint and the way to run a real one.

    Return None for other checkpoints.

    Args:
        model: Checkpoint directory, or None for the embedded checkpoint.
        command: Command that runs a checkpoint if its name follows.

    """
    if model is not None and absolute(model) != EMBEDDED:
        return None
    return f"demo model: drawn shapes and simple audio only. For a real model: {command} {REAL_MODEL}"
